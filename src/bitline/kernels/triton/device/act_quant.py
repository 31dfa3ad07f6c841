# mypy: disable-error-code="no-untyped-def"
"""Device code of activation quantization, bit for bit what `act_quant.quantize_input` and `quantize_groups` compute, with the
RMSNorm or the gated SiLU before it in the same launch.

A program has a tile of one row, [config.groups, config.group_size] columns, in registers: x is read once. `config` is an
`act_quant.QuantizeConfig`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _round_half_even(value):
    """The nearest integer, halves to even, for |value| < 2**22: adding 1.5 * 2**23 pushes the fraction out of the mantissa."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _e8m0_scale(amax):
    """The power of two of `act_quant.mx_exponent` for E4M3, and 1 for a group of zeros."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126 - 9 + ((bits & 0x7FFFFF) >= 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    normal = ((tl.maximum(exponent, -126) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, tl.where(exponent == -127, normal * 0.5, normal), 1.0)  # 2**-127 is subnormal


@triton.jit
def _dynamic_scales(value, limit, config: tl.constexpr):
    """Scale and zero point float32 [groups] of value [groups, group_size]."""
    GROUPS: tl.constexpr = config.groups
    divisor = tl.full((GROUPS,), config.divisor, tl.float32)
    if config.asymmetric:
        high = tl.minimum(tl.maximum(tl.max(value, axis=1), 0.0), limit)
        low = tl.maximum(tl.minimum(tl.min(value, axis=1), 0.0), -limit)
        scale = tl.maximum(tl.div_rn(high - low, divisor), config.min_scale)
        zero = _round_half_even(tl.minimum(tl.maximum(-128.0 - tl.div_rn(low, scale), -128.0), 127.0))
        return scale, zero
    else:
        amax = tl.max(tl.abs(value), axis=1)
        if config.e8m0_scale:
            scale = _e8m0_scale(amax)
        else:
            scale = tl.maximum(tl.div_rn(tl.minimum(amax, limit), divisor), config.min_scale)
        return scale, tl.zeros_like(scale)


@triton.jit
def _divide(value, scale, config: tl.constexpr):
    """value [groups, group_size] / scale [groups], rounded to nearest.

    With config.corrected_quotient by the reciprocal, and one correction by the remainder. Value and reciprocal are negated, so
    that the sign of a zero is kept. The bounds keep the remainder finite; from 2**20 on codes are saturated.
    """
    divisor = tl.broadcast_to(scale[:, None], value.shape)
    if config.corrected_quotient:
        inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, -1.0, tl.float32), scale)[:, None], value.shape)
        negated = value * -1.0  # Triton's unary minus subtracts from 0
        quotient = tl.minimum(tl.maximum(negated * inverse, -1048576.0), 1048576.0)
        return tl.fma(tl.fma(quotient, divisor, negated), inverse, quotient)
    else:
        return tl.div_rn(value, divisor)


@triton.jit
def _e4m3_byte(value):
    """E4M3 codes of |value| <= 448 or NaN by integer arithmetic, for devices that do not convert to OCP FP8."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude.to(tl.float32, bitcast=True) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)  # 2**-6, the smallest normal value
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _codes(value, scale, zero, inside, config: tl.constexpr):
    """Bytes of the codes of value [groups, group_size]; 0 outside of x."""
    scaled = _divide(value, scale, config)
    if config.fp8:
        NAN: tl.constexpr = tl.PropagateNan.ALL
        scaled = tl.minimum(tl.maximum(scaled, -448.0, propagate_nan=NAN), 448.0, propagate_nan=NAN)
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if config.native_fp8 else _e4m3_byte(scaled)
    else:
        if config.has_zero:
            scaled += zero[:, None]
        clamped = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
        code = (clamped + 12582912.0).to(tl.int32, bitcast=True)  # the integer is in the low bits
        return (tl.where(inside, code, 0) if config.has_zero else code).to(tl.uint8)


@triton.jit
def _rounded(value, like_ptr):
    """float32 rounded to the dtype of activations, as between the operators of a model."""
    return value.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _rms_norm(value, x_ptr, weight_ptr, offs_k, K, epsilon):
    """weight * value / sqrt(mean(value^2) + epsilon) of a whole row, rounded as transformers' modules round."""
    mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / K
    value = _rounded(value * tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon)), x_ptr)
    return _rounded(tl.load(weight_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32) * value, x_ptr)


@triton.jit
def _silu_mul(value, x_ptr, up):
    """silu(value) * up, each rounded."""
    return _rounded(_rounded(value / (1.0 + tl.exp(-value)), x_ptr) * up, x_ptr)


@triton.jit(do_not_specialize=["M", "epsilon", "limit"])
def quantize_kernel(
    x_ptr, other_ptr, residual_ptr, new_residual_ptr, codes_ptr, scale_ptr, zero_ptr, M, K, k_padded, groups,
    stride_x, stride_other, stride_residual, scale_stride_m, scale_stride_group, epsilon, limit, config: tl.constexpr,
):  # fmt: skip
    """x [M, K] to codes, as bytes [m_padded, k_padded], scales float32 and zero points int32 [m_padded, groups].

    Program ids are (row, tile of the row). Padding, rows from M on and columns from K on, becomes zeros. `other_ptr`: the weight
    [K] of an RMSNorm, or `up` [M, K] of a gated SiLU. config.has_residual: residual [M, K] is added first, and the rounded sum
    stored to new_residual. Of a static scheme, scale [1] and zero [1] are read. limit caps the absolute values that a scale is
    computed from; infinity for none.
    """
    GROUPS: tl.constexpr = config.groups
    GROUP_SIZE: tl.constexpr = config.group_size
    row = tl.program_id(0)
    offs_g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offs_k = offs_g[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = (offs_k < K) & (row < M)
    row64 = row.to(tl.int64)
    value = tl.load(x_ptr + row64 * stride_x + offs_k, mask=inside, other=0.0).to(tl.float32)
    if config.has_residual:
        value += tl.load(residual_ptr + row64 * stride_residual + offs_k, mask=inside, other=0.0).to(tl.float32)
        value = _rounded(value, x_ptr)
        tl.store(new_residual_ptr + row64 * K + offs_k, value.to(new_residual_ptr.dtype.element_ty), mask=inside)
    if config.source == "rms_norm":
        value = _rms_norm(value, x_ptr, other_ptr, offs_k, K, epsilon)
    elif config.source == "silu_mul":
        value = _silu_mul(value, x_ptr, tl.load(other_ptr + row64 * stride_other + offs_k, mask=inside, other=0.0).to(tl.float32))
    if config.static:
        scale = tl.zeros((GROUPS,), tl.float32) + tl.load(scale_ptr)
        zero = tl.zeros_like(scale)
        if config.has_zero:
            zero += tl.load(zero_ptr).to(tl.float32)
    else:
        scale, zero = _dynamic_scales(value, limit, config)
        offs_scale = row64 * scale_stride_m + offs_g.to(tl.int64) * scale_stride_group
        tl.store(scale_ptr + offs_scale, scale, mask=offs_g < groups)
        if config.has_zero:
            tl.store(zero_ptr + offs_scale, zero.to(tl.int32), mask=offs_g < groups)
    codes = _codes(value, scale, zero, inside, config)
    tl.store(codes_ptr + row64 * k_padded + offs_k, codes, mask=offs_k < k_padded)
