"""Tiles of the Hopper kernels by shape: fixed rules, so that no call ever tunes. Measured on an H200."""

from __future__ import annotations

import functools
from typing import NamedTuple

from bitline.kernels.hopper.scheme import Scheme


class Decode(NamedTuple):
    """Up to 16 rows of x. r: 16-row tiles of W in a program. c: units of a warp's step. registers: a cap, 0 for none."""

    r: int
    c: int
    warps: int
    registers: int = 0


class Wide(NamedTuple):
    """bm: rows of x. h: blocks of 64 columns in a stage. mr: blocks of 64 rows of W for a warpgroup. p: programs."""

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
def decode_tile(m: int, tiles: int, units: int, scheme: Scheme) -> Decode:
    """For `tiles` 16-row tiles of W and `units` pieces of K."""
    light = scheme.width == 4 and scheme.fine == 1  # few enough registers for two tiles and two units at once
    wide, deep = tiles > 512, units * scheme.blocks > 64
    if m <= 8:
        if deep:
            return Decode(2, 1, 8, 128)
        if wide:
            return Decode(2, 1, 4, 72 if light and not scheme.wide else 0)
        return Decode(1, 2, 16) if light else Decode(2, 1, 16)
    if deep:
        return Decode(2, 1, 8, 128)
    return Decode(2, 1, 2, 128) if wide else Decode(2, 1, 16)


def _even(tiles: int, most: int) -> int:
    """The most programs, at least four fifths of the device, that share `tiles` out evenly; 0 where there is no such number."""
    return next((p for p in range(most, most * 4 // 5, -1) if tiles % p == 0), 0)


@functools.lru_cache(maxsize=4096)
def wide_tile(m: int, n: int, k: int, sms: int) -> Wide:
    """For x [m, k] and W [n, k] on `sms` multiprocessors."""

    def even(bm: int, rows: int = 128) -> int:
        return _even(-(-m // bm) * -(-n // rows), sms)

    if n >= 16384:
        if m <= 64:
            return Wide(64, 2, 4, 2, even(64, 256) or sms, 8, True, True)
        if m <= 128 or 256 < m <= 384:
            return Wide(128, 2, 4, 1, sms, 8, True, False)
        if m <= 256:
            return Wide(256, 1, 4, 1, even(256) or sms, 8, False, False)
        return Wide(256, 1, 4, 1, min(128, sms), 32, False, False)
    if m <= 128:
        return Wide(64, 2, 3, 1, min(128, sms), 8, True, False)
    if m <= 512:
        return Wide(128, 2, 3 if m <= 256 else 4, 1, min(128, sms), 8, True, False)
    return Wide(256, 1, 4, 1, even(256) or sms, 4 if m <= 1024 else 8, m <= 1024, False)
