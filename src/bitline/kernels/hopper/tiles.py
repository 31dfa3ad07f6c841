"""Tiles of the Hopper kernels: chosen by rules and a cost model whose numbers were measured on an H200. No call ever tunes."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from bitline.kernels.hopper.scheme import Scheme

SHARED = 226 * 1024  # bytes that a program may take, less what barriers do
FLAGS = 1024  # int32 of a launch, that count the parts of cut tiles


class Decode(NamedTuple):
    """Up to 16 rows of x. r: 16-row tiles of W of a warp. c: units of a warp's step. registers: a cap, 0 for none.

    depth: steps of the ring in shared memory, 0 for words in registers. groups: warps that share x, with r tiles each.
    ring_x: x goes through the ring as well. swap: see `decode_device`; only with words in registers.
    """

    r: int
    c: int
    warps: int
    registers: int = 0
    depth: int = 0
    groups: int = 1
    ring_x: bool = False
    swap: bool = False
    early: bool = False
    cut: int = 1

    def shared_bytes(self, scheme: Scheme, m: int) -> int:
        """Shared memory of a program: the ring, or the sums of its warps."""
        mt = -(-m // 8)
        sums = 512 * self.warps * self.r * mt
        if not self.depth:
            return sums
        tables = (scheme.blocks * scheme.fine if scheme.fine > 1 else 1) if scheme.per else 0
        tile = 512 * scheme.blocks * scheme.width // 4 + tables * ((64 if scheme.wide else 32) + (16 if scheme.zero else 0))
        step = self.groups * self.r * tile + (1024 * mt * scheme.blocks if self.ring_x else 0)
        return max(self.warps // self.groups * self.depth * -(-step // 128) * 128, sums)


class Wide(NamedTuple):
    """bm: rows of x. h: blocks of 64 columns in a stage. mr: blocks of 64 rows of W for a warpgroup. p: programs.

    gn: tiles along N that are worked on together, for the cache. pdl: start before the kernel before has ended. sb: a wait
    more, which keeps the compiler's order. nb: warpgroups. bm2: further rows of x, as a second product; 0 for none.
    each: programs that share a multiprocessor. stagger: cycles by which each warpgroup starts after the one before.
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
    bm2: int = 0
    each: int = 1
    stagger: int = 0

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread at the start (0: all there are), of one that multiplies and of one that brings tiles."""
        if self.each == 2:
            return 80, 104, 32
        return (0, 112, 24) if self.nb == 4 else (0, 232, 40)

    def shared_bytes(self, scheme: Scheme) -> int:
        """Shared memory of a program, but for some barriers: the ring of stages, and the tile of y."""
        entries = ((16 if scheme.wide else 8) + (4 if scheme.zero else 0)) * scheme.fine
        weights = self.nb * self.mr * 16 * (128 * scheme.width // 4 + entries)
        return self.stages * self.h * ((self.bm + self.bm2) * 128 + weights) + self.nb * self.mr * self.bm * 128

    def fitted(self, scheme: Scheme) -> Wide:
        """The same with as many stages as there is room for."""
        tile = self
        while tile.shared_bytes(scheme) > SHARED // self.each:
            tile = tile._replace(stages=tile.stages - 1)
        return tile


def _timed(few: bool, waves: float, blocks: int, even: bool) -> Decode | None:
    """The fastest of some sixty tiles at nine layers, where it was not the one of the rules below; symmetric 4 bits, groups of
    128 columns, bfloat16. few: up to 8 rows."""
    if waves <= 0.5 or waves > 16 or blocks < 64:
        return None
    if waves <= 1.0:
        if few:
            return Decode(1, 1, 16, 0, 3, 2, True) if blocks <= 80 or not even else Decode(1, 1, 16, 0, 2)
        return Decode(2, 1, 16, swap=True) if even else Decode(1, 1, 8, 0, 4, 2, True)
    if not even:
        return Decode(2, 1, 8, 0, 4, 2, True) if few else Decode(2, 1, 16, 0, 2, 4, True)
    if waves <= 1.3:
        return Decode(1, 1, 8) if few else Decode(2, 1, 8, 0, 2)
    if few:
        return None
    if waves <= 2.5:
        return Decode(1, 1, 16, 0, 3, 4, True) if waves > 1.7 and blocks <= 256 else None
    return Decode(1, 1, 8, 0, 3, 4, True) if waves > 5 and blocks >= 128 else Decode(2, 1, 4, 0, 3, 2, True)


@functools.lru_cache(maxsize=4096)
def decode_tile(m: int, tiles: int, blocks: int, scheme: Scheme, bias: bool, even: bool, sms: int = 132) -> Decode:
    """For `tiles` 16-row tiles of W and `blocks` of 64 columns; even: K is a multiple of 128.

    As many warps a program as one wave of programs leaves room for; `_timed` first.
    """
    waves = tiles / (2 * sms)  # of programs with two tiles, one for each multiprocessor
    if scheme.usual and not bias:
        tile = _timed(m <= 8, waves, blocks, even)
        if tile:
            return tile
    units = blocks // scheme.blocks
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


# Least squares over 905 timings of ten layers at 24 to 4096 rows; within 1 to 6 % of them in the median, and the cheapest by
# this model is on average 1.3 % slower than the fastest that was timed.
_COSTS = {
    Wide(32, 2, 3, 1, 0, 8, True, False): _Cost(2.432, 0.233, 0.204, 1.435, 0.079),
    Wide(32, 2, 4, 1, 0, 8, True, False, each=2): _Cost(2.984, 0.374, 0.0, 1.965, 0.309),
    Wide(32, 2, 4, 1, 0, 8, True, False, 4): _Cost(3.617, 0.363, 0.071, 1.790, 0.325),
    Wide(64, 2, 3, 1, 0, 8, True, False): _Cost(1.847, 0.269, 0.0, 2.434, 0.223),
    Wide(64, 2, 3, 1, 0, 8, True, False, each=2): _Cost(0.721, 0.489, 0.0, 3.572, 0.810),
    Wide(64, 2, 3, 1, 0, 8, True, False, 4): _Cost(2.989, 0.455, 0.0, 4.324, 0.427),
    Wide(64, 2, 4, 2, 0, 8, True, True): _Cost(2.150, 0.494, 0.0, 3.920, 0.949),
    Wide(64, 2, 3, 1, 0, 8, True, False, bm2=32): _Cost(1.619, 0.350, 0.0, 2.566, 0.525),
    Wide(64, 2, 4, 1, 0, 8, True, False, 4, 32): _Cost(5.666, 0.549, 0.0, 6.213, 1.284),
    Wide(128, 2, 4, 1, 0, 8, True, False, stagger=300): _Cost(0.724, 0.392, 0.0, 4.724, 0.373),
    Wide(128, 1, 4, 2, 0, 8, True, False, stagger=600): _Cost(2.334, 0.730, 0.0, 7.454, 1.838),
    Wide(128, 2, 3, 1, 0, 8, True, False, bm2=32, stagger=300): _Cost(0.506, 0.496, 0.0, 5.195, 0.842),
    Wide(128, 2, 3, 1, 0, 8, True, False, bm2=64, stagger=300): _Cost(1.262, 0.548, 0.0, 6.286, 1.373),
    Wide(256, 1, 4, 1, 0, 32, True, False): _Cost(0.814, 0.679, 0.0, 9.267, 1.970),
    Wide(256, 1, 3, 1, 0, 8, True, False, bm2=64): _Cost(5.064, 0.921, 0.0, 10.090, 2.857),
}


def shares(total: int, stages: int, programs: int) -> tuple[int, int, int]:
    """(programs, whole tiles for each, stages of the tiles that are cut) for `total` tiles of `stages`.

    Each program that takes part in cut tiles has a stage of them at least, since the one that adds their parts waits for
    all between the first and the last: where there are fewer stages than programs, there are fewer programs.
    """
    p = min(programs, total * stages)
    while 0 < (total % p) * stages < p:
        p -= 1
    return p, total // p, (total % p) * stages


def _programs(total: int, sms: int, tile: Wide) -> list[int]:
    """Numbers of programs worth a look: all, a power of two, the most that share the tiles out evenly, and the most of which
    a tile has as many as any other. Where one of the last two is nearly all, nothing else is."""
    slots = sms * tile.each
    even = next((p for p in range(slots, slots * 3 // 4, -1) if total % p == 0), 0)
    alike = total * (slots // total)
    power = tile.each << (sms.bit_length() - 1)
    best = [p for p in (even, alike) if p >= 0.95 * slots]
    room = FLAGS // (tile.nb * tile.mr * (2 if tile.bm2 else 1)) + 1  # the last tile is never cut
    return list(dict.fromkeys(p for p in best or (even, alike, slots, power) if 0 < p <= room))


def _cost(tile: Wide, cost: _Cost, m: int, n: int, k: int) -> float:
    stages = math.ceil(k / (64 * tile.h))
    total = math.ceil(m / (tile.bm + tile.bm2)) * math.ceil(n / (64 * tile.nb * tile.mr))
    p, whole, rest = shares(total, stages, tile.p)
    blocks = (whole * stages + math.ceil(rest / p)) * tile.h
    return cost.fixed + cost.block * blocks + cost.tile * whole + (cost.cut + cost.part * stages * p / rest if rest else 0.0)


@functools.lru_cache(maxsize=65536)
def wide_tile(m: int, n: int, k: int, sms: int, timed: bool = True) -> Wide:
    """The cheapest tile and number of programs for x [m, k] and W [n, k] on `sms` multiprocessors.

    timed: the scheme is the one that all tiles have run with, symmetric 4 bits in groups of 128 with bfloat16 inputs. Others
    take those that every scheme has run with.
    """
    best, least = None, math.inf
    for shape, cost in _COSTS.items():
        if not timed:
            if shape.nb == 4 or shape.each == 2 or (shape.bm, shape.mr) == (128, 2):
                continue
            shape = shape._replace(stagger=0)
        total = math.ceil(m / (shape.bm + shape.bm2)) * math.ceil(n / (64 * shape.nb * shape.mr))
        if total > 4096 and shape.bm < 128:
            continue  # many rows: small tiles read x too often, which the timings do not cover
        for p in _programs(total, sms, shape):
            tile = shape._replace(p=p)
            value = _cost(tile, cost, m, n, k)
            if value < least:
                best, least = tile, value
    assert best is not None
    return best
