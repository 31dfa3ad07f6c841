"""A canonical weight in another form that stands for the same numbers, or the reason why there is none.

Nothing is rounded here: a step that would round is a NotExact.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream
from bitline.conversion.base import NotExact
from bitline.types import LinearSpec, ScalarType, dtype_name
from bitline.weight import QuantizedWeight


def rewrite(weight: QuantizedWeight, form: LinearSpec, dtypes: tuple[torch.dtype, ...]) -> QuantizedWeight:
    """The weight in `form`, with scales in the first of `dtypes` that holds all of them. NotExact where values would change."""
    s = weight.spec
    if (weight.perm is not None and not form.act_order) or (weight.group_index is not None and not form.ragged):
        raise NotExact("its columns are in activation order, which has no place there")
    parts = _integers(weight, form, dtypes) if form.weight.kind == "int" else _floats(weight, form, dtypes)
    act = form.act is not None
    scale: Tensor = parts["scale"]
    return QuantizedWeight(
        form.replace(scale_dtype=scale.dtype, bias=weight.bias is not None, act_dtype=s.act_dtype), **parts,
        perm=weight.perm, group_index=weight.group_index, bias=weight.bias, origin=weight.origin,
        input_scale=weight.input_scale if act else None, input_zero=weight.input_zero if act else None,
        input_multiplier=weight.input_multiplier if form.input_multiplier else None,
    )  # fmt: skip


# ---- integers ------------------------------------------------------------------------------------------------------------


def _integers(weight: QuantizedWeight, form: LinearSpec, dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    s = weight.spec
    if s.weight.kind != "int":
        raise NotExact(f"{s.weight.name} codes are not integers")
    scale, zero, offset = weight.scales(), weight.zero, weight.offsets()
    if offset is not None:
        offset = _from_zero(scale, offset, _middle(s.weight), s.weight.bits)
    if offset is not None and form.zero != "float":
        zero = zeros_of_offsets(scale, offset, form.weight.bits)
    parts: dict[str, Any] = {"codes": _codes(weight, zero, form)}
    grid = lambda t: _regroup(t, s, form)
    parts["scale"] = grid(narrowed(scale, dtypes))
    if form.zero == "int":
        parts["zero"] = grid(zero) if zero is not None else torch.full(form.grid, _middle(s.weight), dtype=torch.uint8)
        if zero is None and form.ragged:
            parts["zero"] = torch.full_like(parts["scale"], _middle(s.weight), dtype=torch.uint8)
    elif form.zero == "float":
        if offset is None:
            middle = torch.full_like(scale, _middle(s.weight)) if zero is None else zero.float()
            offset = offsets_of_zeros(scale, middle, s.weight.bits, parts["scale"].dtype)
        parts["offset"] = grid(narrowed(offset, (parts["scale"].dtype,), "offsets"))
    return parts


def _from_zero(scale: Tensor, offset: Tensor, middle: int, width: int) -> Tensor:
    """Offsets for codes that nothing is subtracted from, of those for codes less `middle`; NotExact where values would change."""
    moved = (offset.double() - middle * scale.double()).float()
    wrong = torch.zeros_like(moved, dtype=torch.bool)
    for code in range(1 << width if middle else 0):
        wrong |= _bits(scale * code + moved) != _bits(scale * (code - middle) + offset)
    if bool(wrong.any()):
        raise NotExact(f"{int(wrong.sum())} of {wrong.numel()} offsets are for codes less {middle}, and change when it is added")
    return moved


def _middle(scalar: ScalarType) -> int:
    """What is subtracted from an unsigned code of a type that has no zero points."""
    return 1 << (scalar.bits - 1) if scalar.signed else scalar.bias


def _codes(weight: QuantizedWeight, zero: Tensor | None, form: LinearSpec) -> Tensor:
    """Codes of the form's type. Where it has no zero points, the weight's own are subtracted from its codes."""
    s, to = weight.spec, form.weight
    subtract = form.zero == "none" and zero is not None
    shift = 0 if form.zero != "none" else _middle(to) - (0 if zero is not None else _middle(s.weight))
    if not subtract and shift == 0 and to.bits == s.weight.bits and to.signed == s.weight.signed:
        return weight.codes
    low, high = 0, (1 << to.bits) - 1
    out = torch.empty(s.n, bitstream.row_bytes(s.k, to.bits), dtype=torch.uint8)
    step = max(1, bitstream.rows_per_chunk(s.k) // 4)
    groups = weight.column_groups() if subtract else None
    seen_low, seen_high = high, low
    for r in range(0, s.n, step):
        raw = weight.unpacked(slice(r, r + step))
        values = (raw ^ (1 << (s.weight.bits - 1)) if s.weight.signed else raw).to(torch.int16) + shift
        if zero is not None and groups is not None:
            rows = torch.arange(r, min(r + step, s.n)) // s.block[0]
            values -= zero.index_select(0, rows).index_select(1, groups).to(torch.int16)
        seen_low, seen_high = min(seen_low, int(values.min())), max(seen_high, int(values.max()))
        if seen_low < low or seen_high > high:
            found = f"{seen_low - shift} to {seen_high - shift} or more" if subtract else f"{s.weight.bits} bits"
            raise NotExact(f"codes less their zero points are {found}, and {to.name} holds {low - shift} to {high - shift}")
        packed = values.to(torch.uint8)
        out[r : r + step] = bitstream.pack(packed ^ (1 << (to.bits - 1)) if to.signed else packed, to.bits)
    return out


def zeros_of_offsets(scale: Tensor, offset: Tensor, width: int) -> Tensor:
    """Integer zero points that mean the same as offsets, uint8. NotExact where one is no integer of `width` bits.

    Both are float32 grids; every code is tried, since code * scale + offset is rounded twice and (code - zero) * scale once.
    """
    zero = torch.where(scale == 0, 0.0, (-offset.double() / scale.double())).round()
    wrong = (zero < 0) | (zero >= 1 << width) | ~torch.isfinite(zero)
    zero = zero.clamp(0, (1 << width) - 1).nan_to_num(0.0).float()
    for code in range(1 << width):
        wrong |= _bits(scale * code + offset) != _bits((code - zero) * scale)
    if bool(wrong.any()):
        raise NotExact(
            f"{int(wrong.sum())} of {wrong.numel()} offsets are no whole number of steps, so that no integer zero point is exact"
        )
    return zero.to(torch.uint8)


def offsets_of_zeros(scale: Tensor, zero: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Offsets that mean the same as integer zero points, float32, each of them a number of `dtype`; or NotExact."""
    offset = (0.0 - zero.double() * scale.double()).to(dtype).float()
    wrong = torch.zeros_like(zero, dtype=torch.bool)
    for code in range(1 << width):
        wrong |= _bits(scale * code + offset) != _bits((code - zero) * scale)
    if bool(wrong.any()):
        raise NotExact(f"{int(wrong.sum())} of {wrong.numel()} zero points times their scales are no {dtype_name(dtype)} numbers")
    return offset


def _bits(values: Tensor) -> Tensor:
    return values.float().view(torch.int32)


# ---- minifloats ----------------------------------------------------------------------------------------------------------


def _floats(weight: QuantizedWeight, form: LinearSpec, dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    s = weight.spec
    if s.weight is not form.weight or s.zero != "none":
        raise NotExact(f"{s.weight.name} codes are not {form.weight.name}")
    if form.scale2_block is not None:
        if s.scale2_block != form.scale2_block or s.scale_dtype != form.scale_dtype:
            raise NotExact(f"its scales ({dtype_name(s.scale_dtype)}) are not E4M3 under one global scale")
        return {"codes": weight.codes, "scale": _regroup(weight.scale, s, form), "scale2": weight.scale2}
    if form.scale_dtype == torch.float8_e8m0fnu:
        if s.scale_dtype != torch.float8_e8m0fnu:
            raise NotExact(f"its scales are {dtype_name(s.scale_dtype)} and not powers of two (E8M0)")
        return {"codes": weight.codes, "scale": _regroup(weight.scale, s, form)}
    scale = weight.scales()
    if bool(scale.isnan().any()):
        raise NotExact("one of its E8M0 scales is NaN")
    return {"codes": weight.codes, "scale": _regroup(narrowed(scale, dtypes), s, form)}


# ---- scales --------------------------------------------------------------------------------------------------------------


def narrowed(values: Tensor, dtypes: tuple[torch.dtype, ...], what: str = "scales") -> Tensor:
    """Float32 values in the first of these dtypes that holds every one of them to the bit; NotExact where none does."""
    for dtype in dtypes:
        narrow = values.to(dtype)
        if torch.equal(_bits(narrow), _bits(values)):
            return narrow
    names = " or ".join(dtype_name(dtype) for dtype in dtypes)
    lost = int((_bits(values.to(dtypes[0])) != _bits(values)).sum())
    raise NotExact(f"{lost} of {values.numel()} {what} are no {names} numbers")


def _regroup(grid: Tensor, source: LinearSpec, form: LinearSpec) -> Tensor:
    """A grid of scales or zero points, each repeated for the smaller blocks of the form that lie within its own."""
    if source.block == form.block:
        return grid
    for dim in (0,) if form.ragged else (0, 1):
        old, new, size = source.block[dim], form.block[dim], (source.n, source.k)[dim]
        if old < size and old % new:
            raise NotExact(f"scale blocks {source.block} cannot be cut into blocks {form.block}")
        index = torch.arange(form.grid[dim]) * new // old
        if grid.dtype.itemsize == 1 and grid.dtype.is_floating_point:  # torch cannot index these
            grid = grid.view(torch.uint8).index_select(dim, index).view(grid.dtype)
        else:
            grid = grid.index_select(dim, index)
    return grid


# ---- in words ------------------------------------------------------------------------------------------------------------


def changes(before: LinearSpec, after: LinearSpec) -> list[str]:
    """What was rewritten, in a few words each; an empty list where codes and scales were only moved."""
    out = []
    if before.weight.bits != after.weight.bits:
        out.append(f"{before.weight.bits} bits in {after.weight.bits}")
    kinds = {"none": "the middle zero", "int": "zero points", "float": "offsets"}
    if before.zero != after.zero:
        out.append(f"{kinds[before.zero]} {'subtracted' if after.zero == 'none' else f'as {kinds[after.zero]}'}")
    if before.block != after.block:
        size = lambda s: "x".join(map(str, s.block)) if s.block[0] > 1 else str(s.block[1])
        out.append(f"scales for {size(before)} repeated for {size(after)}")
    if before.scale_dtype != after.scale_dtype:
        out.append(f"{dtype_name(before.scale_dtype)} scales as {dtype_name(after.scale_dtype)}")
    if before.act != after.act:
        out.append(f"inputs in 16 bits instead of {before.act}")
    return out


def with_form(weight: QuantizedWeight, **changes: Any) -> QuantizedWeight:
    """A copy of a weight with a changed spec."""
    return dataclasses.replace(weight, spec=weight.spec.replace(**changes))
