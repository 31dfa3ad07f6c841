"""Codes packed in int32, as GPTQ and AWQ store them, repacked to the canonical bit stream without unpacking to int32.

GPTQ packs along K, AWQ along N; the first code is in the lowest bits. int32 is the dtype of the files; its bits are unsigned. The
canonical layout is uint8 [N, ceil(K * bits / 8)], each row a little-endian bit stream along K (see `bitline.bitstream`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import bitstream, memory, native

# GPTQModel's planar packing (gptq_p): 32 codes are split into bit planes, (bits of the plane, shift), lowest first.
# A plane of b bits takes b int32.
BIT_PLANES = {3: ((2, 0), (1, 2)), 5: ((4, 0), (1, 4)), 6: ((4, 0), (2, 4)), 7: ((4, 0), (2, 4), (1, 6))}

# AutoAWQ's packing order: nibble i of an int32 holds column AWQ_ORDER[i], column j is in nibble AWQ_REVERSE_ORDER[j].
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_REVERSE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ_CHUNK = 64  # int32 columns at a time: over all of K they stay in a core's cache


# ---- GPTQ: qweight packed along K ----------------------------------------------------------------------------------------


def repack_gptq(packed: Tensor) -> Tensor:
    """GPTQ's qweight, int32 [K * bits / 32, N], to canonical rows, uint8 [N, 4 * packed rows]: a transpose of int32."""
    core = native.core_for(packed)
    if core is None:
        return packed.t().contiguous().view(torch.uint8)
    out = memory.empty_pooled(packed.shape[1], packed.shape[0], dtype=torch.int32)
    core.repack_gptq(packed.data_ptr(), packed.stride(0), *packed.shape, out.data_ptr(), out.shape[1])
    return out.view(torch.uint8)


def repack_gptq_permuted(packed: Tensor, bits: int, perm: Tensor) -> Tensor:
    """`repack_gptq` with act-order: column j of the result is column perm[j] of the input. perm: a permutation, int32 [K]."""
    core = native.core_for(packed, perm)
    if core is None or 32 % bits or bits > 8:
        return bitstream.take(repack_gptq(packed), bits, perm.numel(), perm.long())
    out = memory.empty_pooled(packed.shape[1], packed.shape[0], dtype=torch.int32)
    failed = core.repack_gptq_permuted(
        packed.data_ptr(), packed.stride(0), perm.data_ptr(), perm.numel(), bits, packed.shape[1], out.data_ptr(), out.shape[1]
    )
    if failed:
        raise MemoryError("no memory to permute columns")
    return out.view(torch.uint8)


def repack_gptq_planar(packed: Tensor, bits: int, k: int) -> Tensor:
    """GPTQModel's planar qweight, int32 [K * bits / 32, N], to canonical rows, uint8 [N, ceil(K * bits / 8)]."""
    n = packed.shape[1]
    out = torch.empty(n, bitstream.row_bytes(k, bits), dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, n, step):
        codes = unpack_int32(packed[:, r : r + step].t(), bits, k, planar=True)
        out[r : r + step] = bitstream.pack(codes, bits)
    return out


# ---- AWQ: qweight packed along N -----------------------------------------------------------------------------------------


def repack_awq(packed: Tensor, n: int) -> Tensor:
    """AWQ's 4-bit qweight, int32 [K, N/8] in AWQ_ORDER, to canonical rows, uint8 [N, ceil(K/2)].

    Eight int32 of successive k are an 8 x 8 matrix of nibbles. It is transposed by exchanging halves, then bytes, then
    nibbles of pairs of int32, with vector instructions.
    """
    k, columns = packed.shape
    blocks = -(-k // 8)
    out = memory.empty_pooled(columns, 8, blocks, dtype=torch.int32)
    rows = out.view(torch.uint8).view(n, 4 * blocks)[:, : bitstream.row_bytes(k, 4)]
    core = native.core_for(packed)
    if core is not None:
        core.repack_awq(packed.data_ptr(), packed.stride(0), k, columns, out.data_ptr(), blocks)
        return rows
    for c in range(0, columns, _AWQ_CHUNK):
        chunk = packed[:, c : c + _AWQ_CHUNK]
        if k % 8:
            chunk = torch.nn.functional.pad(chunk, (0, 0, 0, 8 * blocks - k))
        nibbles = chunk.reshape(blocks, 8, -1).transpose(0, 1).contiguous()
        _transpose_nibbles(nibbles)
        for i, column in enumerate(AWQ_ORDER):
            out[c : c + _AWQ_CHUNK, column] = nibbles[i].t().contiguous()
    return rows


def _transpose_nibbles(packed: Tensor) -> None:
    """In place, int32 [8, …]: exchange nibble i of row j with nibble j of row i."""
    for distance, shift, mask in ((4, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (1, 4, 0x0F0F0F0F)):
        pairs = packed.view(4 // distance, 2, distance, *packed.shape[1:])
        low, high = pairs[:, 0], pairs[:, 1]
        differ = ((low >> shift) ^ high) & mask  # the mask also drops the sign that the arithmetic shift copied
        high ^= differ
        low ^= differ << shift


def repack_along_n(packed: Tensor, bits: int, n: int, *, interleaved: bool = True) -> Tensor:
    """A qweight of any bits packed along N, int32 [K, N * bits / 32], to canonical rows, uint8 [N, ceil(K * bits / 8)].

    interleaved: columns are in AWQ_ORDER within each 8.
    """
    k = packed.shape[0]
    out = torch.empty(n, bitstream.row_bytes(k, bits), dtype=torch.uint8)
    step = max(32, bitstream.rows_per_chunk(k) // 32 * 32)  # 32 codes end on an int32
    for c in range(0, n, step):
        stop = min(c + step, n)
        codes = unpack_int32(packed[:, c * bits // 32 : -(-stop * bits // 32)], bits, stop - c)
        out[c:stop] = bitstream.pack((awq_deinterleave(codes) if interleaved else codes).t().contiguous(), bits)
    return out


def awq_deinterleave(codes: Tensor) -> Tensor:
    """Unpacked codes in AWQ_ORDER, uint8 [n, N], to column order."""
    order = torch.tensor(AWQ_REVERSE_ORDER)
    return codes.reshape(codes.shape[0], -1, 8).index_select(2, order).view(codes.shape[0], -1)


# ---- codes and zero points of either -------------------------------------------------------------------------------------


def unpack_int32(packed: Tensor, bits: int, count: int, *, planar: bool = False) -> Tensor:
    """int32 [n, packed columns] to one code per byte, uint8 [n, count]. planar: blocks of 32 codes in BIT_PLANES."""
    stream = packed.contiguous().view(torch.uint8)
    if not planar:
        return bitstream.unpack(stream, bits, count)
    blocks = stream.view(-1, 4 * bits)
    out = torch.zeros(blocks.shape[0], 32, dtype=torch.uint8, device=packed.device)
    offset = 0
    for plane, shift in BIT_PLANES[bits]:
        out |= bitstream.unpack(blocks[:, offset : offset + 4 * plane], plane, 32) << shift
        offset += 4 * plane
    return out.view(packed.shape[0], -1)[:, :count]


def unpack_zero_points(packed: Tensor, bits: int, n: int, *, minus_one: bool = False, interleaved: bool = False) -> Tensor:
    """qzeros packed along N, int32 [G, n * bits / 32], to zero points uint8 [n, G].

    minus_one: stored as zero - 1 (GPTQ v1). interleaved: in AWQ_ORDER within each 8.
    """
    # GPTQ v1 subtracts 1 from every field with one int32 subtraction, so a zero point of 0 borrows from the next field.
    # Only the int32 addition restores both.
    add_packed = minus_one and 32 % bits == 0
    core = native.core_for(packed)
    if core is None or bits == 8:
        codes = unpack_int32(add_one_packed(packed, bits) if add_packed else packed, bits, n)
        if minus_one and not add_packed:
            codes = (codes + 1) & ((1 << bits) - 1)
        return (awq_deinterleave(codes) if interleaved else codes).t().contiguous()
    out = torch.empty(n, packed.shape[0], dtype=torch.uint8)
    failed = core.unpack_zero_points(
        packed.data_ptr(), packed.stride(0), packed.shape[0], n, bits, _one_per_field(bits) if add_packed else 0,
        minus_one and not add_packed, interleaved, out.data_ptr(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory to unpack zero points")
    return out


def add_one_packed(packed: Tensor, bits: int) -> Tensor:
    """Add 1 to every field by adding one constant to the int32, modulo 2**32: a carry undoes the producer's borrow."""
    return (packed.long() + _one_per_field(bits)).to(torch.int32)  # the conversion keeps the low 32 bits


def _one_per_field(bits: int) -> int:
    return sum(1 << shift for shift in range(0, 32, bits))
