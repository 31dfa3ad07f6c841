"""Which config a layer gets for a given M: rules, and cost models fitted to times measured on an H200. No call ever autotunes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar, cast

from bitline.kernels.hopper.config import MAX_FLAGS, PersistentConfig, SmallMConfig, WgmmaConfig
from bitline.kernels.hopper.scheme import DequantScheme

Config = TypeVar("Config", bound=PersistentConfig)

# ---- M <= 32: gemv_mma and small_m_pipelined ---------------------------------------------------------------------------


class SmallMCost(NamedTuple):
    """Time of a pipelined config, linear in the work of an SM.

    ctas_per_sm: the row holds where the busiest SM has exactly so many CTAs; 0: three waves or more, of one CTA each.
    fixed_us: us of a launch. ns_per_block: ns per 16 x 128 block of W that the busiest SM works on.
    """

    config: SmallMConfig
    ctas_per_sm: int
    fixed_us: float
    ns_per_block: float


def _pipelined(
    n16: int, warps_per_k_slice: int, warps: int, stages: int, pdl_early: bool = True, split_k: int = 1
) -> SmallMConfig:  # fmt: skip
    """A config with x staged in shared memory."""
    return SmallMConfig(
        n16_per_warp=n16, num_warps=warps, stages=stages, warps_per_k_slice=warps_per_k_slice, stage_x=True,
        pdl_early=pdl_early and stages > 2, split_k=split_k,
    )  # fmt: skip


# By ceil(M / 8). Of two hundred configs the fastest for ctas_per_sm CTAs on the busiest SM; lines through one to three timings
# each, W4A16 in scale blocks of 128. Columns: n16_per_warp, warps_per_k_slice, num_warps, stages; ctas_per_sm, us, ns per block.
SMALL_M_COSTS = {
    1: (
        SmallMCost(_pipelined(3, 1, 8, 3), 1, 2.8, 25.5),
        SmallMCost(_pipelined(5, 1, 8, 2), 1, 2.8, 29.2),
        SmallMCost(_pipelined(7, 1, 8, 2), 1, 2.8, 30.6),
        SmallMCost(_pipelined(5, 2, 8, 3), 1, 2.8, 29.1),
        SmallMCost(_pipelined(6, 2, 8, 3), 1, 2.8, 30.0),
        SmallMCost(_pipelined(3, 1, 8, 2), 2, 2.8, 26.5),
        SmallMCost(_pipelined(4, 1, 8, 2), 2, 2.8, 28.4),
    ),
    2: (
        SmallMCost(_pipelined(2, 1, 4, 4), 1, 0.97, 65.0),
        SmallMCost(_pipelined(1, 2, 8, 4), 1, 1.5, 56.5),
        SmallMCost(_pipelined(3, 1, 8, 2), 1, 2.8, 39.6),
        SmallMCost(_pipelined(1, 4, 16, 3), 1, 1.76, 42.0),
        SmallMCost(_pipelined(2, 2, 8, 3), 1, 2.3, 40.4),
        SmallMCost(_pipelined(5, 1, 4, 3), 1, 2.8, 39.8),
        SmallMCost(_pipelined(3, 2, 8, 3), 1, 2.8, 33.4),
        SmallMCost(_pipelined(2, 4, 8, 4), 1, 2.8, 35.2),
        SmallMCost(_pipelined(5, 2, 8, 3), 1, 2.8, 34.9),
        SmallMCost(_pipelined(2, 2, 4, 3, pdl_early=False), 2, 2.8, 36.2),
        SmallMCost(_pipelined(3, 2, 4, 4), 2, 2.8, 34.6),
        SmallMCost(_pipelined(7, 1, 4, 2), 2, 2.8, 37.1),
        SmallMCost(_pipelined(2, 4, 8, 3, pdl_early=False), 2, 2.8, 34.6),
        SmallMCost(_pipelined(7, 2, 4, 3), 2, 2.8, 35.9),
        SmallMCost(_pipelined(3, 4, 8, 3), 0, 2.8, 35.5),
        SmallMCost(_pipelined(2, 4, 8, 3), 0, 2.8, 37.0),
        SmallMCost(_pipelined(2, 4, 8, 3, split_k=4), 2, 3.6, 37.3),
    ),
    3: (
        SmallMCost(_pipelined(2, 1, 4, 3), 1, 1.1, 76.5),
        SmallMCost(_pipelined(1, 2, 8, 4, pdl_early=False), 1, 1.6, 67.5),
        SmallMCost(_pipelined(3, 1, 4, 3), 1, 2.6, 54.6),
        SmallMCost(_pipelined(1, 1, 8, 2), 1, 2.0, 89.0),
        SmallMCost(_pipelined(2, 2, 8, 3), 1, 2.1, 48.0),
        SmallMCost(_pipelined(3, 2, 8, 3), 1, 2.8, 44.0),
        SmallMCost(_pipelined(5, 2, 8, 2), 1, 2.8, 44.2),
        SmallMCost(_pipelined(5, 1, 4, 2), 1, 2.8, 48.5),
        SmallMCost(_pipelined(2, 4, 8, 3), 1, 2.8, 41.1),
        SmallMCost(_pipelined(7, 2, 8, 2), 1, 2.8, 48.6),
        SmallMCost(_pipelined(2, 4, 16, 2, split_k=4), 1, 2.8, 51.8),
        SmallMCost(_pipelined(2, 4, 8, 2, split_k=4), 2, 4.5, 44.5),
        SmallMCost(_pipelined(1, 2, 8, 3, split_k=4), 1, 2.8, 83.0),
    ),
    4: (
        SmallMCost(_pipelined(1, 1, 8, 2), 1, 1.43, 127.5),
        SmallMCost(_pipelined(2, 1, 8, 2), 1, 1.25, 96.0),
        SmallMCost(_pipelined(1, 2, 8, 3, split_k=4), 1, 2.8, 117.0),
    ),
}


def _cheapest_pipelined(
    m: int, n16_tiles: int, k_blocks: int, scheme: DequantScheme, sms: int
) -> tuple[float, SmallMConfig | None]:  # fmt: skip
    """(us, config) of the cheapest pipelined config; (infinity, None) where no row of the table holds."""
    best: tuple[float, SmallMConfig | None] = (math.inf, None)
    k128_blocks = -(-k_blocks // 2)
    for row in SMALL_M_COSTS[-(-m // 8)]:
        config = row.config.fit_stages(scheme, m, row.ctas_per_sm or 2)
        n16_per_cta = row.config.n16_per_cta
        if config is None or n16_per_cta > n16_tiles:
            continue
        num_ctas = -(-n16_tiles // n16_per_cta) * config.split_k
        waves: float = -(-num_ctas // sms)
        if row.ctas_per_sm == 0:
            if waves < 3:
                continue
            waves = num_ctas / sms + 2 / 3
        elif waves != row.ctas_per_sm or k128_blocks < config.k_slices * config.split_k:
            continue
        k_slices = config.k_slices
        iterations = -(-k128_blocks // (k_slices * config.split_k))
        us = row.fixed_us + 1e-3 * row.ns_per_block * waves * n16_per_cta * k_slices * iterations
        if us < best[0]:
            best = (us, config)
    return best


def small_m_config_if_faster(
    m: int, n16_tiles: int, n: int, k: int, scheme: DequantScheme, sms: int = 132
) -> SmallMConfig | None:  # fmt: skip
    """The config for 17 <= M <= 32, or None where the wgmma kernel is estimated to be as fast."""
    if scheme.scales_per_k_block == 1 and scheme.k_blocks_per_scale % 2 and n16_tiles > 2 * sms:
        return None  # K tiles of 64 columns
    us, config = _cheapest_pipelined(m, n16_tiles, -(-k // 64), scheme, sms)
    wgmma = wgmma_config(m, n, k, sms)
    return config if us < _wgmma_us(wgmma, WGMMA_COSTS[wgmma._replace(num_ctas=0)], m, n, k) else None


@functools.lru_cache(maxsize=4096)
def small_m_config(m: int, n16_tiles: int, k_blocks: int, scheme: DequantScheme, even_k: bool, sms: int = 132) -> SmallMConfig:
    """The config for M <= 16. n16_tiles: 16-row tiles of W. even_k: K is a multiple of 128.

    `gemv_mma` where loads to registers keep up with memory, with as many warps per CTA as one wave of CTAs leaves room for;
    else the cheapest pipelined config.
    """
    waves = n16_tiles / (2 * sms)  # of CTAs with two tiles, one CTA per SM
    if waves <= 0.5:
        return _half_wave_config(m, k_blocks, scheme, even_k)
    if m > 8:
        return _config_up_to_16(m, n16_tiles, k_blocks, waves, scheme, even_k, sms)
    return _config_up_to_8(m, n16_tiles, k_blocks, waves, scheme, even_k, sms)


def _few_registers(scheme: DequantScheme) -> bool:
    """Dequantizing a K tile takes few registers: 4-bit codes, at most one scale per K block."""
    return scheme.bits == 4 and scheme.scales_per_k_block == 1


def _half_wave_config(m: int, k_blocks: int, scheme: DequantScheme, even_k: bool) -> SmallMConfig:
    """One tile per CTA."""
    if m > 8 and scheme.is_w4_g128_bf16 and even_k and k_blocks >= 64:
        return SmallMConfig(n16_per_warp=1, num_warps=16, stages=2)
    return SmallMConfig(n16_per_warp=1, num_warps=16, k_tiles_per_iter=2 if m <= 8 and _few_registers(scheme) else 1)


def _config_up_to_8(
    m: int, n16_tiles: int, k_blocks: int, waves: float, scheme: DequantScheme, even_k: bool, sms: int
) -> SmallMConfig:  # fmt: skip
    """M <= 8, more than half a wave."""
    found: SmallMConfig | None = None
    if waves <= 1:
        if scheme.is_w4_g128_bf16 and even_k and k_blocks > 80:
            return SmallMConfig(n16_per_warp=1, num_warps=16, stages=2)
        fitted = _pipelined(1, 2, 16, 3, pdl_early=False).fit_stages(scheme, m)
        return fitted or SmallMConfig(n16_per_warp=1, num_warps=16)
    if waves <= 1.5 or 2 < waves <= (6 if even_k and scheme.bits == 4 else 2.5):
        found = _cheapest_pipelined(m, n16_tiles, k_blocks, scheme, sms)[1]
    elif not even_k:
        found = _pipelined(2, 2, 8, 4, pdl_early=False).fit_stages(scheme, m)
    if found:
        return found
    if waves <= 2.5:
        k_tiles = 2 if _few_registers(scheme) and k_blocks // scheme.k_blocks_per_tile >= 128 else 1
        return SmallMConfig(n16_per_warp=2, num_warps=8, k_tiles_per_iter=k_tiles, max_registers=128)
    if scheme.bits == 8:
        return SmallMConfig(n16_per_warp=1, num_warps=4, k_tiles_per_iter=2)
    return SmallMConfig(n16_per_warp=2, num_warps=4, max_registers=0 if scheme.scale_exponent_bias else 72)


def _config_up_to_16(
    m: int, n16_tiles: int, k_blocks: int, waves: float, scheme: DequantScheme, even_k: bool, sms: int
) -> SmallMConfig:  # fmt: skip
    """9 <= M <= 16, more than half a wave."""
    found: SmallMConfig | None = None
    k128_tiles = scheme.k_blocks_per_tile == 2
    short_w8 = scheme.bits == 8 and k_blocks <= 80
    if waves > 1 or not even_k or k_blocks < 64 or short_w8 or (_few_registers(scheme) and not k128_tiles):
        found = _cheapest_pipelined(m, n16_tiles, k_blocks, scheme, sms)[1]
    if found:
        return found
    if waves <= 1:
        return SmallMConfig(n16_per_warp=2, num_warps=16, stagger_x_loads=_few_registers(scheme) and k128_tiles and even_k)
    max_registers = 128 if k128_tiles or waves <= 2.5 else 72
    return SmallMConfig(n16_per_warp=2, num_warps=8 if waves <= 2.5 else 4, max_registers=max_registers)


# ---- M > 16: wgmma_persistent ------------------------------------------------------------------------------------------


class WgmmaCost(NamedTuple):
    """Microseconds per launch, K block of a tile, tile stored, stream-K tile, CTA of a stream-K tile; the last two again for a
    distributed reduction (`WgmmaConfig.split_reduce`)."""

    fixed: float
    k_block: float
    tile: float
    stream_k: float
    stream_k_cta: float
    split_reduce: float = 0.0
    split_reduce_cta: float = 0.0


_PINGPONG = WgmmaConfig(tile_m=128, pingpong=True, split_reduce=True)

# Least squares; up to M=96 over 380 timings of ten layers: within 3 to 8 % of them in the median, and the cheapest by this model
# is on average 1.4 % slower than the fastest that was timed. Above M=96 over timings with another dequantization (codes not taken
# as bits of bfloat16, see `ptx.fragment_exponent_bias`), k_block scaled down where a config was timed again.
WGMMA_COSTS = {
    WgmmaConfig(32): WgmmaCost(3.415, 0.186, 0.0, 0.0, 0.121),
    WgmmaConfig(32, ctas_per_sm=2): WgmmaCost(3.565, 0.304, 0.0, 0.0, 0.169),
    WgmmaConfig(32, num_consumer_warpgroups=4): WgmmaCost(4.200, 0.284, 0.0, 0.0, 0.224),
    WgmmaConfig(64): WgmmaCost(3.892, 0.232, 0.0, 0.0, 0.258),
    WgmmaConfig(64, stages=3, ctas_per_sm=2): WgmmaCost(1.521, 0.438, 0.0, 3.164, 0.286),
    WgmmaConfig(64, stages=3, num_consumer_warpgroups=4): WgmmaCost(3.502, 0.381, 0.0, 1.681, 0.443),
    WgmmaConfig(64, n64_per_warpgroup=2): WgmmaCost(2.036, 0.413, 0.0, 3.755, 0.506),
    WgmmaConfig(64, tile_m_extra=32): WgmmaCost(4.134, 0.302, 0.0, 0.0, 0.417),
    WgmmaConfig(64, num_consumer_warpgroups=4, tile_m_extra=32): WgmmaCost(2.515, 0.544, 0.0, 4.503, 0.650),
    _PINGPONG: WgmmaCost(1.466, 0.333, 0.0, 2.445, 0.994, 1.969, 0.987),
    _PINGPONG._replace(stages=3, tile_m_extra=32): WgmmaCost(2.305, 0.389, 1.382, 2.890, 0.865, 1.963, 0.835),
    _PINGPONG._replace(stages=3, tile_m_extra=64): WgmmaCost(0.381, 0.488, 0.061, 4.346, 1.065, 2.813, 0.819),
    _PINGPONG._replace(tile_m=256, k_blocks_per_stage=1, raster_group_n=32): WgmmaCost(
        2.331, 0.613, 0.315, 5.410, 0.693, 2.627, 0.732
    ),
    _PINGPONG._replace(tile_m=256, k_blocks_per_stage=1, stages=3, tile_m_extra=64): WgmmaCost(
        3.587, 0.761, 0.0, 5.381, 0.849, 2.469, 0.666
    ),
}


def stream_k_partition(num_tiles: int, stages_per_tile: int, num_ctas: int) -> tuple[int, int, int]:
    """(CTAs, data-parallel tiles of each, stages of all stream-K tiles together).

    Every CTA gets at least one stage of the stream-K tiles, since a tile's reduction waits for all CTAs between its first and
    its last: with fewer stages than CTAs there are fewer CTAs.
    """
    ctas = min(num_ctas, num_tiles * stages_per_tile)
    while 0 < (num_tiles % ctas) * stages_per_tile < ctas:
        ctas -= 1
    return ctas, num_tiles // ctas, (num_tiles % ctas) * stages_per_tile


def _num_tiles(config: PersistentConfig, m: int, n: int) -> int:
    return math.ceil(m / config.cta_m) * math.ceil(n / (64 * config.n64_per_cta))


def _candidate_num_ctas(num_tiles: int, sms: int, config: PersistentConfig) -> list[int]:
    """CTA counts worth estimating: as many as are resident, a power of two, the largest that divides the tiles, and the largest
    that gives every tile the same number of CTAs. Where one of the last two is nearly the first, no others."""
    resident = sms * config.ctas_per_sm
    even = next((p for p in range(resident, resident * 3 // 4, -1) if num_tiles % p == 0), 0)
    same_per_tile = num_tiles * (resident // num_tiles)
    power = config.ctas_per_sm << (sms.bit_length() - 1)
    flags = config.num_consumer_warpgroups * (4 if config.split_reduce else 1)  # of a stream-K tile
    best = [p for p in (even, same_per_tile) if p >= 0.95 * resident and num_tiles % p * flags <= MAX_FLAGS]
    return list(dict.fromkeys(best or (p for p in (even, same_per_tile, resident, power) if 0 < p <= MAX_FLAGS // flags + 1)))


def _wgmma_us(config: PersistentConfig, cost: WgmmaCost, m: int, n: int, k: int) -> float:
    """Estimated time of a launch."""
    stages_per_tile = math.ceil(k / (64 * config.k_blocks_per_stage))
    ctas, whole_tiles, stream_k_stages = stream_k_partition(_num_tiles(config, m, n), stages_per_tile, config.num_ctas)
    k_blocks = (whole_tiles * stages_per_tile + math.ceil(stream_k_stages / ctas)) * config.k_blocks_per_stage
    us = cost.fixed + cost.k_block * k_blocks + cost.tile * whole_tiles
    if not stream_k_stages:
        return us
    if config.split_reduce and ctas * stages_per_tile % stream_k_stages == 0:
        return us + cost.split_reduce + cost.split_reduce_cta * stages_per_tile * ctas / stream_k_stages
    return us + (cost.stream_k + cost.stream_k_cta * stages_per_tile * ctas / stream_k_stages)


def cheapest_wgmma(costs: Mapping[Config, WgmmaCost], m: int, n: int, k: int, sms: int) -> tuple[float, Config]:
    """(us, the cheapest config of a cost table with its CTA count) for x [m, k] and W [n, k] on `sms` SMs."""
    best, least = None, math.inf
    for shape, cost in costs.items():
        num_tiles = _num_tiles(shape, m, n)
        if num_tiles > 4096 and shape.cta_m < 128:
            continue  # large M: small tiles read x too often, which the timings do not cover
        for num_ctas in _candidate_num_ctas(num_tiles, sms, shape):
            config = shape._replace(num_ctas=num_ctas)
            us = _wgmma_us(config, cost, m, n, k)
            if us < least:
                best, least = config, us
    return least, cast(Config, best)


@functools.lru_cache(maxsize=65536)
def wgmma_config(m: int, n: int, k: int, sms: int) -> WgmmaConfig:
    """The cheapest config of `wgmma_persistent`."""
    return cheapest_wgmma(WGMMA_COSTS, m, n, k, sms)[1]
