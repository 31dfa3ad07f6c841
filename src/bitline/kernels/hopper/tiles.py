"""Tiles of the Hopper kernels: chosen by rules and a cost model whose numbers were measured on an H200. No call ever tunes."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from bitline.kernels.hopper.scheme import Scheme


class Decode(NamedTuple):
    """Up to 16 rows of x. r: 16-row tiles of W in a program. c: units of a warp's step. registers: a cap, 0 for none."""

    r: int
    c: int
    warps: int
    registers: int = 0


class Wide(NamedTuple):
    """bm: rows of x. h: blocks of 64 columns in a stage. mr: blocks of 64 rows of W for a warpgroup. p: programs.

    gn: tiles along N that are worked on together, for the cache. pdl: start before the kernel before has ended. sb: a wait
    more, which keeps the compiler's order. nb: warpgroups.
    """

    bm: int
    h: int
    stages: int
    mr: int
    p: int
    gn: int
    pdl: bool
    sb: bool
    nb: int = 2


@functools.lru_cache(maxsize=4096)
def decode_tile(m: int, tiles: int, units: int, scheme: Scheme, sms: int = 132) -> Decode:
    """For `tiles` 16-row tiles of W and `units` pieces of K: as many warps a program as one wave of programs leaves room for."""
    waves = tiles / (2 * sms)  # of programs with two tiles, one for each multiprocessor
    plain = scheme.width == 4 and scheme.fine == 1  # few registers
    if waves <= 0.5:
        return Decode(1, 2, 16) if m <= 8 and plain else Decode(1, 1, 16)
    if waves <= 1.0:
        if m > (8 if scheme.blocks == 1 else 4) or units * scheme.blocks > 80:
            return Decode(2, 1, 16)
        return Decode(1, 1, 16) if not plain else Decode(2, 1, 16) if scheme.wide or scheme.zero else Decode(1, 2, 16)
    if waves <= 2.5:
        return Decode(2, 2 if m <= 8 and plain and units >= 128 else 1, 8, 128)
    if m > 8:
        return Decode(2, 1, 4, 72 if scheme.blocks == 1 else 128)
    if scheme.width == 8:
        return Decode(1, 2, 4)
    return Decode(2, 1, 4, 0 if scheme.bias else 72)


class _Cost(NamedTuple):
    """Microseconds: of a launch, of 64 columns of a tile, of writing a tile, of a cut tile, of each further program in one."""

    fixed: float
    block: float
    tile: float
    cut: float
    part: float


# Least squares over 482 timings of twelve layers at 32 to 1024 rows; within 3 to 7 % of them in the median, and the
# cheapest by this model is on average 1.6 % slower than the fastest that was timed.
_COSTS = {
    Wide(32, 2, 3, 1, 0, 8, True, False): _Cost(5.452, 0.247, -0.706, -1.938, 0.139),
    Wide(32, 2, 4, 2, 0, 8, True, True): _Cost(2.323, 0.419, 0.160, 4.193, 0.200),
    Wide(64, 2, 3, 1, 0, 8, True, False): _Cost(2.630, 0.280, 1.075, 1.156, 0.322),
    Wide(64, 2, 4, 2, 0, 8, True, True): _Cost(2.733, 0.514, -1.344, 3.412, 0.973),
    Wide(128, 2, 4, 1, 0, 8, True, False): _Cost(0.077, 0.420, 0.568, 4.217, 0.521),
    Wide(256, 1, 4, 1, 0, 8, True, False): _Cost(-2.876, 0.782, 1.215, 10.410, 2.616),
    Wide(256, 1, 4, 1, 0, 8, False, False): _Cost(-1.442, 0.838, 0.180, 6.814, 2.722),
}


def _programs(total: int, sms: int) -> list[int]:
    """Numbers of programs worth a look: all, a power of two, and the most that share the tiles out evenly."""
    even = next((p for p in range(sms, sms * 3 // 4, -1) if total % p == 0), 0)
    power = 1 << (sms.bit_length() - 1)
    return list(dict.fromkeys(p for p in (even, sms, power) if p))


def _cost(tile: Wide, cost: _Cost, m: int, n: int, k: int) -> float:
    stages = math.ceil(k / (64 * tile.h))
    total = math.ceil(m / tile.bm) * math.ceil(n / (64 * tile.nb * tile.mr))
    p = min(tile.p, total * stages)
    whole = total // p
    rest = (total - whole * p) * stages
    blocks = (whole * stages + math.ceil(rest / p)) * tile.h
    return cost.fixed + cost.block * blocks + cost.tile * whole + (cost.cut + cost.part * stages * p / rest if rest else 0.0)


@functools.lru_cache(maxsize=65536)
def wide_tile(m: int, n: int, k: int, sms: int) -> Wide:
    """The cheapest tile and number of programs for x [m, k] and W [n, k] on `sms` multiprocessors."""
    best, least = None, math.inf
    for shape, cost in _COSTS.items():
        total = math.ceil(m / shape.bm) * math.ceil(n / (64 * shape.nb * shape.mr))
        if total > 4096 and shape.bm < 128:
            continue  # many rows: small tiles read x too often, which the timings do not cover
        for p in _programs(total, sms):
            tile = shape._replace(p=p)
            value = _cost(tile, cost, m, n, k)
            if value < least:
                best, least = tile, value
    assert best is not None
    return best._replace(gn=32) if m >= 512 and n >= 16384 and best.bm == 256 else best
