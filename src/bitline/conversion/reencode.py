"""Lossless re-encoding: a canonical weight under another spec with the same dequantized values, or the reason why there is none.

Nothing is rounded here: a step that would round raises NotRepresentable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitline import bitstream
from bitline.conversion.target import NotRepresentable
from bitline.conversion.tensor_bits import float32_bits
from bitline.types import LinearSpec, ScalarType, dtype_name
from bitline.weight import QuantizedWeight


def reencode(weight: QuantizedWeight, stored: LinearSpec, scale_dtypes: tuple[torch.dtype, ...]) -> QuantizedWeight:
    """The weight under the spec `stored`, its scales in the first of `scale_dtypes` that represents all of them exactly.

    NotRepresentable where a dequantized value would change.
    """
    spec = weight.spec
    if (weight.perm is not None and not stored.act_order) or (weight.group_index is not None and not stored.ragged):
        raise NotRepresentable("it has act-order (g_idx), which this format does not support")
    encode = _encode_integers if stored.weight.kind == "int" else _encode_minifloats
    fields = encode(weight, stored, scale_dtypes)
    scale: Tensor = fields["scale"]
    keeps_act = stored.act is not None
    return QuantizedWeight(
        stored.replace(scale_dtype=scale.dtype, bias=weight.bias is not None, act_dtype=spec.act_dtype), **fields,
        perm=weight.perm, group_index=weight.group_index, bias=weight.bias, origin=weight.origin,
        input_scale=weight.input_scale if keeps_act else None, input_zero=weight.input_zero if keeps_act else None,
        input_multiplier=weight.input_multiplier if stored.input_multiplier else None,
    )  # fmt: skip


# ---- integers ------------------------------------------------------------------------------------------------------------


def _encode_integers(weight: QuantizedWeight, stored: LinearSpec, scale_dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """The fields of an integer weight: codes, scale, and zero points or offsets."""
    spec = weight.spec
    if spec.weight.kind != "int":
        raise NotRepresentable(f"its {spec.weight.name} codes are not integers")
    scale, zero, offset = weight.scales(), weight.zero, weight.offsets()
    if offset is not None:
        offset = _offsets_of_raw_codes(scale, offset, _implicit_zero(spec.weight), spec.weight.bits)
        if stored.zero != "float":
            zero = zeros_of_offsets(scale, offset, stored.weight.bits)
    fields: dict[str, Any] = {"codes": _encode_codes(weight, zero, stored)}
    fields["scale"] = _repeat_blocks(narrow_exactly(scale, scale_dtypes), spec, stored)
    if stored.zero == "int":
        fields["zero"] = _encode_zeros(zero, fields["scale"], spec, stored)
    elif stored.zero == "float":
        if offset is None:
            zeros = torch.full_like(scale, _implicit_zero(spec.weight)) if zero is None else zero.float()
            offset = offsets_of_zeros(scale, zeros, spec.weight.bits, fields["scale"].dtype)
        fields["offset"] = _repeat_blocks(narrow_exactly(offset, (fields["scale"].dtype,), "offsets"), spec, stored)
    return fields


def _encode_zeros(zero: Tensor | None, scale: Tensor, spec: LinearSpec, stored: LinearSpec) -> Tensor:
    """Zero points uint8 on the stored grid: the weight's own, else its implicit one everywhere."""
    if zero is not None:
        return _repeat_blocks(zero, spec, stored)
    shape = scale.shape if stored.ragged else stored.grid
    return torch.full(shape, _implicit_zero(spec.weight), dtype=torch.uint8)


def _implicit_zero(scalar: ScalarType) -> int:
    """The zero point of the unsigned codes of a type that stores none."""
    return 1 << (scalar.bits - 1) if scalar.signed else scalar.bias


def _encode_codes(weight: QuantizedWeight, zero: Tensor | None, stored: LinearSpec) -> Tensor:
    """Codes in the stored type. Zero points are subtracted from them where the stored type has none."""
    spec, scalar = weight.spec, stored.weight
    subtract = stored.zero == "none" and zero is not None
    shift = 0 if stored.zero != "none" else _implicit_zero(scalar) - (0 if zero is not None else _implicit_zero(spec.weight))
    if not subtract and shift == 0 and scalar.bits == spec.weight.bits and scalar.signed == spec.weight.signed:
        return weight.codes
    low, high = 0, (1 << scalar.bits) - 1
    out = torch.empty(spec.n, bitstream.row_bytes(spec.k, scalar.bits), dtype=torch.uint8)
    step = max(1, bitstream.rows_per_chunk(spec.k) // 4)
    column_groups = weight.column_groups() if subtract else None
    smallest, largest = high, low
    for r in range(0, spec.n, step):
        raw = weight.unpacked(slice(r, r + step))
        values = (raw ^ (1 << (spec.weight.bits - 1)) if spec.weight.signed else raw).to(torch.int16) + shift
        if zero is not None and column_groups is not None:
            row_groups = torch.arange(r, min(r + step, spec.n)) // spec.block[0]
            values -= zero.index_select(0, row_groups).index_select(1, column_groups).to(torch.int16)
        smallest, largest = min(smallest, int(values.min())), max(largest, int(values.max()))
        if smallest < low or largest > high:
            found = f"{smallest - shift} to {largest - shift} or more" if subtract else f"{spec.weight.bits} bits"
            raise NotRepresentable(
                f"its codes minus their zero points are {found}, and {scalar.name} ranges from {low - shift} to {high - shift}"
            )
        codes = values.to(torch.uint8)
        out[r : r + step] = bitstream.pack(codes ^ (1 << (scalar.bits - 1)) if scalar.signed else codes, scalar.bits)
    return out


# ---- zero points and offsets ---------------------------------------------------------------------------------------------
# Dequantization is code * scale + offset (rounded twice) or (code - zero) * scale (rounded once). Whether one may replace the
# other is decided by trying every code.


def _offsets_of_raw_codes(scale: Tensor, offset: Tensor, implicit_zero: int, bits: int) -> Tensor:
    """Offsets to add to raw codes * scale, given those to add to (codes - implicit_zero) * scale."""
    raw_offset = (offset.double() - implicit_zero * scale.double()).float()
    wrong = torch.zeros_like(raw_offset, dtype=torch.bool)
    for code in range(1 << bits if implicit_zero else 0):
        wrong |= float32_bits(scale * code + raw_offset) != float32_bits(scale * (code - implicit_zero) + offset)
    if bool(wrong.any()):
        raise NotRepresentable(
            f"{int(wrong.sum())} of {wrong.numel()} offsets change when the implicit zero point {implicit_zero} is added"
        )
    return raw_offset


def zeros_of_offsets(scale: Tensor, offset: Tensor, bits: int) -> Tensor:
    """Integer zero points, uint8, equivalent to offsets. NotRepresentable where one is not an integer of `bits` bits.

    scale, offset: float32 on one grid.
    """
    zero = torch.where(scale == 0, 0.0, (-offset.double() / scale.double())).round()
    wrong = (zero < 0) | (zero >= 1 << bits) | ~torch.isfinite(zero)
    zero = zero.clamp(0, (1 << bits) - 1).nan_to_num(0.0).float()
    for code in range(1 << bits):
        wrong |= float32_bits(scale * code + offset) != float32_bits((code - zero) * scale)
    if bool(wrong.any()):
        raise NotRepresentable(
            f"{int(wrong.sum())} of {wrong.numel()} offsets are no exact multiple of their scale, as integer zero points need"
        )
    return zero.to(torch.uint8)


def offsets_of_zeros(scale: Tensor, zero: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Offsets, float32 values exact in `dtype`, equivalent to integer zero points; NotRepresentable where there are none."""
    offset = (0.0 - zero.double() * scale.double()).to(dtype).float()
    wrong = torch.zeros_like(zero, dtype=torch.bool)
    for code in range(1 << bits):
        wrong |= float32_bits(scale * code + offset) != float32_bits((code - zero) * scale)
    if bool(wrong.any()):
        raise NotRepresentable(
            f"{int(wrong.sum())} of {wrong.numel()} products of zero point and scale are not exact in {dtype_name(dtype)}"
        )
    return offset


# ---- minifloats ----------------------------------------------------------------------------------------------------------


def _encode_minifloats(weight: QuantizedWeight, stored: LinearSpec, scale_dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """The fields of a minifloat weight: its codes, and block scales with their global scale, E8M0 or plain."""
    spec = weight.spec
    if spec.weight is not stored.weight or spec.zero != "none":
        raise NotRepresentable(f"its {spec.weight.name} codes are not {stored.weight.name}")
    if stored.scale2_block is not None:
        if spec.scale2_block != stored.scale2_block or spec.scale_dtype != stored.scale_dtype:
            raise NotRepresentable(f"its scales ({dtype_name(spec.scale_dtype)}) are not E4M3 under one global scale")
        return {"codes": weight.codes, "scale": _repeat_blocks(weight.scale, spec, stored), "scale2": weight.scale2}
    if stored.scale_dtype == torch.float8_e8m0fnu:
        if spec.scale_dtype != torch.float8_e8m0fnu:
            raise NotRepresentable(f"its scales are {dtype_name(spec.scale_dtype)} and not powers of two (E8M0)")
        return {"codes": weight.codes, "scale": _repeat_blocks(weight.scale, spec, stored)}
    scale = weight.scales()
    if bool(scale.isnan().any()):
        raise NotRepresentable("one of its E8M0 scales is NaN")
    return {"codes": weight.codes, "scale": _repeat_blocks(narrow_exactly(scale, scale_dtypes), spec, stored)}


# ---- scales --------------------------------------------------------------------------------------------------------------


def narrow_exactly(values: Tensor, dtypes: tuple[torch.dtype, ...], what: str = "scales") -> Tensor:
    """Float32 values in the first of these dtypes that represents all of them bit for bit; NotRepresentable if none does."""
    for dtype in dtypes:
        narrow = values.to(dtype)
        if torch.equal(float32_bits(narrow), float32_bits(values)):
            return narrow
    names = " or ".join(dtype_name(dtype) for dtype in dtypes)
    lost = int((float32_bits(values.to(dtypes[0])) != float32_bits(values)).sum())
    raise NotRepresentable(f"{lost} of {values.numel()} {what} are not exact in {names}")


def _repeat_blocks(grid: Tensor, spec: LinearSpec, stored: LinearSpec) -> Tensor:
    """Scales or zero points of the spec's blocks, each repeated for the smaller stored blocks inside its own."""
    if spec.block == stored.block:
        return grid
    for dim in (0,) if stored.ragged else (0, 1):
        old, new, size = spec.block[dim], stored.block[dim], (spec.n, spec.k)[dim]
        if old < size and old % new:
            raise NotRepresentable(f"scale blocks {spec.block} cannot be split into blocks {stored.block}")
        index = torch.arange(stored.grid[dim]) * new // old
        if grid.dtype.itemsize == 1 and grid.dtype.is_floating_point:  # torch cannot index 8-bit floats
            grid = grid.view(torch.uint8).index_select(dim, index).view(grid.dtype)
        else:
            grid = grid.index_select(dim, index)
    return grid


# ---- description ---------------------------------------------------------------------------------------------------------


def describe_changes(before: LinearSpec, after: LinearSpec) -> list[str]:
    """What re-encoding changed, for a report; an empty list where codes and scales were only repacked."""
    out = []
    if before.weight.bits != after.weight.bits:
        out.append(f"{before.weight.bits}-bit codes as {after.weight.bits}-bit")
    names = {"none": "implicit zero point", "int": "zero points", "float": "offsets"}
    if before.zero != after.zero:
        out.append(f"{names[before.zero]} {'subtracted' if after.zero == 'none' else f'as {names[after.zero]}'}")
    if before.block != after.block:
        size = lambda s: "x".join(map(str, s.block)) if s.block[0] > 1 else str(s.block[1])
        out.append(f"groups of {size(before)} as {size(after)}")
    if before.scale_dtype != after.scale_dtype:
        out.append(f"{dtype_name(before.scale_dtype)} scales as {dtype_name(after.scale_dtype)}")
    if before.act != after.act:
        out.append(f"activations not quantized instead of {before.act}")
    return out
