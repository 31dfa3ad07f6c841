"""Quantization of a layer's input, as the checkpoint's ActSpec asks for it. The one definition that all kernels follow.

Formulas are compressed-tensors' own (quantization/utils/helpers.py, calculate_qparams): a symmetric integer range is
divided by (2**bits - 1) / 2, an asymmetric one by 2**bits - 1 with its zero point rounded; FP8 by the largest value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.types import SCALAR_TYPES, ActSpec

_FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def quantize_input(
    x: Tensor, act: ActSpec, scale: Tensor | None = None, zero: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [M, K] to (codes [M, K] int8 or FP8, scale float32 [M, 1] or [1, 1], zero int32 like scale or None).

    The value of a code is scale * (code - zero). `scale` and `zero` are a static scheme's; both scalars.
    """
    values = x.float()
    if act.granularity == "group":
        raise InputError("grouped activations have no single scale per row", found=str(act), expected="tensor or token")
    if not act.dynamic:
        if scale is None:
            raise InputError("a static activation scheme needs its scale", found=str(act))
        scale = scale.float().reshape(1, 1)
        zero = None if zero is None or act.symmetric else zero.to(torch.int32).reshape(1, 1)
    else:
        scale, zero = _dynamic(values if act.granularity == "token" else values.reshape(1, -1), act)
    return _encode(values, act, scale, zero), scale, zero


def quantize_groups(x: Tensor, act: ActSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [M, K], K whole groups of a dynamic scheme with float scales, to (codes [M, K], scale float32 [M, K / group_size], zero
    int32 like scale or None): each group as `quantize_input` does a row."""
    grid = (x.shape[0], x.shape[1] // act.group_size)
    rows = ActSpec(act.dtype, True, "token", 0, act.symmetric, limit=act.limit)
    codes, scale, zero = quantize_input(x.reshape(-1, act.group_size), rows)
    return codes.view(x.shape), scale.view(grid), None if zero is None else zero.view(grid)


def _dynamic(rows: Tensor, act: ActSpec) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each row, [rows, 1]."""
    if rows.shape[-1] == 0 or rows.shape[0] == 0 or rows.numel() == 0:
        return rows.new_ones(rows.shape[0], 1), None
    tiny = torch.finfo(torch.float32).eps
    low, high = -(1 << (act.dtype.bits - 1)), (1 << (act.dtype.bits - 1)) - 1
    limit = act.limit or math.inf
    if act.dtype.kind == "float":
        return exact_div(rows.abs().amax(-1, keepdim=True).clamp_(max=limit), act.dtype.max()).clamp_(min=tiny), None
    if act.symmetric:
        return exact_div(rows.abs().amax(-1, keepdim=True).clamp_(max=limit), (high - low) / 2).clamp_(min=tiny), None
    smallest = rows.amin(-1, keepdim=True).clamp_(-limit, 0)
    largest = rows.amax(-1, keepdim=True).clamp_(0, limit)
    scale = exact_div(largest - smallest, high - low).clamp_(min=tiny)
    return scale, (low - smallest / scale).round_().clamp_(low, high).to(torch.int32)


def exact_div(values: Tensor, by: float) -> Tensor:
    """values / by, correctly rounded on every device: on a GPU torch multiplies by the reciprocal of a Python number."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def _encode(values: Tensor, act: ActSpec, scale: Tensor, zero: Tensor | None) -> Tensor:
    scaled = values / scale
    if act.dtype.kind == "float":
        limit = act.dtype.max()
        return scaled.clamp_(-limit, limit).to(_FP8[act.dtype.name])
    if zero is not None:
        scaled = scaled + zero
    low, high = -(1 << (act.dtype.bits - 1)), (1 << (act.dtype.bits - 1)) - 1
    return scaled.round_().clamp_(low, high).to(torch.int8)


def fake_quantize(x: Tensor, act: ActSpec, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """x as the quantized input would be read back, float32 [M, K]: the reference semantics of an ActSpec."""
    if act.granularity != "group":
        codes, s, z = quantize_input(x, act, scale, zero)
        return (codes.float() - (0 if z is None else z)) * s
    g, k = act.group_size, x.shape[-1]
    wide = k + -k % g
    padded = torch.nn.functional.pad(x.float(), (0, wide - k))
    if act.scale != "float":
        return _fake_quantize_micro(padded.reshape(-1, g), act, scale).reshape(x.shape[0], wide)[:, :k]
    codes, s, z = quantize_groups(padded, act)
    groups = codes.float().unflatten(1, (-1, g))
    return ((groups - (0 if z is None else z.unsqueeze(-1))) * s.unsqueeze(-1)).flatten(1)[:, :k]


def _fake_quantize_micro(groups: Tensor, act: ActSpec, input_global_scale: Tensor | None) -> Tensor:
    """MX (E8M0 scales), NVFP4 (E4M3 scales under a global one) and its kin of E5M3 scales: groups [n, g] quantized and read

    back, float32.
    """
    peak = groups.abs().amax(-1, keepdim=True)
    if act.dtype.kind == "int":  # MXINT: the largest magnitude's power of two, a sign and bits - 1 binary digits below it
        most = (1 << (act.dtype.bits - 1)) - 1
        exponent = torch.frexp(peak)[1] - 1 - (act.dtype.bits - 2)
        scale = torch.where(peak > 0, torch.ldexp(torch.ones_like(peak), exponent.clamp(min=-127)), torch.ones_like(peak))
        return (groups / scale).round_().clamp_(-most, most) * scale
    if act.scale == "e8m0":
        exponent = mx_exponent(peak, act.dtype.max())
        scale = torch.where(peak > 0, torch.ldexp(torch.ones_like(peak), exponent.clamp(-127, 127)), torch.ones_like(peak))
    elif act.scale == "e5m3":
        local = round_to(exact_div(peak, act.dtype.max()), "ufloat8_e5m3")
        scale = torch.where(local > 0, local, torch.ones_like(local))
    else:
        top = torch.ones((), device=groups.device) if input_global_scale is None else input_global_scale.float()
        local = exact_div(peak * top, act.dtype.max()).clamp(max=448.0).to(torch.float8_e4m3fn).float()
        scale = torch.where(local > 0, local / top, torch.ones_like(local))
    return round_to(groups / scale, act.dtype.name) * scale


def mx_exponent(peak: Tensor, largest: float) -> Tensor:
    """The shared exponent, int32, of MX blocks whose largest magnitudes are `peak` (float32), for an element type up to
    `largest`: floor(log2(peak)) - floor(log2(largest)), and one more where peak >= 1.75 * 2**floor(log2(peak)).

    compressed-tensors rounds so for weights and inputs alike (quantization/utils/mxfp_utils.py, round_to_power_2); OCP MX
    1.0, section 6.3, suggests rounding down always, which clips what is close below a power of two.
    """
    mantissa, exponent = torch.frexp(peak)
    return exponent - math.frexp(largest)[1] + (mantissa >= 0.875)


def round_to(values: Tensor, name: str) -> Tensor:
    """Nearest value of a minifloat type, ties to even mantissa, saturating; float32 in and out."""
    if name in _FP8:
        limit = torch.finfo(_FP8[name]).max
        return values.clamp(-limit, limit).to(_FP8[name]).float()
    if name not in ("float4_e2m1", "float6_e2m3", "float6_e3m2", "ufloat8_e5m3"):
        raise InputError("no rounding rule for this type", found=name, expected="float4_e2m1, a float6 or an FP8 type")
    scalar = SCALAR_TYPES[name]
    lowest = 2 - (1 << (scalar.exponent - 1))  # the exponent of the smallest normal value, and of all below it
    # The values of one binade are `mantissa` bits apart, and torch rounds halves to even, which is the even mantissa here.
    step = torch.frexp(values)[1].sub(1).clamp(min=lowest) - scalar.mantissa
    rounded = torch.ldexp(torch.ldexp(values, -step).round_(), step)
    return rounded.clamp_(scalar.min(), scalar.max())
