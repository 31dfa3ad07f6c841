"""Which kernel and config the experts of a layer get for a number of pairs of token and slot: guesses, not measured yet."""

from __future__ import annotations

import math

from bitline.kernels.hopper import layout
from bitline.kernels.hopper.config import SmallMConfig, WgmmaConfig
from bitline.kernels.hopper.scheme import DequantScheme
from bitline.types import LinearSpec

LARGEST_BLOCK = 32  # pairs of a block of `experts_small_m`; larger tiles are `experts_persistent`'s
# n16_per_warp, warps_per_k_slice, num_warps, stages: the fastest shapes of plain layers among those with two tiles a warp
_SMALL = ((2, 4, 8, 3), (2, 2, 8, 3), (2, 1, 8, 2), (2, 2, 4, 3), (2, 1, 4, 4), (2, 1, 2, 4))


def small_m_config(
    spec: LinearSpec, scheme: DequantScheme, tile: int, blocks: float, gated: bool, sms: int
) -> SmallMConfig | None:  # fmt: skip
    """The config of `experts_small_m` whose busiest SM has the least to do, the first of equals; None where W is too small.

    blocks: expected number of blocks of `tile` pairs.
    """
    n16_tiles, columns = layout.padded_shape(spec.n, spec.k)
    halves = 2 if gated else 1
    k_tiles = -(-columns // (64 * scheme.pipelined().k_blocks_per_tile))
    best, least = None, math.inf
    for n16, warps_per_k_slice, warps, stages in _SMALL:
        config = SmallMConfig(
            n16, warps, stages=stages, warps_per_k_slice=warps_per_k_slice, stage_x=True, pdl_early=stages > 2
        ).fit_stages(scheme, tile)  # fmt: skip
        if config is None or config.n16_per_cta > n16_tiles:
            continue
        ctas = blocks * math.ceil(n16_tiles // halves / (config.n16_per_cta // halves))
        iterations = math.ceil(k_tiles / config.k_slices)
        work = math.ceil(ctas / sms) * config.n16_per_cta * config.k_slices * iterations
        if work < least:
            best, least = config, work
    return best


def persistent_config(scheme: DequantScheme, tile: int, gated: bool, sms: int) -> WgmmaConfig:
    """The config of `experts_persistent` for tiles of `tile` rows of x; raster_group_n counts tiles along M there."""
    config = WgmmaConfig(
        tile, n64_per_warpgroup=2 if gated else 1, num_ctas=sms, pingpong=tile == 128 and not gated, raster_group_n=8
    )
    return config.fit_stages(scheme)
