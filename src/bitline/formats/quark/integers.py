"""Quark's integers: 2, 3, 4 and 8 bits, per tensor, row or group, with integer or float zero points.

Groups are stored transposed, [K, N] under scales [G, N], all others in rows; 3 bits are always in rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import types
from bitline.formats.base import LayerRecord, TensorInfo
from bitline.formats.common.scales import FLOATS, SCALAR_SHAPES, grid_of, stored_shapes
from bitline.formats.common.slices import COLUMNS, ROWS, Axis, Layout, byte_axis, scale_axes, vector_axes
from bitline.formats.quark.module import ZERO, QuarkModule, WeightFields
from bitline.formats.quark.packing import INTEGERS, IntegerStorage
from bitline.types import LinearSpec, ScalarType


@dataclass(frozen=True)
class _Layout:
    """Shape and order of a stored weight. grouped: scales are [G, N]."""

    storage: IntegerStorage
    n: int
    k: int
    block: tuple[int, int]
    grouped: bool
    reorder: bool

    @property
    def grid(self) -> tuple[int, int]:
        return grid_of(self.n, self.k, self.block)

    @property
    def transposed(self) -> bool:
        """Whether codes are stored as [K, N]."""
        return self.grouped and not self.storage.is_stream

    def axes(
        self, spec: LinearSpec, scale: tuple[int, ...], zeros: tuple[int, ...] | None, *, float_zeros: bool
    ) -> Layout:  # fmt: skip
        """How the module's tensors lie along N and K. scale, zeros: the stored shapes."""
        along = lambda dim: byte_axis(3, dim) if self.storage.is_stream else Axis(dim, self.storage.per_element)
        groups = None if self.grid[1] == 1 else Axis(1, self.block[1])
        found: Layout = {
            "weight": (COLUMNS, along(0)) if self.transposed else (ROWS, along(1)),
            "weight_scale": (groups, ROWS) if self.grouped else scale_axes(spec, scale),
        }
        if zeros is None:
            return found
        if self.grouped and self.storage.is_stream and not float_zeros:  # along K, three bytes for eight groups
            found[ZERO] = (ROWS, None if groups is None else Axis(1, 8 * groups.size, 3))
        elif self.grouped:
            found[ZERO] = (groups, ROWS if float_zeros else along(0))
        elif self.grid != (1, 1):
            found[ZERO] = vector_axes(ROWS if float_zeros else along(0), zeros)
        return found


def integer_record(m: QuarkModule) -> LayerRecord:
    """The record of a module of integers."""
    storage = INTEGERS[m.dtype]
    layout = _check_shapes(m, storage)
    # Quark writes zero points for symmetric weights too; those of signed types are all 0.
    symmetric = storage.signed and m.weight_spec.is_symmetric
    zeros = m.find(ZERO)
    if zeros is None and not symmetric:
        m.require(ZERO)
    # Float zero points are not packed, may be outside the codes' range, and were rounded by some releases.
    float_zeros = zeros is not None and (zeros.dtype in FLOATS or m.weight_spec.has_float_zeros)
    if zeros is not None:
        _check_zeros(m, layout, float_zeros)
    weight: ScalarType = types.unsigned(storage.bits, symmetric=symmetric)
    if storage.bits == 8:
        weight = types.int8 if symmetric else types.uint8
    zero_kind = "none" if symmetric else "float" if float_zeros else "int"
    spec = m.spec(layout.n, layout.k, weight, layout.block, zero=zero_kind)
    if float_zeros and not symmetric:
        spec = spec.replace(scale_dtype=torch.float32)

    def read_fields() -> WeightFields:
        codes = storage.repack(m.read("weight"), layout.n, layout.k, layout.transposed, layout.reorder)
        if codes is None:
            raise m.error(m.codes, f"values do not fit {storage.bits} bits", "integers out of range", m.dtype)
        if weight is types.int8:  # back to two's complement
            codes ^= 128
        scale = m.read("weight_scale")
        scale = scale.t().contiguous() if layout.grouped else scale.reshape(layout.grid)
        fields: WeightFields = {"codes": codes, "scale": scale, "zero": None}
        if zeros is not None and float_zeros:
            fields |= _read_float_zeros(m, zeros, layout, scale, symmetric)
        elif zeros is not None:
            fields["zero"] = _read_integer_zeros(m, zeros, layout, symmetric)
        return fields

    order = f" {m.pack_order}" if storage.bits == 4 else ""
    stored = layout.axes(spec, m.scale.shape, None if zeros is None else zeros.shape, float_zeros=float_zeros)
    return m.quark_record(f"{m.dtype}{order}", spec, read_fields, stored, integer_record)


def _check_shapes(m: QuarkModule, storage: IntegerStorage) -> _Layout:
    """The layout, with weight and weight_scale checked against each other and the config."""
    rows, columns = m.matrix("weight", storage.dtypes)
    if storage.is_stream:
        m.num_codes(columns, 3)
    grouped, reorder = m.qscheme == "per_group", m.pack_order == "reorder"
    if not grouped:
        n, k = rows, storage.num_codes(columns)
        block = m.scale_block(n, k)
        m.require("weight_scale", FLOATS, stored_shapes(grid_of(n, k, block), n))
        return _Layout(storage, n, k, block, grouped, reorder)
    groups, n = m.matrix("weight_scale", FLOATS)
    if storage.is_stream:
        k, fits = storage.num_codes(columns), rows == n
    else:
        k, fits = rows, columns == storage.num_elements(n)
    if not fits:
        found = f"weight {[rows, columns]}, weight_scale {[groups, n]}"
        raise m.error(m.codes, "weight and weight_scale do not fit", found, f"{n} rows in both")
    return _Layout(storage, n, k, m.group_block(n, k, groups), grouped, reorder)


# ---- zero points ---------------------------------------------------------------------------------------------------------


def _check_zeros(m: QuarkModule, layout: _Layout, float_zeros: bool) -> None:
    """Shape and dtype of zero points: packed like the weight, those of groups along N; floats are not packed."""
    storage, n, grid = layout.storage, layout.n, layout.grid
    is_stream = storage.is_stream and not float_zeros
    per_element = 1 if float_zeros or storage.is_stream else storage.per_element
    any_dtype = (torch.int32, torch.int8, torch.uint8, *FLOATS)
    packed_dtype = torch.uint8 if is_stream else {8: torch.int32, 4: torch.uint8}.get(per_element)
    if layout.grouped:
        shapes: tuple[tuple[int, ...], ...] = ((n, grid[1] * 3 // 8),) if is_stream else ((grid[1], -(-n // per_element)),)
    elif grid == (1, 1):  # one number is not packed
        shapes, packed_dtype = SCALAR_SHAPES, None
    else:
        size = n * 3 // 8 if is_stream else -(-n // per_element)
        shapes = ((size,), (size, 1))
    m.require(ZERO, any_dtype if packed_dtype is None else (packed_dtype,), shapes)


def _read_integer_zeros(m: QuarkModule, info: TensorInfo, layout: _Layout, symmetric: bool) -> Tensor | None:
    """Zero points as unsigned codes, uint8 [grid]; None for a symmetric weight, whose zero points must all be 0."""
    stored = m.read(ZERO)
    per_tensor = layout.grid == (1, 1) and not layout.grouped
    zero = _one_zero(stored, layout.storage) if per_tensor else _unpack_zeros(stored, m.dtype, layout)
    if zero is None or zero.shape != layout.grid:
        found = f"{int(stored.min())}..{int(stored.max())}"
        raise m.error(info, f"zero points do not fit {m.dtype}", found, "values of that type")
    zero = zero.to(torch.uint8).contiguous()
    if symmetric and bool((zero != 1 << (layout.storage.bits - 1)).any()):
        raise m.error(info, "the config says symmetric, but there are zero points", "some that are not 0", "zeros")
    return None if symmetric else zero


def _one_zero(stored: Tensor, storage: IntegerStorage) -> Tensor | None:
    value = int(stored) + storage.half
    return torch.tensor([[value]]) if 0 <= value < 1 << storage.bits else None


def _unpack_zeros(stored: Tensor, dtype: str, layout: _Layout) -> Tensor | None:
    storage = layout.storage
    if dtype in ("int8", "uint8") and stored.dtype not in (torch.int8, torch.uint8):
        stored = stored.clamp(-256, 511)  # so that unpack sees what is out of range, instead of a wrapped byte
    grouped_stream = layout.grouped and storage.is_stream  # [N, G], all others [G, N] or [N]
    lines = stored if layout.grouped else stored.reshape(1, -1)
    zero = storage.unpack(lines, layout.grid[1] if grouped_stream else layout.grid[0], layout.reorder)
    return zero if zero is None or grouped_stream else zero.t()


def _read_float_zeros(m: QuarkModule, info: TensorInfo, layout: _Layout, scale: Tensor, symmetric: bool) -> WeightFields:
    """Float zero points: W = scale * (code - zero) becomes a scale and an offset in float32."""
    zero = m.read(ZERO).float()
    zero = (zero.t() if zero.dim() == 2 else zero).reshape(layout.grid)
    if symmetric and bool(zero.any()):
        raise m.error(info, "the config says symmetric, but there are zero points", "some that are not 0", "zeros")
    if symmetric:
        return {}
    scale = scale.float()
    return {"scale": scale.contiguous(), "offset": -((zero + layout.storage.half) * scale)}
