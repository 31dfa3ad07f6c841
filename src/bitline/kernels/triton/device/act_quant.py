# mypy: disable-error-code="no-untyped-def"
"""Quantization of a layer's input in one pass, bit for bit what `activations.quantize_input` and its kin compute.

Divisions are rounded to nearest as torch's are. Rows from M on, and columns from K on, are zeros. `limit` is what an absolute
value counts as at most where a scale is computed; infinity for none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def quantize_kernel(x_ptr, codes_ptr, scale_ptr, M, K, columns, limit, TINY: tl.constexpr, BLOCK: tl.constexpr):
    """Row m of x [M, K] to codes float8_e4m3fn [rows, columns], scale float32 [rows]: scale = max(max|x| / 448, TINY)."""
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * K
    codes_ptr += row.to(tl.int64) * columns
    peak = 0.0
    if row < M:
        largest = tl.zeros((BLOCK,), tl.float32)
        for k in range(0, K, BLOCK):
            at = k + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)))
        peak = tl.minimum(tl.max(largest), limit)
    scale = tl.maximum(tl.div_rn(peak, 448.0), TINY)
    tl.store(scale_ptr + row, scale)
    for k in range(0, columns, BLOCK):
        at = k + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + at, mask=(at < K) & (row < M), other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * scale)
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        tl.store(codes_ptr + at, value.to(tl.float8e4nv), mask=at < columns)


@triton.jit(do_not_specialize=["M"])
def quantize_int8_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, M, K, columns, limit, ASYMMETRIC: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr
):
    """Row m of x [M, K] to codes int8 [rows, columns], scale float32 and zero int32 [rows].

    Symmetric: scale = max|x| / 127.5. Asymmetric: scale = (max - min) / 255 of a range that contains 0, zero =
    round(-128 - min / scale).
    """
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * K
    codes_ptr += row.to(tl.int64) * columns
    high = tl.zeros((BLOCK,), tl.float32)
    low = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, K, BLOCK):
        at = k + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + at, mask=(at < K) & (row < M), other=0.0).to(tl.float32)
        high = tl.maximum(high, value)
        low = tl.minimum(low, value)
    top, bottom = tl.minimum(tl.max(high), limit), -tl.minimum(-tl.min(low), limit)
    zero = 0.0
    if ASYMMETRIC:
        scale = tl.maximum(tl.div_rn(top - bottom, 255.0), TINY)
        zero = _half_even(tl.minimum(tl.maximum(-128.0 - tl.div_rn(bottom, scale), -128.0), 127.0))
        tl.store(zero_ptr + row, zero.to(tl.int32))
    else:
        scale = tl.maximum(tl.div_rn(tl.maximum(top, -bottom), 127.5), TINY)
    tl.store(scale_ptr + row, scale)
    for k in range(0, columns, BLOCK):
        at = k + tl.arange(0, BLOCK)
        inside = (at < K) & (row < M)
        value = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        code = _int8(value, tl.full((BLOCK,), 1.0, tl.float32) * scale, zero)
        tl.store(codes_ptr + at, tl.where(inside, code, 0).to(tl.int8), mask=at < columns)


@triton.jit(do_not_specialize=["M"])
def encode_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, M, K, columns, FLOAT: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Row m of x [M, K] to codes float8_e4m3fn or int8 [rows, columns] by a static scheme's scale float32 and zero int32."""
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * K
    codes_ptr += row.to(tl.int64) * columns
    scale = tl.full((BLOCK,), 1.0, tl.float32) * tl.load(scale_ptr)
    zero = tl.load(zero_ptr).to(tl.float32) if HAS_ZERO else 0.0
    for k in range(0, columns, BLOCK):
        at = k + tl.arange(0, BLOCK)
        inside = (at < K) & (row < M)
        value = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if FLOAT:
            value = tl.minimum(tl.maximum(tl.div_rn(value, scale), -448.0), 448.0)
            tl.store(codes_ptr + at, value.to(tl.float8e4nv), mask=at < columns)
        else:
            tl.store(codes_ptr + at, tl.where(inside, _int8(value, scale, zero), 0).to(tl.int8), mask=at < columns)


@triton.jit
def _int8(value, scale, zero):
    """The code of each value as a float: round(value / scale + zero), saturating; halves round to even."""
    return _half_even(tl.minimum(tl.maximum(tl.div_rn(value, scale) + zero, -128.0), 127.0))


@triton.jit
def _half_even(value):
    """The nearest integer of |value| < 2**22, halves to even: adding 1.5 * 2**23 leaves no room for a fraction."""
    return (value + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["M"])
def quantize_groups_kernel(
    x_ptr, codes_ptr, scale_ptr, M, K, columns, groups, row_stride, group_stride, limit,
    POWER: tl.constexpr, TINY: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x [M, K] to codes float8_e4m3fn [rows, columns] and scale float32 [rows, groups], one for GROUP columns of a row.

    scale = max(max|x| / 448, TINY); POWER: the power of two of `activations.mx_exponent` instead, 1 where a group is zero.
    """
    row = tl.program_id(0)
    g = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (at < K) & (row < M)
    value = tl.load(x_ptr + row.to(tl.int64) * K + at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(value), axis=1)
    if POWER:
        bits = peak.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 126 - 9 + ((bits & 0x7FFFFF) >= 0x600000).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, -127), 127)
        # 2**-127 is subnormal: half of the smallest normal number.
        normal = ((tl.maximum(exponent, -126) + 127) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(peak > 0, tl.where(exponent == -127, normal * 0.5, normal), 1.0)
    else:
        scale = tl.maximum(tl.div_rn(tl.minimum(peak, limit), tl.full((TILE,), 448.0, tl.float32)), TINY)
    tl.store(scale_ptr + row.to(tl.int64) * row_stride + g.to(tl.int64) * group_stride, scale, mask=g < groups)
    value = tl.div_rn(value, tl.broadcast_to(scale[:, None], (TILE, GROUP)))
    value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    tl.store(codes_ptr + row.to(tl.int64) * columns + at, value.to(tl.float8e4nv), mask=at < columns)
