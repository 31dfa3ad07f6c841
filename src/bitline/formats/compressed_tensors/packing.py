"""The packings of compressed-tensors: words along K for codes, words along N for zero points, and column orders."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import bitstream


@dataclass(frozen=True)
class Packed:
    """How codes of `width` bits lie in int32 words.

    dense: one little-endian bit stream. Otherwise each word holds floor(32 / width) codes and wastes its high bits, as
    compressed-tensors before 0.18 packed 3, 5, 6 and 7 bits. For 2, 4 and 8 bits the two are the same.
    """

    width: int
    dense: bool

    @staticmethod
    def words(width: int, count: int, dense: bool) -> int:
        """Words that `count` codes fill."""
        return -(-count * width // 32) if dense else -(-count // (32 // width))

    @classmethod
    def of(cls, words: int, width: int, count: int, dense_by_version: bool) -> Packed | None:
        """The layout that fills this many words; the producer's version decides where both do. None where neither does."""
        fits = [dense for dense in (True, False) if cls.words(width, count, dense) == words]
        if not fits:
            return None
        return cls(width, fits[0] if len(fits) == 1 or 32 % width == 0 else dense_by_version)

    def unpack(self, words: Tensor, count: int) -> Tensor:
        """int32 [n, words] to one code per byte, uint8 [n, count]."""
        if self.dense:
            return bitstream.unpack(words.view(torch.uint8), self.width, count)
        per, mask = 32 // self.width, (1 << self.width) - 1
        out = torch.empty(*words.shape, per, dtype=torch.uint8, device=words.device)
        for j in range(per):
            out[..., j] = (words >> (self.width * j)) & mask  # an arithmetic shift: the mask drops the copied sign
        return out.flatten(1)[:, :count]

    def codes(self, words: Tensor, k: int, perm: Tensor | None) -> Tensor:
        """int32 [N, words] to canonical rows, uint8 [N, ceil(K*width/8)], columns in `perm` order; a view where it can be."""
        if self.dense and perm is None:
            return words.view(torch.uint8)[:, : bitstream.row_bytes(k, self.width)]
        out = torch.empty(words.shape[0], bitstream.row_bytes(k, self.width), dtype=torch.uint8)
        step = max(1, bitstream.rows_per_chunk(k) // 4)  # the words of a chunk are unpacked through int32
        for r in range(0, words.shape[0], step):
            rows = self.unpack(words[r : r + step], k)
            out[r : r + step] = bitstream.pack(rows if perm is None else rows.index_select(1, perm.long()), self.width)
        return out


def narrow_integers(values: Tensor, width: int) -> Tensor | None:
    """int8 [N, K] to packed codes `value + 2**(width - 1)`, uint8 [N, ceil(K*width/8)]; None where a value does not fit."""
    n, k = values.shape
    half = 1 << (width - 1)
    out = torch.empty(n, bitstream.row_bytes(k, width), dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, n, step):
        rows = values[r : r + step]
        if width < 8 and (int(rows.min()) < -half or int(rows.max()) >= half):
            return None
        # Modulo 256 the sum of bytes is the sum of integers, so no wider type is needed.
        out[r : r + step] = bitstream.pack(rows.view(torch.uint8) + half, width)
    return out


def zero_points(stored: Tensor, grid: tuple[int, int], width: int, dense_by_version: bool) -> Tensor | None:
    """Zero points in code units, uint8 [grid], from int8 values or from words packed along dim 0. None where out of range.

    A stored zero point is signed like the codes; both move by 2**(width - 1).
    """
    half = 1 << (width - 1)
    if stored.dtype == torch.int8:
        zero = stored.reshape(grid).to(torch.int16) + half
        return None if int(zero.min()) < 0 or int(zero.max()) >= 2 * half else zero.to(torch.uint8)
    layout = Packed.of(stored.shape[0], width, grid[0], dense_by_version)
    assert layout is not None  # the shape was checked when the layer was found
    words = stored.t().clone(memory_format=torch.contiguous_format)  # contiguous() leaves a column of single words as it is
    return layout.unpack(words, grid[0]).t().contiguous()


def column_order(g_idx: Tensor, group: int, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """weight_g_idx [K] as (perm, group_index), each int32 [K], or None where the columns or groups are regular.

    All -1 means that the index is not used. ValueError where a group number is out of range.
    """
    if bool((g_idx == -1).all()):
        return None, None
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise ValueError(f"group numbers {low}..{high}")
    perm = torch.argsort(g_idx, stable=True)
    ordered, columns = g_idx.index_select(0, perm), torch.arange(g_idx.numel())
    regular, trivial = torch.equal(ordered.long(), columns // group), torch.equal(perm, columns)
    return None if trivial else perm.int(), None if regular else ordered.int()
