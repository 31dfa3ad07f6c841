"""Which config of `scaled_persistent` a layer gets for a given M, and estimated times with quantized activations."""

from __future__ import annotations

import functools

from bitline.kernels.hopper.config import WgmmaConfig
from bitline.kernels.hopper.heuristics import WgmmaCost, cheapest_wgmma
from bitline.kernels.hopper.scaled_config import SCALED_SMALL_M
from bitline.kernels.hopper.scaled_scheme import ScaledScheme

_TILE = WgmmaConfig(tile_m=128, k_blocks_per_stage=2, stages=8, pingpong=True)
_WIDE, _WIDEST = _TILE._replace(tile_m_extra=64, pingpong=False), _TILE._replace(tile_m_extra=128, pingpong=False)

# Measured on an H200: least squares over 123 timings of six layers with E4M3 and one scale per token, within 3 to 5 % of them in
# the median. The times of a K block are the medians of later timings, those of the other schemes of one to three layers.
FP8_COSTS = {
    _TILE: WgmmaCost(3.5, 0.212, 0.78, 5.7, 1.03),
    _WIDE: WgmmaCost(3.3, 0.335, 0.0, 7.6, 1.02),
    _WIDEST: WgmmaCost(0.3, 0.352, 4.1, 9.3, 1.63),
}
GROUPED_COSTS = {
    _TILE: FP8_COSTS[_TILE]._replace(k_block=0.305),
    _WIDE: FP8_COSTS[_WIDE]._replace(k_block=0.43),
    _WIDEST: FP8_COSTS[_WIDEST]._replace(k_block=0.485),
}
INT8_COSTS = {
    _TILE: FP8_COSTS[_TILE]._replace(k_block=0.217),
    _WIDE: FP8_COSTS[_WIDE]._replace(k_block=0.31),
    _WIDEST: FP8_COSTS[_WIDEST]._replace(k_block=0.3),
}


@functools.lru_cache(maxsize=65536)
def _cheapest(m: int, n: int, k: int, scheme: ScaledScheme, sms: int) -> tuple[float, WgmmaConfig]:
    """(us, config) of `scaled_persistent`."""
    traits = scheme.traits
    costs = INT8_COSTS if not traits.fp8 else GROUPED_COSTS if traits.scaled_in_groups else FP8_COSTS
    return cheapest_wgmma(costs, m, n, k, sms)


def scaled_persistent_config(m: int, n: int, k: int, scheme: ScaledScheme, sms: int) -> WgmmaConfig:
    """The cheapest config for x [m, k] and W [n, k] on `sms` SMs."""
    return _cheapest(m, n, k, scheme, sms)[1]


def estimated_us(m: int, n: int, k: int, scheme: ScaledScheme, weight_bytes: int, sms: int = 132) -> float:
    """Estimated time of a call on an H200, quantization of x included."""
    if m <= SCALED_SMALL_M:
        return 4.4 + weight_bytes / 4.38e6 + m * (6e-6 * k + 5.5e-6 * n)
    return _cheapest(m, n, k, scheme, sms)[0] + 0.9e-6 * m * k
