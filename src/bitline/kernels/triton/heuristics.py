"""Tile sizes of the Triton kernels by shape: a fixed table, so that no call ever tunes. Measured on an H200.

Those of other NVIDIA GPUs and of AMD's waves of 32 (RDNA) are by compiling for them alone: the largest whose sums and weights
fit 256 registers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from bitline.kernels.triton.layout import Layout

PANEL_ELEMENTS = 1 << 25  # weights that are dequantized at a time: 64 MiB in 16 bits
WORD_BYTES = 64  # packed bytes of one row in one chunk of K


class Tile(NamedTuple):
    """slices: chunks of K that one program works on at a time. bn, bm: rows of W and of x. splits: programs along K."""

    slices: int
    bn: int
    bm: int
    warps: int
    stages: int
    splits: int = 1

    def shared_bytes(self, chunk: int, itemsize: int) -> int:
        """Shared memory of one program, from above: every stage of a tile of x and of packed words."""
        return self.stages * self.slices * (chunk * self.bm * itemsize + self.bn * WORD_BYTES)


class Machine(NamedTuple):
    """nvidia: NVIDIA's GPUs, and the interpreter. wave32: AMD's GPUs with waves of 32. shared: bytes that a program may take.

    fma: Triton multiplies there without matrix instructions: NVIDIA's GPUs before sm80.
    """

    nvidia: bool
    wave32: bool
    shared: int
    fma: bool = False

    @property
    def lone_warps(self) -> bool:
        """Each warp multiplies alone and keeps its factors in registers: NVIDIA's GPUs but sm90 and sm100, which have 227 KiB."""
        return self.nvidia and self.shared < 200 << 10


def fused_limit(dtype: torch.dtype, layout: Layout, fma: bool) -> int:
    """The most rows of x for which the fused kernel is faster than dequantizing to scratch and torch's product.

    Codes in two places and tables are decoded once more for each tile of 128 rows, which takes longer than panels do from the
    second on, and for 3 bits from 65 rows on (28672x4096 on an H200, fused and panels: NF4 207 and 269 us at 128 rows, 432 and
    275 at 160; 6 bits 116 and 186, 253 and 194; 3 bits 85 at 64, 233 and 164 at 65). fma: see Machine; torch has matrix
    instructions there.
    """
    if dtype == torch.float32:
        return 32
    if fma:
        return 8
    if layout.high and layout.bits == 2:
        return 64
    return 128 if layout.high or layout.table else 256


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, chunks: int, layout: Layout, dtype: torch.dtype, corrected: bool, machine: Machine) -> Tile:
    """The tile for x [m, K] and W [n, K] of `chunks` chunks.

    corrected: with zero points or offsets, which need another set of sums.
    """
    chunk = layout.chunk
    if machine.fma:
        tile = Tile(8, 16, 8, 8, 2)
    elif dtype == torch.float32:
        tile = Tile(1, 16, 16, 8, 2, 4) if machine.wave32 else Tile(4, 16, 16, 4, 2)
    elif m <= 8:
        tile = _decode(n, chunks)
    elif m <= 16:
        tile = _sixteen(n, chunks)
    else:
        tile = _prompt(m, n, 64 if corrected else 128)  # 128 columns of two sums do not fit the registers
    if chunk > 128 and tile.bn > 64:
        tile = tile._replace(bn=64, warps=4)  # twice the columns of 2-bit chunks: half the rows
    if not machine.nvidia:
        tile = tile._replace(bm=max(16, tile.bm), stages=2)  # the narrowest matrix instruction of the others is 16 wide
    if machine.wave32 and tile.slices == 1 and dtype != torch.float32:
        few = tile.bm <= 16
        tile = tile._replace(bn=min(tile.bn, 64), bm=min(tile.bm, 64), warps=4 if few else 8, stages=2 if few else 1)
    if machine.lone_warps and tile.bm > 16:
        parts = layout.group != 0 or layout.span < chunk  # sums of a span, and of all of them
        most = 80 if chunk > 128 else 96 if layout.span < chunk or layout.table else 128  # registers of a lane for them
        each = (1 + parts + corrected) * tile.bn * tile.bm // 32
        tile = tile._replace(warps=8) if each // tile.warps > most else tile
        tile = tile._replace(bm=tile.bm // 2) if each // tile.warps > most else tile
    tile = tile._replace(splits=min(tile.splits, -(-chunks // tile.slices)))
    while tile.shared_bytes(chunk, dtype.itemsize) > machine.shared and tile.stages > 1:
        tile = tile._replace(stages=tile.stages - 1)
    while tile.shared_bytes(chunk, dtype.itemsize) > machine.shared and tile.bm > 16:
        tile = tile._replace(bm=tile.bm // 2)
    return tile


def _decode(n: int, chunks: int) -> Tile:
    """Up to 8 rows: programs whose warps share out K, one pass, until W is large enough to fill the device by rows."""
    if n > 8192:
        return Tile(1, 128, 8, 4, 3, 4) if chunks >= 16 else Tile(1, 64, 8, 4, 3)
    if chunks <= 8:
        return Tile(8, 16, 8, 8, 2)
    if chunks > 64:
        return Tile(2, 32, 8, 2, 3, 8 if n <= 4608 else 4)
    if n > 4608:
        return Tile(4, 16, 8, 4, 3)
    return Tile(8, 16, 8, 8, 3, 2 if n <= 1024 else 1)


def _sixteen(n: int, chunks: int) -> Tile:
    if n > 8192:
        return Tile(1, 128, 16, 4, 3, 4) if chunks >= 16 else Tile(1, 64, 16, 4, 3)
    return Tile(1, 32, 16, 2, 3, 16) if n <= 2048 else Tile(1, 64, 16, 2, 3, 8)


def _prompt(m: int, n: int, widest: int) -> Tile:
    """More rows: the widest matrix instructions, and as many splits of K as it takes to occupy the device."""
    bm = 32 if m <= 32 else 64 if m <= 64 else widest
    programs = -(-n // 128) * -(-m // bm)
    splits = 8
    while splits > 1 and splits * programs > (256 if m <= 64 else 132):
        splits //= 2
    return Tile(1, 128, bm, 4 if m <= 64 else 8, 3, splits)
