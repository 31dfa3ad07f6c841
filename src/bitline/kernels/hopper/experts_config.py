"""Which kernel and config the experts of a layer get for a number of pairs of token and slot.

From a sweep on an H200 over 128 x 768 x 2048, 8 x 14336 x 4096 and 256 x 2048 x 7168 experts with W4A16, and 32 x 2880 x 2880
with MXFP4A16, 1 to 4096 tokens: each projection's 17 to 27 shapes of `experts_small_m` and 4 to 8 of `experts_persistent` a tile.
"""

from __future__ import annotations

import math

from bitline.kernels.hopper import layout
from bitline.kernels.hopper.config import SmallMConfig, WgmmaConfig
from bitline.kernels.hopper.scheme import DequantScheme
from bitline.types import LinearSpec

LARGEST_BLOCK = 16  # pairs of a block of `experts_small_m`; larger tiles are `experts_persistent`'s
_TILES = ((8, 6), (16, 12), (32, 24), (64, 96))  # (tile, the most pairs that an expert has on average)
# n16_per_warp, warps_per_k_slice, num_warps, stages; the last for narrow W
_GATED = ((2, 1, 4, 3), (2, 4, 4, 4), (2, 8, 8, 4))
_PLAIN = ((2, 4, 8, 3), (2, 2, 4, 3), (2, 4, 4, 4), (2, 1, 4, 3))


def tile_for(pairs_per_expert: float) -> int:
    """The tile of pairs for experts that have so many each on average."""
    return next((tile for tile, most in _TILES if pairs_per_expert <= most), 128)


def small_m_config(
    spec: LinearSpec, scheme: DequantScheme, tile: int, blocks: float, gated: bool, sms: int
) -> SmallMConfig | None:  # fmt: skip
    """The config of `experts_small_m` with the least work of an SM; None where W is too small.

    blocks: expected number of blocks of `tile` pairs. Of the sweep's choices with up to 12 pairs an expert it takes on average
    1.05 (gated) and 1.01 times the fastest's time, at most 1.19 and 1.09.
    """
    n16_tiles, columns = layout.padded_shape(spec.n, spec.k)
    halves = 2 if gated else 1
    k_tiles = -(-columns // (64 * scheme.pipelined().k_blocks_per_tile))
    best, least = None, math.inf
    for n16, warps_per_k_slice, warps, stages in _GATED if gated else _PLAIN:
        config = SmallMConfig(
            n16, warps, stages=stages, warps_per_k_slice=warps_per_k_slice, stage_x=True, pdl_early=stages > 2
        ).fit_stages(scheme, tile)  # fmt: skip
        if config is None or config.n16_per_cta > n16_tiles:
            continue
        ctas = blocks * math.ceil(n16_tiles // halves / (config.n16_per_cta // halves))
        iterations = math.ceil(k_tiles / config.k_slices)
        per_iteration = config.n16_per_cta * config.k_slices
        if gated:
            work: float = math.ceil(ctas / sms) * (per_iteration * iterations + 16)
        else:
            work = (max(1.0, ctas / sms) + 1) * per_iteration * (iterations + 0.5)
        if work < least:
            best, least = config, work
    return best


def persistent_config(spec: LinearSpec, scheme: DequantScheme, tile: int, blocks: float, gated: bool, sms: int) -> WgmmaConfig:
    """The config of `experts_persistent` for tiles of `tile` rows of x; raster_group_n counts tiles along M there.

    W's rows per tile where it is not gated: 256, or 128 where those leave fewer SMs without a tile at the end.
    """

    def waves(n64_per_warpgroup: int) -> float:
        tiles = blocks * math.ceil(spec.n / (128 * n64_per_warpgroup))
        return math.ceil(tiles / sms) * (1.0 if n64_per_warpgroup == 2 else 0.54)

    n64 = 2 if gated or (tile < 128 and waves(2) <= waves(1)) else 1
    k_blocks = 1 if tile == 128 and gated else 2
    config = WgmmaConfig(tile, n64_per_warpgroup=n64, k_blocks_per_stage=k_blocks, num_ctas=sms, raster_group_n=8)
    return config.fit_stages(scheme)
