"""The weight that a packed weight of the native CPU kernels stands for: for gradients with respect to x.

The core unpacks it (csrc/gemm_unpack.cpp). `unpack_in_torch` is the reference, and serves processes without the core.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from bitline import bitstream, memory, native
from bitline.host import without_default_device
from bitline.kernels.cpu import packed_weight
from bitline.kernels.cpu.native_experts import DTYPE_CODES
from bitline.kernels.cpu.packed_weight import BLOCK_N, K_BLOCK, ZERO_POINT


class Header(NamedTuple):
    """What of csrc/packed_weight.h's PackedHeader tells the weight; sections are byte offsets, 0 where absent."""

    n: int
    k: int
    k_packed: int
    bits: int
    num_groups: int
    group_k: int
    is_integer: int
    implicit_zero: int
    scale_type: int
    offset_type: int
    groups_per_super_scale: int
    codes: int
    scales: int
    offsets: int
    super_scales: int
    super_offsets: int
    column_map: int
    lut_bf16: int
    lut_f32: int


_SHAPE = slice(16, 32)  # the header's bytes of n and k
# Bytes; larger allocations may go back to the system each time, and faulting them in takes longer than unpacking.
_MIN_POOLED = 4 << 20


class BitRun(NamedTuple):
    """Bits of a code: those of int32 `source` of its K block, shifted to the right by `shift`, under `mask`."""

    source: int
    shift: int
    mask: int


@without_default_device
def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """A packed weight as [N, K] in `dtype`, columns in the order of x: float32 arithmetic, rounded once.

    The memory of a large one serves the next call once it is dropped (`memory.empty_pooled`).

    Args:
        packed: uint8, of `packed_weight.pack`.
        dtype: A floating-point dtype.
    """
    core = native.core_for(packed) if dtype in DTYPE_CODES else None
    if core is not None:
        n, k = packed[_SHAPE].view(torch.int64).tolist()
        empty = memory.empty_pooled if n * k * dtype.itemsize >= _MIN_POOLED else torch.empty
        w = empty(n, k, dtype=dtype)
        if core.gemm_unpack(packed.data_ptr(), w.data_ptr(), DTYPE_CODES[dtype]) == 0:
            return w
    return unpack_in_torch(packed, dtype)


def unpack_in_torch(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """`unpack` in torch operations, with the same bits."""
    h = _header(packed)
    w = torch.empty(h.n, h.k, dtype=dtype)
    columns = section(packed, h.column_map, torch.int32, (h.k_packed,)) if h.column_map else None
    step = max(1, bitstream.rows_per_chunk(h.k_packed) // BLOCK_N)
    num_blocks = -(-h.n // BLOCK_N)
    for first in range(0, num_blocks, step):
        blocks = slice(first, min(first + step, num_blocks))
        rows = slice(first * BLOCK_N, min(blocks.stop * BLOCK_N, h.n))
        values = _scaled(packed, h, blocks, _values(packed, h, blocks)).view(-1, h.k_packed)[: rows.stop - rows.start]
        if columns is None:
            w[rows] = values[:, : h.k]
        else:
            w[rows, columns[columns >= 0].long()] = values[:, columns >= 0].to(dtype)
    return w


def _header(packed: Tensor) -> Header:
    magic, _, *fields = struct.unpack("<21q", bytes(packed[: 21 * 8].tolist()))
    assert magic == packed_weight.MAGIC
    return Header(*fields)


def section(packed: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A section of a packed weight as a tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return packed[start : start + size].view(dtype).view(shape)


def _values(packed: Tensor, h: Header, blocks: slice) -> Tensor:
    """What the codes of some N blocks stand for: float32 [N blocks, 32, k_packed]."""
    columns = K_BLOCK[h.bits]
    k_blocks, int32_count = h.k_packed // columns, columns * h.bits // 32
    block_bytes = h.k_packed * h.bits * BLOCK_N // 8
    count = blocks.stop - blocks.start
    codes = section(packed, h.codes + blocks.start * block_bytes, torch.int32, (count, k_blocks, int32_count, BLOCK_N))
    lut = section(packed, h.lut_f32, torch.float32, (1 << h.bits,))
    out = torch.empty(count, BLOCK_N, k_blocks, columns)
    for column, runs in enumerate(bit_runs(h.bits)):
        code = functools.reduce(torch.bitwise_or, (_shifted(codes[:, :, run.source], run.shift) & run.mask for run in runs))
        values = code.float() - h.implicit_zero if h.is_integer else lut.index_select(0, code.reshape(-1)).view(code.shape)
        out[..., column] = values.transpose(1, 2)
    return out.view(count, BLOCK_N, h.k_packed)


def _shifted(v: Tensor, shift: int) -> Tensor:
    return v >> shift if shift >= 0 else v << -shift


def _scaled(packed: Tensor, h: Header, blocks: slice, values: Tensor) -> Tensor:
    """values [N blocks, 32, k_packed] with the scales and offsets of their groups, in place."""
    grouped = values.view(-1, BLOCK_N, h.num_groups, h.group_k)
    scale = _grid(packed, h, blocks, h.scales, h.scale_type, h.super_scales)
    if not h.offset_type:
        grouped.mul_(scale)
        return values
    offset = _grid(packed, h, blocks, h.offsets, h.offset_type, h.super_offsets)
    if h.offset_type == ZERO_POINT:
        grouped.sub_(offset).mul_(scale)
    else:
        grouped.mul_(scale).add_(offset)
    return values


def _grid(packed: Tensor, h: Header, blocks: slice, start: int, kind: int, super_start: int) -> Tensor:
    """Scales or offsets of some N blocks: float32 [N blocks, 32, groups, 1]."""
    dtype = packed_weight.STORAGE_DTYPE[kind]
    count, at = blocks.stop - blocks.start, blocks.start * BLOCK_N * dtype.itemsize
    grid = section(packed, start + at * h.num_groups, dtype, (count, h.num_groups, BLOCK_N)).float()
    if super_start:
        per = h.groups_per_super_scale
        num_super = -(-h.num_groups // per)
        of_super = section(
            packed, super_start + blocks.start * num_super * BLOCK_N * 4, torch.float32, (count, num_super, BLOCK_N)
        )
        grid *= of_super.index_select(1, torch.arange(h.num_groups) // per)
    return grid.transpose(1, 2).unsqueeze(-1)


@functools.cache
def bit_runs(bits: int) -> tuple[tuple[BitRun, ...], ...]:
    """For each column of a K block the runs of bits that make its code; csrc/packed_weight.h's bit_position places them."""
    all_runs = []
    for column in range(K_BLOCK[bits]):
        runs: list[BitRun] = []
        for bit in range(bits):
            index, at = _bit_position(bits, column, bit)
            if runs and runs[-1][:2] == (index, at - bit):
                runs[-1] = runs[-1]._replace(mask=runs[-1].mask | 1 << bit)
            else:
                runs.append(BitRun(index, at - bit, 1 << bit))
        all_runs.append(tuple(runs))
    return tuple(all_runs)


def _bit_position(bits: int, column: int, bit: int) -> tuple[int, int]:
    """(int32 of the K block, bit of it) of bit `bit` of a column's code."""
    pair, half, per_half = column // 2, column % 2 * 16, 16 // bits
    if 16 % bits == 0 or pair < K_BLOCK[bits] * bits // 32 * per_half:
        return pair // per_half, half + pair % per_half * bits + bit
    if bits == 6:
        return (pair - 6, half + 12 + bit) if bit < 4 else (2, half + 2 * pair + bit - 4)
    return bit, half + 15
