"""Launch configurations of the kernels with quantized activations, and which one a layer gets for a given M."""

from __future__ import annotations

import functools
from typing import NamedTuple

from bitline.kernels.hopper.config import SMEM_BYTES, WgmmaConfig

SCALED_SMALL_M = 64  # up to here `scaled_small_m`
WHOLE_ROW = 1 << 20  # K blocks that share a weight scale, where scales do not change along K
PRIVATE_BYTES = 1 << 18  # up to so many of W per CTA, each CTA quantizes a single row of x for itself


class ScaledSmallMConfig(NamedTuple):
    """A config of `scaled_small_m`, and its compile-time part.

    rows: of W per tile. box_rows: per TMA load. tile_m: rows of x, 8, 16, 32 or 64. k_blocks_per_stage: of 128 columns.
    n64_per_warpgroup: 64-row parts of a tile per warpgroup. scale_box: scales of x per TMA load, where they change along K.
    private: each CTA quantizes all of x for itself.
    """

    rows: int
    box_rows: int
    tile_m: int
    stages: int
    k_blocks_per_stage: int
    n64_per_warpgroup: int
    num_consumer_warpgroups: int
    scale_box: int
    private: bool = False

    def smem_bytes(self) -> int:
        """Shared memory of a CTA without mbarriers."""
        return self.stages * self.k_blocks_per_stage * ((self.rows + self.tile_m) * 128 + 4 * self.scale_box) + 64 * 128

    def fit_stages(self) -> ScaledSmallMConfig:
        """The same with as many stages as fit."""
        config = self
        while config.smem_bytes() > SMEM_BYTES:
            config = config._replace(stages=config.stages - 1)
        return config


def m_bucket(m: int) -> int:
    """The largest M with the launch plan of `m`."""
    return m if m == 1 else max(8, 1 << (m - 1).bit_length())


@functools.lru_cache(maxsize=4096)
def scaled_small_m_config(m: int, n: int, k: int, sms: int) -> ScaledSmallMConfig:
    """Tiles of equally many rows for all SMs, in as few rounds as tiles of at most 256 rows allow."""
    tile_m = max(8, m_bucket(m))
    rounds = -(-n // (256 * sms))
    rows = -(-n // (rounds * sms))
    rows = -(-rows // 8) * 8 if rows <= 64 else -(-rows // 16) * 16
    parts = -(-rows // 64)
    warpgroups = min(2, parts)
    box_rows = next(b for b in (64, 32, 16, 8) if rows % b == 0)
    k_blocks = 2 if rows > 64 else 4 if rows > 32 or tile_m == 64 else 8
    private = m == 1 and rounds * rows * k <= PRIVATE_BYTES
    return ScaledSmallMConfig(
        rows, box_rows, tile_m, 24, k_blocks, -(-parts // warpgroups), warpgroups, max(32, tile_m), private
    ).fit_stages()  # fmt: skip


def scaled_smem_bytes(config: WgmmaConfig, grouped: bool) -> int:
    """Shared memory of a CTA of `scaled_persistent` without mbarriers: the pipeline's stages, and the tile of y."""
    rows = 64 * config.num_consumer_warpgroups
    stage = 128 * (rows + config.cta_m) + (4 * config.cta_m if grouped else 0)
    return config.stages * stage + rows * config.tile_m * 2


def fit_scaled_stages(config: WgmmaConfig, grouped: bool) -> WgmmaConfig:
    """The config with as many stages as fit. grouped: scales of x change along K."""
    while scaled_smem_bytes(config, grouped) > SMEM_BYTES:
        config = config._replace(stages=config.stages - 1)
    return config
