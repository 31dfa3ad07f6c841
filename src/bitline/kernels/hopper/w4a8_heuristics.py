"""Which config of `w4a8_persistent` a layer gets for a given M, and estimated times with 4-bit weights and 8-bit activations."""

from __future__ import annotations

import functools

from bitline.kernels.hopper.config import WgmmaConfig
from bitline.kernels.hopper.heuristics import WgmmaCost, cheapest_wgmma
from bitline.kernels.hopper.w4a8_config import RESIDENT_K, W4A8_SMALL_M
from bitline.kernels.hopper.w4a8_scheme import W4A8Scheme

_TILE = WgmmaConfig(tile_m=128, k_blocks_per_stage=2, stages=8, pingpong=True)
_HALF = _TILE._replace(tile_m=64)
_WIDE, _WIDEST = _TILE._replace(tile_m_extra=64), _TILE._replace(tile_m_extra=128)

# Fitted to some 40 timings of two layers on an H200, E4M3 in groups of 128 columns; tile and stream-K times of the larger tiles
# are those of 8-bit weights. Other schemes are guessed to take the same.
COSTS = {
    _HALF: WgmmaCost(3.5, 0.2, 0.78, 4.5, 0.4),
    _TILE: WgmmaCost(3.5, 0.235, 0.78, 5.7, 1.03),
    _WIDE: WgmmaCost(3.3, 0.37, 0.0, 7.6, 1.02),
    _WIDEST: WgmmaCost(0.3, 0.42, 4.1, 9.3, 1.63),
}


@functools.lru_cache(maxsize=65536)
def _cheapest(m: int, n: int, k: int, scheme: W4A8Scheme, sms: int) -> tuple[float, WgmmaConfig]:
    """(us, config) of `w4a8_persistent`."""
    traits = scheme.traits
    wide = traits.groups_per_k_block == 1 and (traits.fp8 or traits.exact_int32)  # else accumulators and products spill
    return cheapest_wgmma({c: cost for c, cost in COSTS.items() if wide or c is not _WIDEST}, m, n, k, sms)


def w4a8_persistent_config(m: int, n: int, k: int, scheme: W4A8Scheme, sms: int) -> WgmmaConfig:
    """The cheapest config for x [m, k] and W [n, k] on `sms` SMs."""
    return _cheapest(m, n, k, scheme, sms)[1]


def estimated_us(m: int, n: int, k: int, scheme: W4A8Scheme, weight_bytes: int, sms: int = 132) -> float:
    """Estimated time of a call on an H200, quantization of x included. Up to M = 32 fitted to ten timings of two layers."""
    if m <= W4A8_SMALL_M:
        handed_over = 0.0 if m == 1 and k <= RESIDENT_K else 2.0
        return 4.0 + handed_over + weight_bytes / 4.2e6 + m * (6e-6 * k + 5.5e-6 * n)
    return _cheapest(m, n, k, scheme, sms)[0] + 0.9e-6 * m * k
