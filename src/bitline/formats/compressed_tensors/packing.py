"""compressed-tensors' int32 packing: codes along K, zero points along N."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import bitstream
from bitline.formats.common.act_order import sort_by_group


@dataclass(frozen=True)
class Int32Packing:
    """How codes of `bits` bits are packed in int32.

    dense: one little-endian bit stream. Otherwise each int32 holds floor(32 / bits) codes and pads its high bits, as
    compressed-tensors before 0.18 packed 3, 5, 6 and 7 bits. For 2, 4 and 8 bits the two are the same.
    """

    bits: int
    dense: bool

    @staticmethod
    def packed_size(bits: int, count: int, dense: bool) -> int:
        """The number of int32 that `count` codes take."""
        return -(-count * bits // 32) if dense else -(-count // (32 // bits))

    @classmethod
    def infer(cls, packed_size: int, bits: int, count: int, dense_by_version: bool) -> Int32Packing | None:
        """The packing that takes this many int32; the producer's version decides where both do. None where neither does."""
        fits = [dense for dense in (True, False) if cls.packed_size(bits, count, dense) == packed_size]
        if not fits:
            return None
        return cls(bits, fits[0] if len(fits) == 1 or 32 % bits == 0 else dense_by_version)

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """int32 [n, packed size] to one code per byte, uint8 [n, count]."""
        if self.dense:
            return bitstream.unpack(packed.view(torch.uint8), self.bits, count)
        per_int32, mask = 32 // self.bits, (1 << self.bits) - 1
        out = torch.empty(*packed.shape, per_int32, dtype=torch.uint8, device=packed.device)
        for j in range(per_int32):
            out[..., j] = (packed >> (self.bits * j)) & mask  # an arithmetic shift: the mask drops the copied sign
        return out.flatten(1)[:, :count]

    def repack(self, packed: Tensor, k: int, perm: Tensor | None) -> Tensor:
        """int32 [N, packed size] to canonical rows, uint8 [N, ceil(K * bits / 8)], columns in `perm` order; a view if it can."""
        if self.dense and perm is None:
            return packed.view(torch.uint8)[:, : bitstream.row_bytes(k, self.bits)]
        out = torch.empty(packed.shape[0], bitstream.row_bytes(k, self.bits), dtype=torch.uint8)
        step = max(1, bitstream.rows_per_chunk(k) // 4)  # padded int32 are unpacked through int32
        for r in range(0, packed.shape[0], step):
            codes = self.unpack(packed[r : r + step], k)
            out[r : r + step] = bitstream.pack(codes if perm is None else codes.index_select(1, perm.long()), self.bits)
        return out


def unpack_zero_points(stored: Tensor, grid: tuple[int, int], bits: int, dense_by_version: bool) -> Tensor | None:
    """Zero points in code units, uint8 [grid], from int8 values or int32 packed along dim 0. None where one is out of range.

    int8 zero points are signed like the codes; both are shifted by 2**(bits - 1).
    """
    half = 1 << (bits - 1)
    if stored.dtype == torch.int8:
        zero = stored.reshape(grid).to(torch.int16) + half
        return None if int(zero.min()) < 0 or int(zero.max()) >= 2 * half else zero.to(torch.uint8)
    packing = Int32Packing.infer(stored.shape[0], bits, grid[0], dense_by_version)
    assert packing is not None  # the shape was checked with the header
    packed = stored.t().clone(memory_format=torch.contiguous_format)  # contiguous() leaves a single column as a strided view
    return packing.unpack(packed, grid[0]).t().contiguous()


def act_order_of(g_idx: Tensor, block_k: int, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """weight_g_idx [K] as (perm, group_index), each int32 [K], or None where it is the identity or regular.

    All -1 means that there is no act-order. ValueError where a group number is out of range.
    """
    if bool((g_idx == -1).all()):
        return None, None
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise ValueError(f"group numbers {low}..{high}")
    return sort_by_group(g_idx, block_k)
