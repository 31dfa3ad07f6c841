"""Lossy conversion: weights rounded to nearest in a spec that cannot represent them exactly."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bitline.conversion.reencode import reencode
from bitline.conversion.target import NotRepresentable
from bitline.errors import InputError
from bitline.rtn import quantize
from bitline.types import LinearSpec, dtype_name
from bitline.weight import QuantizedWeight


def requantize(weight: QuantizedWeight, stored: LinearSpec, scale_dtypes: tuple[torch.dtype, ...]) -> QuantizedWeight:
    """The weight dequantized and rounded to nearest in the spec `stored`, with scales of one of `scale_dtypes`.

    Scales are computed in float32 and rounded afterwards, which is the smaller error by far.
    """
    preset, group_size = _rtn_preset(stored)
    try:
        new = quantize(_effective_weight(weight), preset, group_size, bias=weight.bias)
    except InputError as error:
        raise NotRepresentable(f"it cannot be rounded: {error.what}, {error.found}") from error
    scale = _round_scales(new.scale, tuple(sorted(scale_dtypes, key=lambda dtype: dtype.itemsize)))
    keeps_act = stored.act is not None
    new = dataclasses.replace(
        new, spec=new.spec.replace(scale_dtype=scale.dtype, act=stored.act, act_dtype=weight.spec.act_dtype), scale=scale,
        origin=weight.origin, input_scale=weight.input_scale if keeps_act else None,
        input_zero=weight.input_zero if keeps_act else None,
    )  # fmt: skip
    return reencode(new, stored, (scale.dtype,))


def _effective_weight(weight: QuantizedWeight) -> Tensor:
    """The dequantized weight, float32 [N, K], with the factors of its input folded in."""
    values = weight.dequantize()
    return values if weight.input_multiplier is None else values * weight.input_multiplier.float()


def _round_scales(scale: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Float32 scales in the first dtype that keeps 8 bits of each, else in the first where none becomes zero or infinite."""
    rounded = [scale.to(dtype) for dtype in dtypes]
    close = (r for r in rounded if bool(((r.float() - scale).abs() <= scale.abs() * 2.0**-8).all()))
    in_range = (r for r in rounded if bool((r.isfinite() & ((r != 0) | (scale == 0))).all()))
    found = next(close, next(in_range, None))
    if found is None:
        raise NotRepresentable(f"it cannot be rounded: its scales are out of range of {dtype_name(dtypes[0])}")
    return found


def _rtn_preset(stored: LinearSpec) -> tuple[str, int | None]:
    """The preset of `quantize` that rounds to a stored spec, and its group size."""
    rows, columns = stored.block
    group_size = -1 if columns == stored.k else columns
    if stored.weight.name == "float8_e4m3fn" and rows == 1 and group_size == -1:
        return "FP8_DYNAMIC", None
    if stored.weight.name == "int8" and stored.act is not None:
        return "W8A8", None
    if stored.weight.kind == "int" and rows == 1:
        return f"W{stored.weight.bits}A16", group_size
    raise NotRepresentable(f"no rounding is implemented for {stored.scheme}")
