"""Codes in 32-bit words, as GPTQ and AWQ pack them, to the canonical bit stream. No weight is ever expanded to int32.

"Fields" are the codes within a word, the lowest bits first. All words are int32 with the bits of an unsigned word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import bitstream, memory, native

# Planes of GPTQModel's planar words, (width, first bit), lowest first: 32 codes are `width` words of each plane.
PLANES = {3: ((2, 0), (1, 2)), 5: ((4, 0), (1, 4)), 6: ((4, 0), (2, 4)), 7: ((4, 0), (2, 4), (1, 6))}

AWQ_FIELD_TO_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_COLUMN_TO_FIELD = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ_CHUNK = 64  # words of a row at a time: with all of K they stay in a core's cache


def transpose_words(words: Tensor) -> Tensor:
    """Words along the first dimension, int32 [R, N], to rows of bytes, uint8 [N, 4 * R]: GPTQ's codes as a bit stream."""
    core = native.usable(words)
    if core is None:
        return words.t().contiguous().view(torch.uint8)
    out = memory.passing(words.shape[1], words.shape[0], dtype=torch.int32)
    core.transpose_words(words.data_ptr(), words.stride(0), *words.shape, out.data_ptr(), out.shape[1])
    return out.view(torch.uint8)


def ordered_words(words: Tensor, width: int, perm: Tensor) -> Tensor:
    """`transpose_words`, with column j of the result the column perm[j] of the words; perm is a permutation, int32 [K]."""
    core = native.usable(words, perm)
    if core is None or 32 % width or width > 8:
        return bitstream.take(transpose_words(words), width, perm.numel(), perm.long())
    out = memory.passing(words.shape[1], words.shape[0], dtype=torch.int32)
    failed = core.ordered_words(
        words.data_ptr(), words.stride(0), perm.data_ptr(), perm.numel(), width, words.shape[1], out.data_ptr(), out.shape[1]
    )
    if failed:
        raise MemoryError("no memory to order columns in")
    return out.view(torch.uint8)


def unpack_words(words: Tensor, width: int, count: int, *, planar: bool = False) -> Tensor:
    """int32 [n, W] to one code per byte, uint8 [n, count]; each row is a bit stream, or planar blocks of 32 codes."""
    stream = words.contiguous().view(torch.uint8)
    if not planar:
        return bitstream.unpack(stream, width, count)
    blocks = stream.view(-1, 4 * width)
    out = torch.zeros(blocks.shape[0], 32, dtype=torch.uint8, device=words.device)
    at = 0
    for plane, shift in PLANES[width]:
        out |= bitstream.unpack(blocks[:, at : at + 4 * plane], plane, 32) << shift
        at += 4 * plane
    return out.view(words.shape[0], -1)[:, :count]


def planar_codes(words: Tensor, width: int, k: int) -> Tensor:
    """Planar words along the first dimension, int32 [K*width/32, N], to canonical rows, uint8 [N, ceil(K*width/8)]."""
    n = words.shape[1]
    out = torch.empty(n, bitstream.row_bytes(k, width), dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, n, step):
        rows = unpack_words(words[:, r : r + step].t(), width, k, planar=True)
        out[r : r + step] = bitstream.pack(rows, width)
    return out


def add_to_words(words: Tensor, width: int) -> Tensor:
    """Add 1 to every field by adding one constant to the whole word, modulo 2**32: carries go where borrows came from."""
    return (words.long() + _ones(width)).to(torch.int32)  # the conversion keeps the low 32 bits


def _ones(width: int) -> int:
    return sum(1 << at for at in range(0, 32, width))


def zero_points(words: Tensor, width: int, n: int, *, minus_one: bool = False, interleaved: bool = False) -> Tensor:
    """Words along N, int32 [G, n*width/32], a bit stream in each row, to zero points uint8 [n, G].

    minus_one: they are stored so (GPTQ v1). interleaved: in AWQ's order of columns.
    """
    # Producers subtract from whole words, so a zero of 0 borrows from its neighbour: only a whole word gives it back.
    whole = minus_one and 32 % width == 0
    core = native.usable(words)
    if core is None or width == 8:
        fields = unpack_words(add_to_words(words, width) if whole else words, width, n)
        if minus_one and not whole:
            fields = (fields + 1) & ((1 << width) - 1)
        return (awq_columns(fields) if interleaved else fields).t().contiguous()
    out = torch.empty(n, words.shape[0], dtype=torch.uint8)
    failed = core.zero_points(
        words.data_ptr(), words.stride(0), words.shape[0], n, width, _ones(width) if whole else 0, minus_one and not whole,
        interleaved, out.data_ptr(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory to read zero points in")
    return out


def awq_codes(words: Tensor, n: int) -> Tensor:
    """AWQ's 4-bit words along N, int32 [K, N/8], to canonical rows, uint8 [N, ceil(K/2)].

    Eight words of eight successive k are an 8 × 8 matrix of nibbles; it is transposed by exchanging halves, then bytes,
    then nibbles of pairs of words, whole vectors at a time.
    """
    k, columns = words.shape
    blocks = -(-k // 8)
    out = memory.passing(columns, 8, blocks, dtype=torch.int32)
    rows = out.view(torch.uint8).view(n, 4 * blocks)[:, : bitstream.row_bytes(k, 4)]
    core = native.usable(words)
    if core is not None:
        core.awq_codes(words.data_ptr(), words.stride(0), k, columns, out.data_ptr(), blocks)
        return rows
    for c in range(0, columns, _AWQ_CHUNK):
        part = words[:, c : c + _AWQ_CHUNK]
        if k % 8:
            part = torch.nn.functional.pad(part, (0, 0, 0, 8 * blocks - k))
        fields = part.reshape(blocks, 8, -1).transpose(0, 1).contiguous()
        _transpose_nibbles(fields)
        for i, column in enumerate(AWQ_FIELD_TO_COLUMN):
            out[c : c + _AWQ_CHUNK, column] = fields[i].t().contiguous()
    return rows


def _transpose_nibbles(words: Tensor) -> None:
    """In place, int32 [8, …]: nibble i of word j and nibble j of word i change places."""
    for distance, shift, mask in ((4, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (1, 4, 0x0F0F0F0F)):
        pairs = words.view(4 // distance, 2, distance, *words.shape[1:])
        low, high = pairs[:, 0], pairs[:, 1]
        differ = ((low >> shift) ^ high) & mask  # the mask also drops the sign that the shift copied
        high ^= differ
        low ^= differ << shift


def awq_stream_codes(words: Tensor, width: int, n: int, *, interleaved: bool = True) -> Tensor:
    """AWQ's words of any width, a bit stream along N, its columns interleaved by 8 or not, int32 [K, N*width/32], to canonical

    rows.
    """
    k = words.shape[0]
    out = torch.empty(n, bitstream.row_bytes(k, width), dtype=torch.uint8)
    step = max(32, bitstream.rows_per_chunk(k) // 32 * 32)  # 32 codes end on a word
    for c in range(0, n, step):
        stop = min(c + step, n)
        part = unpack_words(words[:, c * width // 32 : -(-stop * width // 32)], width, stop - c)
        out[c:stop] = bitstream.pack((awq_columns(part) if interleaved else part).t().contiguous(), width)
    return out


def awq_columns(fields: Tensor) -> Tensor:
    """Codes in the order of AWQ's fields, uint8 [n, N], to the order of columns."""
    order = torch.tensor(AWQ_COLUMN_TO_FIELD)
    return fields.reshape(fields.shape[0], -1, 8).index_select(2, order).view(fields.shape[0], -1)


def column_order(g_idx: Tensor, group_size: int, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """A raw g_idx [K] to (perm, group_index) of the canonical weight, each None where it is trivial.

    Negative entries count from the last group, as GPTQModel reads them. A ValueError says what is out of range.
    """
    k = g_idx.numel()
    index = torch.where(g_idx < 0, g_idx.long() + groups, g_idx.long())
    if int(index.min()) < 0 or int(index.max()) >= groups:
        at = int(((index < 0) | (index >= groups)).nonzero()[0])
        raise ValueError(f"group {int(g_idx[at])} at column {at}")
    regular = torch.arange(k) // group_size
    if torch.equal(index, regular):
        return None, None
    ordered, perm = index.sort(stable=True)
    trivial = torch.equal(perm, torch.arange(k))
    return None if trivial else perm.int(), None if torch.equal(ordered, regular) else ordered.int()
