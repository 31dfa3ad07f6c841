"""Which config of the persistent kernels a layer gets for a given M, and estimated times with quantized activations."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from bitline.kernels.hopper.config import LargeMConfig, PersistentConfig, WgmmaConfig
from bitline.kernels.hopper.heuristics import WgmmaCost, cheapest_wgmma
from bitline.kernels.hopper.scaled_config import SCALED_SMALL_M
from bitline.kernels.hopper.scaled_scheme import ScaledScheme

Costs = Mapping[PersistentConfig, WgmmaCost]

_TILE = WgmmaConfig(tile_m=128, k_blocks_per_stage=2, stages=8, pingpong=True)
_WIDE, _WIDEST = _TILE._replace(tile_m_extra=64, pingpong=False), _TILE._replace(tile_m_extra=128, pingpong=False)
_LARGE_128, _LARGE_256 = LargeMConfig(128), LargeMConfig(256)

# Measured on an H200: least squares over 123 timings of six layers with E4M3 and one scale per token, within 3 to 5 % of them in
# the median. The times of a K block are the medians of later timings, those of the other schemes of one to three layers.
FP8_COSTS: Costs = {
    _TILE: WgmmaCost(3.5, 0.212, 0.78, 5.7, 1.03),
    _WIDE: WgmmaCost(3.3, 0.335, 0.0, 7.6, 1.02),
    _WIDEST: WgmmaCost(0.3, 0.352, 4.1, 9.3, 1.63),
    _LARGE_128: WgmmaCost(5.0, 0.207, 0.0, 0.0, 3.09),
}
UNALIGNED_COSTS: Costs = {
    _TILE: FP8_COSTS[_TILE]._replace(k_block=0.305),
    _WIDE: FP8_COSTS[_WIDE]._replace(k_block=0.43),
    _WIDEST: FP8_COSTS[_WIDEST]._replace(k_block=0.485),
}
# Those of `scaled_large_m`: least squares over six to eight timings of four layers, within 5 % of each.
GROUPED_COSTS: Costs = {
    **UNALIGNED_COSTS,
    _LARGE_128: WgmmaCost(3.42, 0.228, 0.0, 0.0, 2.39),
    _LARGE_256: WgmmaCost(4.0, 0.414, 1.42, 0.0, 2.98),
}
INT8_COSTS: Costs = {
    _TILE: FP8_COSTS[_TILE]._replace(k_block=0.217),
    _WIDE: FP8_COSTS[_WIDE]._replace(k_block=0.31),
    _WIDEST: FP8_COSTS[_WIDEST]._replace(k_block=0.3),
    _LARGE_128._replace(pingpong=False): WgmmaCost(3.3, 0.222, 0.0, 0.0, 1.33),
    _LARGE_256._replace(pingpong=False): WgmmaCost(4.9, 0.33, 0.9, 2.35, 2.43),
}


def costs_of(scheme: ScaledScheme) -> Costs:
    """The costs of the configs that compute a scheme."""
    if not scheme.traits.fp8:
        return INT8_COSTS
    if not scheme.traits.scaled_in_groups:
        return FP8_COSTS
    return GROUPED_COSTS if scheme.one_scale_per_128_rows else UNALIGNED_COSTS


@functools.lru_cache(maxsize=65536)
def _cheapest(m: int, n: int, k: int, scheme: ScaledScheme, sms: int) -> tuple[float, PersistentConfig]:
    """(us, config)."""
    return cheapest_wgmma(costs_of(scheme), m, n, k, sms)


def scaled_persistent_config(m: int, n: int, k: int, scheme: ScaledScheme, sms: int) -> PersistentConfig:
    """The cheapest config of `scaled_persistent` or `scaled_large_m` for x [m, k] and W [n, k] on `sms` SMs."""
    return _cheapest(m, n, k, scheme, sms)[1]


def estimated_us(m: int, n: int, k: int, scheme: ScaledScheme, weight_bytes: int, sms: int = 132) -> float:
    """Estimated time of a call on an H200, quantization of x included."""
    if m <= SCALED_SMALL_M:
        return 4.4 + weight_bytes / 4.38e6 + m * (6e-6 * k + 5.5e-6 * n)
    return _cheapest(m, n, k, scheme, sms)[0] + 0.9e-6 * m * k
