"""Quark's packings. Integers of groups are stored transposed, [K, N], all others in rows."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import bitstream
from bitline.formats.common import packed_int32

# Integer types: bits, whether codes are two's complement, the dtype that is stored, and codes in one element of it.
INTEGERS: dict[str, tuple[int, bool, tuple[torch.dtype, ...], int]] = {
    "int2": (2, True, (torch.int32, torch.int8), 1), "uint2": (2, False, (torch.uint8,), 4),
    "int4": (4, True, (torch.int32,), 8), "uint4": (4, False, (torch.int32,), 8), "int8": (8, True, (torch.int8,), 1),
    "uint8": (8, False, (torch.uint8,), 1),
}  # fmt: skip
BLOCK = 32  # columns of one scale of the "mx" type


def words_to_rows(words: Tensor, n: int, reorder: bool) -> Tensor:
    """Words along N, int32 [K, ceil(N/8)], to canonical rows, uint8 [N, ceil(K/2)]; "reorder" is AWQ's order of columns."""
    rows = packed_int32.repack_awq(words, 8 * words.shape[1])
    if not reorder:  # field i holds column i, and not AWQ's
        rows = rows.view(-1, 8, rows.shape[1]).index_select(1, torch.tensor(packed_int32.AWQ_ORDER)).flatten(0, 1)
    assert rows.shape[1] == bitstream.row_bytes(words.shape[0], 4)
    return rows[:n]


def fields(stored: Tensor, dtype: str, count: int, reorder: bool) -> Tensor | None:
    """Codes along the last dimension, [n, elements] to uint8 [n, count], signed ones moved by half their range.

    None where a value does not fit the type.
    """
    if dtype == "int3":  # three bytes for eight codes, a bit stream
        return bitstream.unpack(stored, 3, count) ^ 4
    width, signed, _, per = INTEGERS[dtype]
    half = 1 << (width - 1) if signed else 0
    if per == 8:
        out = packed_int32.unpack_int32(stored, 4, 8 * stored.shape[1])
        out = (packed_int32.awq_deinterleave(out) if reorder else out)[:, :count]
    elif per == 4:  # the first code in the high bits
        out = bitstream.unpack(stored, 2, 4 * stored.shape[1]).reshape(stored.shape[0], -1, 4).flip(-1).flatten(1)[:, :count]
    else:
        low, high = int(stored.min()), int(stored.max())
        if low < -half or high >= (1 << width) - half:
            return None
        out = stored.to(torch.uint8) & ((1 << width) - 1)
    return out ^ half if half else out


def integers(stored: Tensor, dtype: str, n: int, k: int, transposed: bool, reorder: bool) -> Tensor | None:
    """A weight's codes to canonical rows, uint8 [n, ceil(k*bits/8)], unsigned; None where a value does not fit the type."""
    width = 3 if dtype == "int3" else INTEGERS[dtype][0]
    if transposed and width == 4:
        rows = words_to_rows(stored, n, reorder)
        return rows ^ 0x88 if INTEGERS[dtype][1] else rows
    out = torch.empty(n, bitstream.row_bytes(k, width), dtype=torch.uint8)
    step = max(8, bitstream.rows_per_chunk(k) // 8 * 8)
    per = 1 if dtype == "int3" else INTEGERS[dtype][3]
    for r in range(0, n, step):
        stop = min(r + step, n)
        if transposed:
            part = fields(stored[:, r // per : -(-stop // per)], dtype, stop - r, reorder)
            part = None if part is None else part.t()
        else:
            part = fields(stored[r:stop], dtype, k, reorder)
        if part is None:
            return None
        out[r:stop] = bitstream.pack(part.contiguous(), width)
    return out


def planes(stored: Tensor) -> Tensor:
    """FP6 codes of the "mx" type, uint8 [N, K*3/4], to canonical rows.

    Of the three bytes of four codes the first has the high two bits of each, the others the low four, the first code in the
    high bits.
    """
    out = torch.empty_like(stored, memory_format=torch.contiguous_format)
    step = bitstream.rows_per_chunk(2 * stored.shape[1])
    for r in range(0, stored.shape[0], step):
        parts = stored[r : r + step].reshape(-1, stored.shape[1] // 3, 3)
        high = torch.stack([parts[..., 0] >> shift & 3 for shift in (6, 4, 2, 0)], -1)
        low = torch.stack([parts[..., 1] >> 4, parts[..., 1] & 15, parts[..., 2] >> 4, parts[..., 2] & 15], -1)
        out[r : r + step] = bitstream.pack((high << 4 | low).flatten(1), 6)
    return out
