# mypy: disable-error-code="no-untyped-def"
"""Device code: a layer's input quantized and read back, bit for bit what `activations.fake_quantize` computes, in one pass.

By arithmetic alone, so that it runs where there is no FP8 or FP4 type. `R` is a `fake_quantized.Rounding`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _whole(value):
    """The nearest integer of |value| < 2**22, halves to even: adding 1.5 * 2**23 leaves no room for a fraction."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _power(exponent):
    """2**exponent, of -127 to 127, as float32; 2**-127 is subnormal."""
    normal = ((tl.maximum(exponent, -126) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent == -127, normal * 0.5, normal)


@triton.jit
def _minifloat(value, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """The nearest number of `MANTISSA` binary digits, ties to the even one; from 2**LOWEST down they are equally far apart."""
    exponent = tl.maximum(((value.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LOWEST)
    return _whole(value * _power(MANTISSA - exponent)) * _power(exponent - MANTISSA)


@triton.jit
def fake_quantize_kernel(
    x_ptr, out_ptr, scale_ptr, zero_ptr, K, limit, R: tl.constexpr, TINY: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """TILE groups of GROUP columns of a row of x [M, K] into out [M, K]; program ids are (row, groups).

    scale_ptr: a static scheme's scale, and that which a dynamic scheme's E4M3 scales are under. zero_ptr: a static zero point.
    limit: what an absolute value counts as at most where a scale is computed. A NaN stays one.
    """
    at = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = at < K
    start = tl.program_id(0).to(tl.int64) * K
    value = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    zero = tl.zeros((TILE,), tl.float32)
    if R.static:
        scale = zero + tl.load(scale_ptr)
        if R.asymmetric:
            zero += tl.load(zero_ptr).to(tl.float32)
    elif R.asymmetric:
        top = tl.minimum(tl.maximum(tl.max(value, axis=1), 0.0), limit)
        bottom = tl.maximum(tl.minimum(tl.min(value, axis=1), 0.0), -limit)
        scale = tl.maximum(tl.div_rn(top - bottom, zero + R.range), TINY)
        zero = _whole(tl.minimum(tl.maximum(R.low - tl.div_rn(bottom, scale), R.low), R.high))
    else:
        peak = tl.max(tl.abs(value), axis=1)
        if R.power:
            bits = peak.to(tl.int32, bitcast=True)
            exponent = (bits >> 23) - 126 - R.digits + ((bits & 0x7FFFFF) >= 0x600000).to(tl.int32)
            scale = tl.where(peak > 0, _power(tl.minimum(tl.maximum(exponent, -127), 127)), 1.0)
        elif R.fine:
            whole = zero + 1.0
            if R.scaled:
                whole = zero + tl.load(scale_ptr)
            local = _minifloat(tl.minimum(tl.div_rn(peak * whole, zero + R.range), 448.0), 3, -6)
            scale = tl.where(local > 0, tl.div_rn(local, whole), 1.0)
        else:
            scale = tl.maximum(tl.div_rn(tl.minimum(peak, limit), zero + R.range), TINY)
    scale = tl.broadcast_to(scale[:, None], (TILE, GROUP))
    scaled = tl.div_rn(value, scale) + zero[:, None]
    near = tl.minimum(tl.maximum(scaled, R.low), R.high)
    if R.integer:
        near = _whole(near) - zero[:, None]
    else:
        near = _minifloat(near, R.mantissa, R.lowest)
    near = tl.where(scaled == scaled, near * scale, scaled)
    tl.store(out_ptr + start + at, near.to(out_ptr.dtype.element_ty), mask=inside)
