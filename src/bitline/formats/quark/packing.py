"""How Quark packs codes: integers of 2, 3, 4 and 8 bits, and the FP6 of its "mx" type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import bitstream
from bitline.formats.common import packed_int32


@dataclass(frozen=True)
class IntegerStorage:
    """How an integer dtype is stored.

    signed: codes are two's complement. dtypes: of the stored tensor. per_element: codes in one element of it; 0 for int3,
    a little-endian bit stream of bytes.
    """

    bits: int
    signed: bool
    dtypes: tuple[torch.dtype, ...]
    per_element: int

    @property
    def is_stream(self) -> bool:
        """True for int3, three bytes for eight codes."""
        return self.per_element == 0

    @property
    def half(self) -> int:
        """What is added to a stored code to make it unsigned."""
        return 1 << (self.bits - 1) if self.signed else 0

    def num_codes(self, elements: int) -> int:
        """Codes in this many elements."""
        return elements * 8 // self.bits if self.is_stream else elements * self.per_element

    def num_elements(self, codes: int) -> int:
        """Elements that this many codes take, the last of them perhaps padded."""
        return codes * self.bits // 8 if self.is_stream else -(-codes // self.per_element)

    def unpack(self, stored: Tensor, count: int, reorder: bool) -> Tensor | None:
        """Codes along the last dimension, [n, elements] to unsigned codes uint8 [n, count]; None where one is out of range.

        reorder: 4-bit codes are in AWQ's order within each int32.
        """
        if self.is_stream:
            return bitstream.unpack(stored, 3, count) ^ self.half
        if self.per_element == 8:
            out = packed_int32.unpack_int32(stored, 4, 8 * stored.shape[1])
            out = (packed_int32.awq_deinterleave(out) if reorder else out)[:, :count]
        elif self.per_element == 4:  # four 2-bit codes in a byte, the first in the high bits
            codes = bitstream.unpack(stored, 2, 4 * stored.shape[1])
            out = codes.reshape(stored.shape[0], -1, 4).flip(-1).flatten(1)[:, :count]
        else:
            low, high = int(stored.min()), int(stored.max())
            if low < -self.half or high >= (1 << self.bits) - self.half:
                return None
            out = stored.to(torch.uint8) & ((1 << self.bits) - 1)
        return out ^ self.half if self.half else out

    def repack(self, stored: Tensor, n: int, k: int, transposed: bool, reorder: bool) -> Tensor | None:
        """A stored weight to unsigned canonical rows, uint8 [n, ceil(k * bits / 8)]; None where a code is out of range.

        transposed: stored as [K, N], packed along N, instead of [N, K], packed along K.
        """
        if transposed and self.bits == 4:
            rows = _repack_int32_along_n(stored, n, reorder)
            return rows ^ 0x88 if self.signed else rows
        out = torch.empty(n, bitstream.row_bytes(k, self.bits), dtype=torch.uint8)
        step = max(8, bitstream.rows_per_chunk(k) // 8 * 8)
        per_element = self.per_element or 1
        for r in range(0, n, step):
            stop = min(r + step, n)
            if transposed:
                codes = self.unpack(stored[:, r // per_element : -(-stop // per_element)], stop - r, reorder)
                codes = None if codes is None else codes.t()
            else:
                codes = self.unpack(stored[r:stop], k, reorder)
            if codes is None:
                return None
            out[r:stop] = bitstream.pack(codes.contiguous(), self.bits)
        return out


INTEGERS = {
    "int2": IntegerStorage(2, True, (torch.int32, torch.int8), 1), "uint2": IntegerStorage(2, False, (torch.uint8,), 4),
    "int3": IntegerStorage(3, True, (torch.uint8,), 0),
    "int4": IntegerStorage(4, True, (torch.int32,), 8), "uint4": IntegerStorage(4, False, (torch.int32,), 8),
    "int8": IntegerStorage(8, True, (torch.int8,), 1), "uint8": IntegerStorage(8, False, (torch.uint8,), 1),
}  # fmt: skip


def _repack_int32_along_n(packed: Tensor, n: int, reorder: bool) -> Tensor:
    """4-bit codes packed along N, int32 [K, ceil(N/8)], to canonical rows, uint8 [N, ceil(K/2)]."""
    rows = packed_int32.repack_awq(packed, 8 * packed.shape[1])
    if not reorder:  # nibble i holds column i, not AWQ's
        rows = rows.view(-1, 8, rows.shape[1]).index_select(1, torch.tensor(packed_int32.AWQ_ORDER)).flatten(0, 1)
    assert rows.shape[1] == bitstream.row_bytes(packed.shape[0], 4)
    return rows[:n]


def repack_mx_fp6(stored: Tensor) -> Tensor:
    """FP6 codes of the "mx" type, uint8 [N, K * 3/4], to canonical rows of the same size.

    Of the three bytes of four codes the first holds the high two bits of each, the others the low four, the first code in
    the high bits.
    """
    out = torch.empty_like(stored, memory_format=torch.contiguous_format)
    step = bitstream.rows_per_chunk(2 * stored.shape[1])
    for r in range(0, stored.shape[0], step):
        triples = stored[r : r + step].reshape(-1, stored.shape[1] // 3, 3)
        high = torch.stack([triples[..., 0] >> shift & 3 for shift in (6, 4, 2, 0)], -1)
        low = torch.stack([triples[..., 1] >> 4, triples[..., 1] & 15, triples[..., 2] >> 4, triples[..., 2] & 15], -1)
        out[r : r + step] = bitstream.pack((high << 4 | low).flatten(1), 6)
    return out
