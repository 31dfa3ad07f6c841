"""Tiles of the Hopper kernels: chosen by rules and a cost model whose numbers were measured on an H200. No call ever tunes."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from bitline.kernels.hopper.scheme import Scheme

SHARED = 226 * 1024  # bytes that a program may take, less what barriers do
FLAGS = 1024  # int32 of a launch, that count the parts of cut tiles


class Decode(NamedTuple):
    """Up to 32 rows of x. r: 16-row tiles of W of a warp. c: units of a warp's step. registers: a cap, 0 for none.

    depth: steps of the ring in shared memory, 0 for words in registers. groups: warps that share x, with r tiles each.
    ring_x: x goes through the ring as well. swap: see `decode_device`; only with words in registers. early: see
    `ring_device`. cut: programs that share K of the same rows.
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
        blocks = 2 if scheme.per == 2 else scheme.blocks  # as `launch` sees to
        tables = (blocks * scheme.fine if scheme.fine > 1 else 1) if scheme.per else 0
        tile = 512 * blocks * scheme.width // 4 + tables * ((64 if scheme.wide else 32) + (16 if scheme.zero else 0))
        step = self.groups * self.r * tile + (1024 * mt * blocks if self.ring_x else 0)
        return max(self.warps // self.groups * self.depth * -(-step // 128) * 128, sums)

    def fitted(self, scheme: Scheme, m: int, each: int = 1) -> Decode | None:
        """The same with as many steps as `each` programs on a multiprocessor have room for; None where two are too many."""
        tile = self
        while tile.shared_bytes(scheme, m) + 1024 > (SHARED + 1024) // each:
            if tile.depth <= 2:
                return None
            tile = tile._replace(depth=tile.depth - 1)
        return tile._replace(early=tile.early and tile.depth > 2)


class Wide(NamedTuple):
    """bm: rows of x. h: blocks of 64 columns in a stage. mr: blocks of 64 rows of W for a warpgroup. p: programs.

    gn: tiles along N that are worked on together, for the cache. pdl: start before the kernel before has ended. nb: warpgroups.
    bm2: further rows of x, as a second product; 0 for none. each: programs that share a multiprocessor. turns: warpgroups
    multiply one after the other, and decode meanwhile. halves: where all cut tiles have as many programs, two or four of these
    add up a half or a quarter each.
    """

    bm: int
    h: int
    stages: int
    mr: int
    p: int
    gn: int
    pdl: bool
    nb: int = 2
    bm2: int = 0
    each: int = 1
    turns: bool = False
    halves: bool = False

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


class _Few(NamedTuple):
    """A tile through the ring: programs on a multiprocessor (0: one after the other), us, and ns for each of its multiprocessor's
    units of 16 rows and 128 columns."""

    tile: Decode
    each: int
    fixed: float
    unit: float


def _ring(r: int, groups: int, warps: int, depth: int, early: bool = True, cut: int = 1) -> Decode:
    return Decode(r, 1, warps, 0, depth, groups, True, early=early and depth > 2, cut=cut)


# By 8-row tiles of x; the fastest of two hundred tiles where they had just as many programs, lines through one to three timings
# each, with symmetric 4 bits in groups of 128 columns.
_FEW = {
    1: (
        _Few(_ring(3, 1, 8, 3), 1, 2.8, 25.5),
        _Few(_ring(5, 1, 8, 2), 1, 2.8, 29.2),
        _Few(_ring(7, 1, 8, 2), 1, 2.8, 30.6),
        _Few(_ring(5, 2, 8, 3), 1, 2.8, 29.1),
        _Few(_ring(6, 2, 8, 3), 1, 2.8, 30.0),
        _Few(_ring(3, 1, 8, 2), 2, 2.8, 26.5),
        _Few(_ring(4, 1, 8, 2), 2, 2.8, 28.4),
    ),
    2: (
        _Few(_ring(2, 1, 4, 4), 1, 0.97, 65.0),
        _Few(_ring(1, 2, 8, 4), 1, 1.5, 56.5),
        _Few(_ring(3, 1, 8, 2), 1, 2.8, 39.6),
        _Few(_ring(1, 4, 16, 3), 1, 1.76, 42.0),
        _Few(_ring(2, 2, 8, 3), 1, 2.3, 40.4),
        _Few(_ring(5, 1, 4, 3), 1, 2.8, 39.8),
        _Few(_ring(3, 2, 8, 3), 1, 2.8, 33.4),
        _Few(_ring(2, 4, 8, 4), 1, 2.8, 35.2),
        _Few(_ring(5, 2, 8, 3), 1, 2.8, 34.9),
        _Few(_ring(2, 2, 4, 3, False), 2, 2.8, 36.2),
        _Few(_ring(3, 2, 4, 4), 2, 2.8, 34.6),
        _Few(_ring(7, 1, 4, 2), 2, 2.8, 37.1),
        _Few(_ring(2, 4, 8, 3, False), 2, 2.8, 34.6),
        _Few(_ring(7, 2, 4, 3), 2, 2.8, 35.9),
        _Few(_ring(3, 4, 8, 3), 0, 2.8, 35.5),
        _Few(_ring(2, 4, 8, 3), 0, 2.8, 37.0),
        _Few(_ring(2, 4, 8, 3, cut=4), 2, 3.6, 37.3),
    ),
    3: (
        _Few(_ring(2, 1, 4, 3), 1, 1.1, 76.5),
        _Few(_ring(1, 2, 8, 4, False), 1, 1.6, 67.5),
        _Few(_ring(3, 1, 4, 3), 1, 2.6, 54.6),
        _Few(_ring(1, 1, 8, 2), 1, 2.0, 89.0),
        _Few(_ring(2, 2, 8, 3), 1, 2.1, 48.0),
        _Few(_ring(3, 2, 8, 3), 1, 2.8, 44.0),
        _Few(_ring(5, 2, 8, 2), 1, 2.8, 44.2),
        _Few(_ring(5, 1, 4, 2), 1, 2.8, 48.5),
        _Few(_ring(2, 4, 8, 3), 1, 2.8, 41.1),
        _Few(_ring(7, 2, 8, 2), 1, 2.8, 48.6),
        _Few(_ring(2, 4, 16, 2, cut=4), 1, 2.8, 51.8),
        _Few(_ring(2, 4, 8, 2, cut=4), 2, 4.5, 44.5),
        _Few(_ring(1, 2, 8, 3, cut=4), 1, 2.8, 83.0),
    ),
    4: (
        _Few(_ring(1, 1, 8, 2), 1, 1.43, 127.5),
        _Few(_ring(2, 1, 8, 2), 1, 1.25, 96.0),
        _Few(_ring(1, 2, 8, 3, cut=4), 1, 2.8, 117.0),
    ),
}


def _cheapest(m: int, tiles: int, blocks: int, scheme: Scheme, sms: int) -> tuple[float, Decode | None]:
    """(us, tile) of the cheapest tile through the ring; infinity where none is for so many rows of W."""
    best: tuple[float, Decode | None] = (math.inf, None)
    units = -(-blocks // 2)
    for kind in _FEW[-(-m // 8)]:
        tile = kind.tile.fitted(scheme, m, kind.each or 2)
        size = kind.tile.r * kind.tile.groups
        if tile is None or size > tiles:
            continue
        programs = -(-tiles // size) * tile.cut
        shares = tile.warps // tile.groups
        rounds: float = -(-programs // sms)
        if kind.each == 0:
            if rounds < 3:
                continue
            rounds = programs / sms + 2 / 3
        elif rounds != kind.each or units < shares * tile.cut:
            continue
        us = kind.fixed + 1e-3 * kind.unit * rounds * size * shares * -(-units // (shares * tile.cut))
        if us < best[0]:
            best = (us, tile)
    return best


def few_tile(m: int, tiles: int, n: int, k: int, scheme: Scheme, sms: int = 132) -> Decode | None:
    """The tile for 17 to 32 rows of x, where it is cheaper than any for more."""
    if scheme.fine == 1 and scheme.per % 2 and tiles > 2 * sms:
        return None  # units of 64 columns
    us, tile = _cheapest(m, tiles, -(-k // 64), scheme, sms)
    wide = wide_tile(m, n, k, sms)
    return tile if us < _cost(wide, _COSTS[wide._replace(p=0)], m, n, k) else None


@functools.lru_cache(maxsize=4096)
def decode_tile(m: int, tiles: int, blocks: int, scheme: Scheme, even: bool, sms: int = 132) -> Decode:
    """For up to 16 rows of x, `tiles` 16-row tiles of W and `blocks` of 64 columns; even: K is a multiple of 128.

    Words in registers where they come as fast, as many warps a program as one wave of programs leaves room for; else the
    cheapest tile through the ring.
    """
    few, waves = m <= 8, tiles / (2 * sms)  # waves: of programs with two tiles, one for each multiprocessor
    plain = scheme.width == 4 and scheme.fine == 1  # few registers
    whole = scheme.blocks == 2  # units of 128 columns
    if waves <= 0.5:
        if not few and scheme.usual and even and blocks >= 64:
            return Decode(1, 1, 16, 0, 2)
        return Decode(1, 2, 16) if few and plain else Decode(1, 1, 16)
    found: Decode | None = None
    if not few:
        if waves > 1 or not even or blocks < 64 or (scheme.width == 8 and blocks <= 80) or (plain and not whole):
            found = _cheapest(m, tiles, blocks, scheme, sms)[1]
        if not found and waves <= 1:
            return Decode(2, 1, 16, swap=plain and whole and even)
        return found or Decode(2, 1, 8 if waves <= 2.5 else 4, 128 if whole or waves <= 2.5 else 72)
    if waves <= 1:
        found = Decode(1, 1, 16, 0, 2) if scheme.usual and even and blocks > 80 else _ring(1, 2, 16, 3, False).fitted(scheme, m)
        return found or Decode(1, 1, 16)
    if waves <= 1.5 or 2 < waves <= (6 if even and scheme.width == 4 else 2.5):
        found = _cheapest(m, tiles, blocks, scheme, sms)[1]
    elif not even:
        found = _ring(2, 2, 8, 4, False).fitted(scheme, m)
    if found:
        return found
    if waves <= 2.5:
        return Decode(2, 2 if plain and blocks // scheme.blocks >= 128 else 1, 8, 128)
    if scheme.width == 8:
        return Decode(1, 2, 4)
    return Decode(2, 1, 4, 0 if scheme.bias else 72)


class _Cost(NamedTuple):
    """Microseconds: of a launch, of 64 columns of a tile, of writing a tile, of a cut tile, of each program in one; the last
    two where several of these add it up (`Wide.halves`)."""

    fixed: float
    block: float
    tile: float
    cut: float
    part: float
    even: float = 0.0
    even_part: float = 0.0


# Least squares, up to 96 rows over 380 timings of ten layers: within 3 to 8 % of them in the median, and the cheapest by this
# model is on average 1.4 % slower than the fastest that was timed. Above that over timings before codes were taken as bits of
# bfloat16 (`ptx.unit`), and 64 columns as much cheaper as they were where the tile was timed again.
_COSTS = {
    Wide(32, 2, 4, 1, 0, 8, True): _Cost(3.415, 0.186, 0.0, 0.0, 0.121),
    Wide(32, 2, 4, 1, 0, 8, True, each=2): _Cost(3.565, 0.304, 0.0, 0.0, 0.169),
    Wide(32, 2, 4, 1, 0, 8, True, 4): _Cost(4.200, 0.284, 0.0, 0.0, 0.224),
    Wide(64, 2, 4, 1, 0, 8, True): _Cost(3.892, 0.232, 0.0, 0.0, 0.258),
    Wide(64, 2, 3, 1, 0, 8, True, each=2): _Cost(1.521, 0.438, 0.0, 3.164, 0.286),
    Wide(64, 2, 3, 1, 0, 8, True, 4): _Cost(3.502, 0.381, 0.0, 1.681, 0.443),
    Wide(64, 2, 4, 2, 0, 8, True): _Cost(2.036, 0.413, 0.0, 3.755, 0.506),
    Wide(64, 2, 4, 1, 0, 8, True, bm2=32): _Cost(4.134, 0.302, 0.0, 0.0, 0.417),
    Wide(64, 2, 4, 1, 0, 8, True, 4, 32): _Cost(2.515, 0.544, 0.0, 4.503, 0.650),
    Wide(128, 2, 4, 1, 0, 8, True, turns=True, halves=True): _Cost(1.466, 0.333, 0.0, 2.445, 0.994, 1.969, 0.987),
    Wide(128, 2, 3, 1, 0, 8, True, bm2=32, turns=True, halves=True): _Cost(2.305, 0.389, 1.382, 2.890, 0.865, 1.963, 0.835),
    Wide(128, 2, 3, 1, 0, 8, True, bm2=64, turns=True, halves=True): _Cost(0.381, 0.488, 0.061, 4.346, 1.065, 2.813, 0.819),
    Wide(256, 1, 4, 1, 0, 32, True, turns=True, halves=True): _Cost(2.331, 0.613, 0.315, 5.410, 0.693, 2.627, 0.732),
    Wide(256, 1, 3, 1, 0, 8, True, bm2=64, turns=True, halves=True): _Cost(3.587, 0.761, 0.0, 5.381, 0.849, 2.469, 0.666),
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
    flags = tile.nb * (4 if tile.halves else 1)  # of a cut tile
    best = [p for p in (even, alike) if p >= 0.95 * slots and total % p * flags <= FLAGS]
    return list(dict.fromkeys(best or (p for p in (even, alike, slots, power) if 0 < p <= FLAGS // flags + 1)))


def _cost(tile: Wide, cost: _Cost, m: int, n: int, k: int) -> float:
    stages = math.ceil(k / (64 * tile.h))
    total = math.ceil(m / (tile.bm + tile.bm2)) * math.ceil(n / (64 * tile.nb * tile.mr))
    p, whole, rest = shares(total, stages, tile.p)
    blocks = (whole * stages + math.ceil(rest / p)) * tile.h
    us = cost.fixed + cost.block * blocks + cost.tile * whole
    if rest and tile.halves and p * stages % rest == 0:
        return us + cost.even + cost.even_part * stages * p / rest
    return us + (cost.cut + cost.part * stages * p / rest if rest else 0.0)


@functools.lru_cache(maxsize=65536)
def wide_tile(m: int, n: int, k: int, sms: int) -> Wide:
    """The cheapest tile and number of programs for x [m, k] and W [n, k] on `sms` multiprocessors."""
    best, least = None, math.inf
    for shape, cost in _COSTS.items():
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
