"""Launch configurations of the kernels with 4-bit weights and 8-bit activations, and which one a layer gets for a given M."""

from __future__ import annotations

import functools
from typing import NamedTuple

from bitline.kernels.hopper.config import SMEM_BYTES, WgmmaConfig
from bitline.kernels.hopper.scaled_config import m_bucket
from bitline.kernels.hopper.w4a8_scheme import W4A8Scheme

W4A8_SMALL_M = 32  # up to here `w4a8_small_m`
RESIDENT_K = 8192  # up to here each CTA quantizes a single row of x for itself
_CHUNK = 2048


class W4A8SmallMConfig(NamedTuple):
    """A config of `w4a8_small_m`, and its compile-time part.

    n16: 16-row tiles of W per tile. tile_m: rows of x, 8, 16 or 32. k_blocks: of 128 columns, per stage. scale_entries: of 16
    scales, per 16-row tile and stage. resident: x is quantized in shared memory by each CTA. x_chunks: of 2048 columns.
    overlap: a product is added while the next one's MMA runs.
    """

    n16: int
    tile_m: int
    stages: int
    k_blocks: int
    scale_entries: int
    resident: bool = False
    x_chunks: int = 0
    overlap: bool = True

    @property
    def parts(self) -> int:
        """64-row parts of a tile."""
        return -(-self.n16 // 4)

    def smem_bytes(self) -> int:
        """Shared memory of a CTA without mbarriers."""
        entries = 64 * self.scale_entries
        boxes = self.stages * self.n16 + 4 * self.parts - self.n16
        x = self.x_chunks * 16 if self.resident else self.stages * self.k_blocks
        reduced = self.parts * 64 * self.tile_m * 4
        return boxes * (1024 * self.k_blocks + entries) + x * 128 * self.tile_m + reduced + 256

    def fit_stages(self) -> W4A8SmallMConfig:
        """The same with as many stages as fit, an even number (see `device.w4a8_small_m`)."""
        config = self._replace(stages=self.stages // 2 * 2)
        while config.smem_bytes() > SMEM_BYTES:
            config = config._replace(stages=config.stages - 2)
        return config


def scale_entries(scheme: W4A8Scheme, k_blocks: int) -> int:
    """Entries of 16 scales that a stage loads per 16-row tile; two at least, for boxes of 128 bytes."""
    return max(2, k_blocks * scheme.traits.groups_per_k_block // scheme.traits.k_blocks_per_scale)


@functools.lru_cache(maxsize=4096)
def w4a8_small_m_config(m: int, n: int, k: int, scheme: W4A8Scheme, sms: int) -> W4A8SmallMConfig:
    """Tiles of equally many rows for all SMs, in as few rounds as tiles of at most 256 rows allow."""
    tile_m = max(8, m_bucket(m))
    tiles = -(-n // 16)
    rounds = -(-tiles // (16 * sms))
    n16 = -(-tiles // (rounds * sms))
    per_scale = scheme.traits.k_blocks_per_scale
    k_blocks = 4 if n16 <= 4 and tile_m <= 16 and scheme.traits.groups_per_k_block < 4 else 2
    while k_blocks > 1 and max(k_blocks, per_scale) % min(k_blocks, per_scale):
        k_blocks //= 2
    resident = m == 1 and k <= RESIDENT_K
    overlap = (-(-n16 // 4) + 2 * scheme.traits.groups_per_k_block) * tile_m <= 160  # registers of accumulators and products
    config = W4A8SmallMConfig(
        n16, tile_m, 16, k_blocks, scale_entries(scheme, k_blocks), resident, -(-k // _CHUNK) if resident else 0, overlap
    )
    return config.fit_stages()


def fit_persistent_stages(config: WgmmaConfig, scheme: W4A8Scheme) -> WgmmaConfig:
    """The config of `w4a8_persistent` with as many stages as fit."""
    scales = 64 * scheme.traits.groups_per_k_block if scheme.traits.scaled_in_groups else 0
    stage = config.cta_m * 128 + 8 * (1024 + scales)
    fit = (SMEM_BYTES - 128 * config.tile_m * 2) // stage
    return config._replace(stages=min(config.stages, fit))
