# mypy: disable-error-code="no-untyped-def"
"""Device code of fake quantization of activations, bit for bit what `act_quant.fake_quantize` computes, in one pass.

It uses only float32 arithmetic, so it runs on GPUs without FP8 or FP4 types. `CONFIG` is a `triton_fake_quant.FakeQuantConfig`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _round_half_even(value):
    """The nearest integer, halves to even, for |value| < 2**22: adding 1.5 * 2**23 pushes the fraction out of the mantissa."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _exp2(exponent):
    """2**exponent as float32, for an integer exponent in [-127, 127]; 2**-127 is subnormal."""
    normal = ((tl.maximum(exponent, -126) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent == -127, normal * 0.5, normal)


@triton.jit
def _round_minifloat(value, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Round to MANTISSA_BITS of mantissa, ties to even; below 2**MIN_EXPONENT the spacing is that of subnormal numbers."""
    exponent = tl.maximum(((value.to(tl.int32, bitcast=True) >> 23) & 255) - 127, MIN_EXPONENT)
    return _round_half_even(value * _exp2(MANTISSA_BITS - exponent)) * _exp2(exponent - MANTISSA_BITS)


@triton.jit
def _dynamic_scale(value, scale_ptr, limit, zeros, CONFIG: tl.constexpr, MIN_SCALE: tl.constexpr):
    """The symmetric scale of each group, float32 [GROUPS_PER_PROGRAM], from value [GROUPS_PER_PROGRAM, GROUP_SIZE]."""
    amax = tl.max(tl.abs(value), axis=1)
    if CONFIG.e8m0_scale:
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 126 - CONFIG.max_exponent + ((bits & 0x7FFFFF) >= 0x600000).to(tl.int32)
        return tl.where(amax > 0, _exp2(tl.minimum(tl.maximum(exponent, -127), 127)), 1.0)
    elif CONFIG.e4m3_scale:
        global_scale = zeros + 1.0
        if CONFIG.global_scale:
            global_scale = zeros + tl.load(scale_ptr)
        local = _round_minifloat(tl.minimum(tl.div_rn(amax * global_scale, zeros + CONFIG.divisor), 448.0), 3, -6)
        return tl.where(local > 0, tl.div_rn(local, global_scale), 1.0)
    else:
        return tl.maximum(tl.div_rn(tl.minimum(amax, limit), zeros + CONFIG.divisor), MIN_SCALE)


@triton.jit
def fake_quantize_kernel(
    x_ptr, out_ptr, scale_ptr, zero_ptr, K, limit,
    CONFIG: tl.constexpr, MIN_SCALE: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Groups of a row of x [M, K] into out [M, K]; program ids are (row, groups).

    scale_ptr: a static scheme's scale, or the global scale over a dynamic scheme's E4M3 scales. zero_ptr: a static zero point.
    limit: caps the absolute values that a scale is computed from. NaN stays NaN.
    """
    offs_g = tl.program_id(1) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    offs_k = offs_g[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = offs_k < K
    row_start = tl.program_id(0).to(tl.int64) * K
    value = tl.load(x_ptr + row_start + offs_k, mask=inside, other=0.0).to(tl.float32)
    zero = tl.zeros((GROUPS_PER_PROGRAM,), tl.float32)
    if CONFIG.static:
        scale = zero + tl.load(scale_ptr)
        if CONFIG.asymmetric:
            zero += tl.load(zero_ptr).to(tl.float32)
    elif CONFIG.asymmetric:
        group_max = tl.minimum(tl.maximum(tl.max(value, axis=1), 0.0), limit)
        group_min = tl.maximum(tl.minimum(tl.min(value, axis=1), 0.0), -limit)
        scale = tl.maximum(tl.div_rn(group_max - group_min, zero + CONFIG.divisor), MIN_SCALE)
        zero = _round_half_even(tl.minimum(tl.maximum(CONFIG.qmin - tl.div_rn(group_min, scale), CONFIG.qmin), CONFIG.qmax))
    else:
        scale = _dynamic_scale(value, scale_ptr, limit, zero, CONFIG, MIN_SCALE)
    scale = tl.broadcast_to(scale[:, None], (GROUPS_PER_PROGRAM, GROUP_SIZE))
    scaled = tl.div_rn(value, scale) + zero[:, None]
    code = tl.minimum(tl.maximum(scaled, CONFIG.qmin), CONFIG.qmax)
    if CONFIG.integer:
        code = _round_half_even(code) - zero[:, None]
    else:
        code = _round_minifloat(code, CONFIG.mantissa_bits, CONFIG.min_exponent)
    dequantized = tl.where(scaled == scaled, code * scale, scaled)
    tl.store(out_ptr + row_start + offs_k, dequantized.to(out_ptr.dtype.element_ty), mask=inside)
