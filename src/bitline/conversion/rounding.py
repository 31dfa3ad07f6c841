"""Weights rounded to a form that cannot hold them, where the caller asked for it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bitline.conversion.base import NotExact
from bitline.conversion.rewrite import rewrite
from bitline.errors import InputError
from bitline.rtn import quantize
from bitline.types import LinearSpec, dtype_name
from bitline.weight import QuantizedWeight


def values_of(weight: QuantizedWeight) -> Tensor:
    """What a weight does to an input that is not multiplied column by column first, float32 [N, K]."""
    values = weight.dequantize()
    return values if weight.input_multiplier is None else values * weight.input_multiplier.float()


def rounded(weight: QuantizedWeight, form: LinearSpec, dtypes: tuple[torch.dtype, ...]) -> QuantizedWeight:
    """The weight dequantized and quantized again by rounding to nearest, in `form`, with scales of one of `dtypes`.

    Scales are computed in float32 and then rounded, which is the smaller error by far.
    """
    scheme, group = _scheme(form)
    try:
        new = quantize(values_of(weight), scheme, group, bias=weight.bias)
    except InputError as error:
        raise NotExact(f"it cannot be rounded: {error.what}, {error.found}") from error
    scale = _narrow(new.scale, tuple(sorted(dtypes, key=lambda dtype: dtype.itemsize)))  # rounding anyway, 16 bits do
    new = dataclasses.replace(new, spec=new.spec.replace(scale_dtype=scale.dtype), scale=scale)
    act = form.act is not None
    plain = dataclasses.replace(
        new, spec=new.spec.replace(act=form.act, act_dtype=weight.spec.act_dtype), origin=weight.origin,
        input_scale=weight.input_scale if act else None, input_zero=weight.input_zero if act else None,
    )  # fmt: skip
    return rewrite(plain, form, (scale.dtype,))


def _narrow(scale: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Float32 scales rounded to the first dtype that keeps 8 bits of each, else to the first in which none is 0 or infinite."""
    narrow = [scale.to(dtype) for dtype in dtypes]
    close = (n for n in narrow if bool(((n.float() - scale).abs() <= scale.abs() * 2.0**-8).all()))
    there = (n for n in narrow if bool((n.isfinite() & ((n != 0) | (scale == 0))).all()))
    found = next(close, next(there, None))
    if found is None:
        raise NotExact(f"it cannot be rounded: its scales are beyond {dtype_name(dtypes[0])}")
    return found


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
