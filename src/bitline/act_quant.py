"""Activation quantization by an ActSpec: the reference that every kernel is tested against.

The formulas are compressed-tensors' (quantization/utils/helpers.py, calculate_qparams): scale = amax / ((2**bits - 1) / 2) for
a symmetric integer type, (max - min) / (2**bits - 1) with a rounded zero point for an asymmetric one, amax / FP8_MAX for FP8.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.types import SCALAR_TYPES, ActSpec

_FP8_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def quantize_input(
    x: Tensor, act: ActSpec, scale: Tensor | None = None, zero: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize x [M, K] per tensor or per token: (codes [M, K] int8 or FP8, scale float32 [M, 1] or [1, 1], zero point).

    The zero point is int32 in the scale's shape, None for a symmetric scheme. x = scale * (code - zero point). scale, zero: the
    scalars of a static scheme.
    """
    values = x.float()
    if act.granularity == "group":
        raise InputError("per-group activations have no single scale per row", found=str(act), expected="tensor or token")
    if not act.dynamic:
        if scale is None:
            raise InputError("static activation quantization needs the checkpoint's scale", found=str(act))
        scale = scale.float().reshape(1, 1)
        zero = None if zero is None or act.symmetric else zero.to(torch.int32).reshape(1, 1)
    else:
        scale, zero = dynamic_scale(values if act.granularity == "token" else values.reshape(1, -1), act)
    return encode(values, act, scale, zero), scale, zero


def quantize_groups(x: Tensor, act: ActSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize x [M, K] per group: (codes [M, K], scale float32 [M, K / group_size], zero point int32 like scale or None).

    For dynamic schemes whose group size divides K. Each group is quantized as `quantize_input` does a token; E8M0 scales, of FP8
    codes, are powers of two as `fake_quantize` chooses them.
    """
    if act.scale == "e8m0":
        return _quantize_e8m0(x.float(), act)
    grid = (x.shape[0], x.shape[1] // act.group_size)
    per_token = ActSpec(act.dtype, True, "token", 0, act.symmetric, limit=act.limit)
    codes, scale, zero = quantize_input(x.reshape(-1, act.group_size), per_token)
    return codes.view(x.shape), scale.view(grid), None if zero is None else zero.view(grid)


def _quantize_e8m0(x: Tensor, act: ActSpec) -> tuple[Tensor, Tensor, None]:
    """As `quantize_groups`, of x float32."""
    groups = x.unflatten(1, (-1, act.group_size))
    scale = _e8m0_scale(groups.abs().amax(-1, keepdim=True), act)
    return encode(groups, act, scale, None).flatten(1), scale.squeeze(-1), None


def _e8m0_scale(amax: Tensor, act: ActSpec) -> Tensor:
    """The power-of-two scale of MX blocks with these absolute maxima, 1 for a block of zeros."""
    power = torch.ldexp(torch.ones_like(amax), mx_exponent(amax, act.dtype.max()).clamp(-127, 127))
    return torch.where(amax > 0, power, torch.ones_like(amax))


def dynamic_scale(x: Tensor, act: ActSpec) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each row of x float32 [R, K], both [R, 1]; of rows of K or of their extremes alone."""
    if x.shape[-1] == 0 or x.shape[0] == 0 or x.numel() == 0:
        return x.new_ones(x.shape[0], 1), None
    eps = torch.finfo(torch.float32).eps
    qmin, qmax = _int_range(act)
    limit = act.limit or math.inf
    if act.dtype.kind == "float":
        return exact_div(x.abs().amax(-1, keepdim=True).clamp_(max=limit), act.dtype.max()).clamp_(min=eps), None
    if act.symmetric:
        return exact_div(x.abs().amax(-1, keepdim=True).clamp_(max=limit), (qmax - qmin) / 2).clamp_(min=eps), None
    low = x.amin(-1, keepdim=True).clamp_(-limit, 0)
    high = x.amax(-1, keepdim=True).clamp_(0, limit)
    scale = exact_div(high - low, qmax - qmin).clamp_(min=eps)
    return scale, (qmin - low / scale).round_().clamp_(qmin, qmax).to(torch.int32)


def _int_range(act: ActSpec) -> tuple[int, int]:
    """The smallest and largest code of a signed integer type."""
    return -(1 << (act.dtype.bits - 1)), (1 << (act.dtype.bits - 1)) - 1


def exact_div(values: Tensor, by: float) -> Tensor:
    """values / by, correctly rounded on every device. A GPU multiplies by the reciprocal of a Python float."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def encode(values: Tensor, act: ActSpec, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Round values / scale + zero to codes, saturating."""
    scaled = values / scale
    if act.dtype.kind == "float":
        limit = act.dtype.max()
        return scaled.clamp_(-limit, limit).to(_FP8_DTYPES[act.dtype.name])
    if zero is not None:
        scaled = scaled + zero
    return scaled.round_().clamp_(*_int_range(act)).to(torch.int8)


def fake_quantize(x: Tensor, act: ActSpec, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """Quantize and dequantize x [M, K], float32 [M, K]: the reference semantics of an ActSpec.

    scale, zero: the scalars of a static scheme; for NVFP4, scale is the input's global scale (a divisor of block scales). The
    last group of a row is short where the group size does not divide K.
    """
    if act.granularity != "group":
        codes, s, z = quantize_input(x, act, scale, zero)
        return (codes.float() - (0 if z is None else z)) * s
    g, k = act.group_size, x.shape[-1]
    padded_k = k + -k % g
    padded = torch.nn.functional.pad(x.float(), (0, padded_k - k))
    if act.scale != "float":
        return _fake_quantize_block_scaled(padded.reshape(-1, g), act, scale).reshape(x.shape[0], padded_k)[:, :k]
    codes, s, z = quantize_groups(padded, act)
    groups = codes.float().unflatten(1, (-1, g))
    return ((groups - (0 if z is None else z.unsqueeze(-1))) * s.unsqueeze(-1)).flatten(1)[:, :k]


def _fake_quantize_block_scaled(groups: Tensor, act: ActSpec, input_global_scale: Tensor | None) -> Tensor:
    """Fake quantization of blocks [R, g] with low-precision scales: MX (E8M0), NVFP4 (E4M3 under a global scale), E5M3."""
    amax = groups.abs().amax(-1, keepdim=True)
    if act.dtype.kind == "int":  # MXINT: a power-of-two scale from amax's exponent, and symmetric codes of `bits` bits
        qmax = (1 << (act.dtype.bits - 1)) - 1
        exponent = _frexp(amax)[1] - 1 - (act.dtype.bits - 2)
        scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent.clamp(min=-127)), torch.ones_like(amax))
        return (groups / scale).round_().clamp_(-qmax, qmax) * scale
    if act.scale == "e8m0":
        scale = _e8m0_scale(amax, act)
    elif act.scale == "e5m3":
        block_scale = round_to(exact_div(amax, act.dtype.max()), "ufloat8_e5m3")
        scale = torch.where(block_scale > 0, block_scale, torch.ones_like(block_scale))
    else:
        global_scale = torch.ones((), device=groups.device) if input_global_scale is None else input_global_scale.float()
        block_scale = exact_div(amax * global_scale, act.dtype.max()).clamp(max=448.0).to(torch.float8_e4m3fn).float()
        scale = torch.where(block_scale > 0, block_scale / global_scale, torch.ones_like(block_scale))
    return round_to(groups / scale, act.dtype.name) * scale


def mx_exponent(amax: Tensor, max_value: float) -> Tensor:
    """Shared exponents (int32) of MX blocks from their absolute maxima (float32), for elements up to `max_value`.

    floor(log2(amax)) - floor(log2(max_value)), plus 1 where amax >= 1.75 * 2**floor(log2(amax)). This is compressed-tensors'
    rounding of weights and activations (quantization/utils/mxfp_utils.py, round_to_power_2). OCP MX 1.0, section 6.3, rounds
    down always, which clips values just below a power of two.
    """
    mantissa, exponent = _frexp(amax)
    return exponent - math.frexp(max_value)[1] + (mantissa >= 0.875)


def _frexp(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mantissa in [0.5, 1) and exponent; infinity is 0.5 * 2**129, where C's function leaves the exponent open."""
    mantissa, exponent = torch.frexp(values)
    return mantissa.masked_fill(values.isinf(), 0.5), exponent.masked_fill(values.isinf(), 129)


def round_to(values: Tensor, name: str) -> Tensor:
    """Round to the nearest value of a minifloat type, ties to even, saturating. float32 in and out."""
    if name in _FP8_DTYPES:
        limit = torch.finfo(_FP8_DTYPES[name]).max
        return values.clamp(-limit, limit).to(_FP8_DTYPES[name]).float()
    if name not in ("float4_e2m1", "float6_e2m3", "float6_e3m2", "ufloat8_e5m3"):
        raise InputError("no rounding rule for this type", found=name, expected="float4_e2m1, a float6 or an FP8 type")
    scalar = SCALAR_TYPES[name]
    min_exponent = 2 - (1 << (scalar.exponent - 1))  # of the smallest normal value; subnormals share its spacing
    # A binade's values are 2**(exponent - mantissa bits) apart. torch rounds ties to even, which is the even mantissa here.
    ulp_exponent = torch.frexp(values)[1].sub(1).clamp(min=min_exponent) - scalar.mantissa
    rounded = torch.ldexp(torch.ldexp(values, -ulp_exponent).round_(), ulp_exponent)
    return rounded.clamp_(scalar.min(), scalar.max())
