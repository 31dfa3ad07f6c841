"""Weights rounded to a form that cannot hold them, where the caller asked for it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bitline.conversion.base import NotExact
from bitline.conversion.rewrite import rewrite
from bitline.errors import InputError
from bitline.rounding import quantize
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


def values_of(weight: QuantizedWeight) -> Tensor:
    """What a weight does to an input that is not multiplied column by column first, float32 [N, K]."""
    values = weight.dequantize()
    return values if weight.input_multiplier is None else values * weight.input_multiplier.float()


def rounded(weight: QuantizedWeight, form: LinearSpec, dtypes: tuple[torch.dtype, ...]) -> QuantizedWeight:
    """The weight dequantized and quantized again by rounding to nearest, in `form`, with scales of one of `dtypes`.

    Scales are computed in float32 and then rounded to the first dtype that keeps at least 8 bits of each.
    """
    scheme, group = _scheme(form)
    try:
        new = quantize(values_of(weight), scheme, group, bias=weight.bias)
    except InputError as error:
        raise NotExact(f"it cannot be rounded: {error.what}, {error.found}") from error
    scale = new.scale
    for dtype in dtypes:
        if scale.dtype.itemsize > 1 and not new.spec.scale2_block:
            narrow = scale.to(dtype)
            if bool(((narrow.float() - scale).abs() <= scale.abs() * 2.0**-8).all()):
                new = dataclasses.replace(new, spec=new.spec.replace(scale_dtype=dtype), scale=narrow)
                break
    act = form.act is not None
    plain = dataclasses.replace(
        new, spec=new.spec.replace(act=form.act, act_dtype=weight.spec.act_dtype), origin=weight.origin,
        input_scale=weight.input_scale if act else None, input_zero=weight.input_zero if act else None,
    )  # fmt: skip
    return rewrite(plain, form, (plain.spec.scale_dtype, *dtypes))


def _scheme(form: LinearSpec) -> tuple[str, int | None]:
    """The preset that rounds to a form, and its group size."""
    rows, columns = form.block
    group = -1 if columns == form.k else columns
    if form.weight.name == "float8_e4m3fn" and rows == 1 and group == -1:
        return "FP8_DYNAMIC", None
    if form.weight.name == "int8" and form.act is not None:
        return "W8A8", None
    if form.weight.kind == "int" and rows == 1:
        return f"W{form.weight.bits}A16", group
    raise NotExact(f"no rounding is known for {form.scheme}")
