"""How a module's tensors lie along N and K, so that a part of its weight is read alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline.formats.base import Range, TensorInfo
from bitline.formats.common.slices import (
    COLUMNS,
    ROWS,
    Axes,
    Axis,
    Change,
    Layout,
    Stored,
    byte_axis,
    int32_axis,
    scale_axes,
    uncut_columns,
)
from bitline.formats.compressed_tensors.module import QuantizedModule
from bitline.formats.compressed_tensors.packing import Int32Packing
from bitline.types import LinearSpec


def layout_of(m: QuantizedModule, spec: LinearSpec) -> Layout:
    """The layout of all tensors that a weight of this spec is read from."""
    info = lambda suffix: m.source.tensors.get(f"{m.name}.{suffix}")
    found: Layout = {
        ("weight_packed", "weight"): _codes(m, spec), "weight_scale": scale_axes(spec, m.require("weight_scale").shape),
    }  # fmt: skip
    if (zeros := info("weight_zero_point")) is not None:
        found["weight_zero_point"] = _zeros(m, spec, zeros)
    if (shape := info("weight_shape")) is not None and len(shape.shape) == 1:
        found["weight_shape"] = Stored([None], _part_shape)
    if info("weight_g_idx") is not None:
        permuted = spec.act_order or spec.ragged
        found["weight_g_idx"] = [uncut_columns(spec)] if permuted else Stored([COLUMNS], _group_numbers(spec.block[1]))
    return found


def _codes(m: QuantizedModule, spec: LinearSpec) -> Axes:
    """Codes: one to an element, in int32 along K, or a bit stream of bytes."""
    if m.codes.name.endswith("weight_packed") and m.codes.dtype == torch.uint8:
        return ROWS, byte_axis(spec.weight.bits)
    if m.codes.dtype != torch.int32:
        return ROWS, COLUMNS
    return ROWS, _packed(m, spec.weight.bits, spec.k, m.codes.shape[1], Axis(1)) or uncut_columns(spec)


def _packed(m: QuantizedModule, bits: int, count: int, stored: int, each: Axis) -> Axis | None:
    """The axis of packed int32. each: of the numbers that are packed. None where a part could pass for packed the other way."""
    packing = Int32Packing.infer(stored, bits, count, m.schemes.packs_densely)
    if packing is None or (32 % bits and packing.dense != m.schemes.packs_densely):
        return None
    inner = int32_axis(each.dim, bits) if packing.dense else Axis(each.dim, 32 // bits)
    return Axis(each.dim, inner.size * each.size, inner.count)


def _zeros(m: QuantizedModule, spec: LinearSpec, info: TensorInfo) -> Axes | None:
    """Zero points: an int8 each on the scale grid, or in int32 along N."""
    if info.dtype != torch.int32:
        return scale_axes(spec, info.shape)
    (rows, columns), (bn, bk) = spec.grid, spec.block
    along_n = None if rows == 1 else _packed(m, spec.weight.bits, rows, info.shape[0], Axis(0, bn))
    if along_n is None and rows > 1:
        return None
    return along_n, None if columns == 1 else Axis(1, bk)


def _part_shape(shape: Tensor, rows: Range, columns: Range) -> Tensor:
    """weight_shape, [N, K] or [E, N, K], of a part."""
    own = shape.clone()
    own[-2], own[-1] = rows[1] - rows[0], columns[1] - columns[0]
    return own


def _group_numbers(block_k: int) -> Change:
    """weight_g_idx of columns in order, whose numbers start from 0 in every part; -1 stays."""

    def change(g_idx: Tensor, _rows: Range, columns: Range) -> Tensor:
        return torch.where(g_idx < 0, g_idx, g_idx - columns[0] // block_k)

    return change
