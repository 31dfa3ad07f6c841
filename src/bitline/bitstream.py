"""Packed codes: each row is a little-endian bit stream along K, `uint8 [N, ceil(K * bits / 8)]`.

Element k of a row occupies bits [k * bits, (k + 1) * bits) of that row. Bits past K * bits are ignored by every
reader and written as zero here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitline import memory, native

ROW_CHUNK_BYTES = 1 << 21  # a chunk of unpacked rows, and its float32 values, stay in L3


def row_bytes(k: int, bits: int) -> int:
    """Bytes of one packed row."""
    return (k * bits + 7) // 8


def rows_per_chunk(k: int) -> int:
    """How many rows to unpack at a time."""
    return max(1, ROW_CHUNK_BYTES // max(1, k))


def unpack(codes: Tensor, bits: int, k: int) -> Tensor:
    """Packed rows uint8 [N, >= ceil(k*bits/8)] to one code per byte, uint8 [N, k]."""
    n = codes.shape[0]
    if bits == 8:
        return codes[:, :k]
    core = native.core_for(codes)
    if core is not None:
        out = torch.empty(n, k, dtype=torch.uint8)
        core.unpack_codes(codes.data_ptr(), codes.stride(0), n, k, bits, out.data_ptr())
        return out
    if bits == 4:  # both nibbles of a byte at once, in the two bytes of an int16: three times faster than one by one
        pairs = codes.to(torch.int16)
        return (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)[:, :k]
    if 8 % bits == 0:
        return _unpack_within_bytes(codes, bits, k)
    return _unpack_across_bytes(codes, bits, k)


def _unpack_within_bytes(codes: Tensor, bits: int, k: int) -> Tensor:
    """`unpack` for 1 and 2 bits: no code spans two bytes."""
    n, row = codes.shape
    per_byte = 8 // bits
    mask = (1 << bits) - 1
    out = torch.empty(n, row, per_byte, dtype=torch.uint8, device=codes.device)
    for i in range(per_byte):
        field = codes if i == 0 else codes >> (bits * i)
        out[..., i] = field & mask if i < per_byte - 1 else field
    return out.view(n, row * per_byte)[:, :k]


def _unpack_across_bytes(codes: Tensor, bits: int, k: int) -> Tensor:
    """`unpack` for 3, 5, 6 and 7 bits: eight codes fill exactly `bits` bytes."""
    n, blocks = codes.shape[0], -(-k // 8)
    need = blocks * bits
    if codes.shape[1] < need:
        codes = torch.nn.functional.pad(codes, (0, need - codes.shape[1]))
    grouped = codes[:, :need].reshape(n, blocks, bits)
    out = torch.empty(n, blocks, 8, dtype=torch.uint8, device=codes.device)
    mask = (1 << bits) - 1
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        field = grouped[..., byte] >> shift
        if shift + bits > 8:
            field = field | (grouped[..., byte + 1] << (8 - shift))
        out[..., i] = field & mask
    return out.view(n, blocks * 8)[:, :k]


def pack(values: Tensor, bits: int) -> Tensor:
    """One code per byte uint8 [N, K] to packed rows uint8 [N, ceil(K*bits/8)]; high bits of a byte are dropped."""
    n, k = values.shape
    if bits == 8:
        return values.contiguous()
    core = native.core_for(values)
    if core is not None:
        packed = torch.empty(n, row_bytes(k, bits), dtype=torch.uint8)
        core.pack_codes(values.data_ptr(), values.stride(0), n, k, bits, packed.data_ptr())
        return packed
    values = values & ((1 << bits) - 1)
    unit = 8 // bits if 8 % bits == 0 else 8  # codes that fill whole bytes
    if k % unit:
        values = torch.nn.functional.pad(values, (0, unit - k % unit))
    if bits == 4:
        pairs = values.contiguous().view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)
    if 8 % bits == 0:
        fields = values.view(n, -1, unit)
        out = fields[..., 0].clone()
        for i in range(1, unit):
            out |= fields[..., i] << (bits * i)
        return out
    fields = values.view(n, -1, 8)
    out = torch.zeros(n, fields.shape[1], bits, dtype=torch.uint8, device=values.device)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        out[..., byte] |= fields[..., i] << shift
        if shift + bits > 8:
            out[..., byte + 1] |= fields[..., i] >> (8 - shift)
    return out.view(n, -1)[:, : row_bytes(k, bits)].contiguous()


def narrow(codes: Tensor, bits: int, start: int, stop: int) -> Tensor:
    """Columns [start, stop) of packed rows: a view where `start` is byte-aligned, else repacked a chunk of rows at a time."""
    if start * bits % 8 == 0:
        return codes[:, start * bits // 8 : row_bytes(stop, bits)]
    base = start // 8 * 8  # eight codes end on a byte: earlier ones need not be unpacked
    part = codes[:, base * bits // 8 : row_bytes(stop, bits)]
    return map_columns(part, bits, stop - base, lambda rows: rows[:, start - base :], stop - start)


def take(codes: Tensor, bits: int, k: int, index: Tensor) -> Tensor:
    """Columns `index` (int64 [K']) of packed rows of k columns, repacked. IndexError: an index is outside [0, k)."""
    core = native.core_for(codes, index)
    if core is not None and index.dtype == torch.int64:
        out = memory.empty_pooled(codes.shape[0], row_bytes(index.numel(), bits), dtype=torch.uint8)
        failed = core.take_columns(
            codes.data_ptr(), codes.stride(0), codes.shape[0], k, bits, index.data_ptr(), index.numel(), out.data_ptr()
        )
        if failed == -2:
            raise MemoryError("no memory to take columns")
        if failed:
            raise IndexError(f"a column index is outside [0, {k})")
        return out
    return map_columns(codes, bits, k, lambda rows: rows.index_select(1, index), index.numel())


def map_columns(codes: Tensor, bits: int, k: int, change: Callable[[Tensor], Tensor], k_out: int) -> Tensor:
    """Unpack, change and repack a chunk of rows at a time; `change` maps uint8 [n, k] to uint8 [n, k_out]."""
    n = codes.shape[0]
    out = torch.empty(n, row_bytes(k_out, bits), dtype=torch.uint8, device=codes.device)
    step = rows_per_chunk(max(k, k_out))
    for r in range(0, n, step):
        out[r : r + step] = pack(change(unpack(codes[r : r + step], bits, k)), bits)
    return out
