"""Tile sizes of the Triton kernels by shape: a fixed table, so that no call ever tunes. Measured on an H200."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

PANEL_ELEMENTS = 1 << 25  # weights that are dequantized at a time: 64 MiB in 16 bits


class Tile(NamedTuple):
    """slices: chunks of K that one program works on at a time. bn, bm: rows of W and of x. splits: programs along K."""

    slices: int
    bn: int
    bm: int
    warps: int
    stages: int
    splits: int = 1


def fused_limit(dtype: torch.dtype) -> int:
    """The most rows of x for which the fused kernel is faster than dequantizing to scratch and torch's product."""
    return 32 if dtype == torch.float32 else 256


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, chunks: int, dtype: torch.dtype, device: str) -> Tile:
    """The tile for x [m, K] and W [n, K] of that many chunks."""
    if dtype == torch.float32:
        return Tile(4, 16, 16, 4, 2)
    if m <= 16:
        bm = 8 if m <= 8 and device == "cuda" and not torch.version.hip else 16
        return Tile(8, 16, bm, 8, 3) if n <= 8192 else Tile(4, 32, bm, 4, 3)
    if m <= 32:
        return Tile(4, 32, 32, 4, 2)
    if m <= 64:
        return Tile(1, 64, 64, 4, 3, min(chunks, 4 if n <= 8192 else 1))
    return Tile(1, 128, 64, 8, 3, min(chunks, 4 if n <= 8192 else 1))
