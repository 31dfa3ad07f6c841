# mypy: disable-error-code="no-untyped-def"
"""Device code of activation quantization, bit for bit what `act_quant.quantize_input` and `quantize_groups` compute.

One program per row. Divisions round to nearest (`div_rn`), as torch's do. Padding, rows from M on and columns from K on, becomes
zeros. `limit` caps the absolute values that a scale is computed from; infinity for none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def quantize_fp8_per_token_kernel(
    x_ptr, codes_ptr, scale_ptr, M, K, k_padded, limit, MIN_SCALE: tl.constexpr, BLOCK_SIZE_K: tl.constexpr
):
    """x [M, K] to codes float8_e4m3fn [m_padded, k_padded] and scale float32 [m_padded]: max(amax / 448, MIN_SCALE)."""
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * K
    codes_ptr += row.to(tl.int64) * k_padded
    amax = 0.0
    if row < M:
        block_amax = tl.zeros((BLOCK_SIZE_K,), tl.float32)
        for k in range(0, K, BLOCK_SIZE_K):
            offs_k = k + tl.arange(0, BLOCK_SIZE_K)
            block_amax = tl.maximum(block_amax, tl.abs(tl.load(x_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)))
        amax = tl.minimum(tl.max(block_amax), limit)
    scale = tl.maximum(tl.div_rn(amax, 448.0), MIN_SCALE)
    tl.store(scale_ptr + row, scale)
    for k in range(0, k_padded, BLOCK_SIZE_K):
        offs_k = k + tl.arange(0, BLOCK_SIZE_K)
        value = tl.load(x_ptr + offs_k, mask=(offs_k < K) & (row < M), other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.full((BLOCK_SIZE_K,), 1.0, tl.float32) * scale)
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        tl.store(codes_ptr + offs_k, value.to(tl.float8e4nv), mask=offs_k < k_padded)


@triton.jit(do_not_specialize=["M"])
def quantize_int8_per_token_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, M, K, k_padded, limit,
    ASYMMETRIC: tl.constexpr, MIN_SCALE: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    """x [M, K] to codes int8 [m_padded, k_padded], scale float32 [m_padded] and, if ASYMMETRIC, zero int32 [m_padded].

    Symmetric: scale = amax / 127.5. Asymmetric: scale = (max - min) / 255 of a range that contains 0, zero =
    round(-128 - min / scale).
    """
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * K
    codes_ptr += row.to(tl.int64) * k_padded
    block_max = tl.zeros((BLOCK_SIZE_K,), tl.float32)
    block_min = tl.zeros((BLOCK_SIZE_K,), tl.float32)
    for k in range(0, K, BLOCK_SIZE_K):
        offs_k = k + tl.arange(0, BLOCK_SIZE_K)
        value = tl.load(x_ptr + offs_k, mask=(offs_k < K) & (row < M), other=0.0).to(tl.float32)
        block_max = tl.maximum(block_max, value)
        block_min = tl.minimum(block_min, value)
    row_max, row_min = tl.minimum(tl.max(block_max), limit), -tl.minimum(-tl.min(block_min), limit)
    zero = 0.0
    if ASYMMETRIC:
        scale = tl.maximum(tl.div_rn(row_max - row_min, 255.0), MIN_SCALE)
        zero = _round_half_even(tl.minimum(tl.maximum(-128.0 - tl.div_rn(row_min, scale), -128.0), 127.0))
        tl.store(zero_ptr + row, zero.to(tl.int32))
    else:
        scale = tl.maximum(tl.div_rn(tl.maximum(row_max, -row_min), 127.5), MIN_SCALE)
    tl.store(scale_ptr + row, scale)
    for k in range(0, k_padded, BLOCK_SIZE_K):
        offs_k = k + tl.arange(0, BLOCK_SIZE_K)
        inside = (offs_k < K) & (row < M)
        value = tl.load(x_ptr + offs_k, mask=inside, other=0.0).to(tl.float32)
        code = _int8_code(value, tl.full((BLOCK_SIZE_K,), 1.0, tl.float32) * scale, zero)
        tl.store(codes_ptr + offs_k, tl.where(inside, code, 0).to(tl.int8), mask=offs_k < k_padded)


@triton.jit(do_not_specialize=["M"])
def quantize_static_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, M, K, k_padded,
    IS_FP8: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    """x [M, K] to codes float8_e4m3fn or int8 [m_padded, k_padded] by a static scale float32 [1] and zero int32 [1]."""
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * K
    codes_ptr += row.to(tl.int64) * k_padded
    scale = tl.full((BLOCK_SIZE_K,), 1.0, tl.float32) * tl.load(scale_ptr)
    zero = tl.load(zero_ptr).to(tl.float32) if HAS_ZERO else 0.0
    for k in range(0, k_padded, BLOCK_SIZE_K):
        offs_k = k + tl.arange(0, BLOCK_SIZE_K)
        inside = (offs_k < K) & (row < M)
        value = tl.load(x_ptr + offs_k, mask=inside, other=0.0).to(tl.float32)
        if IS_FP8:
            value = tl.minimum(tl.maximum(tl.div_rn(value, scale), -448.0), 448.0)
            tl.store(codes_ptr + offs_k, value.to(tl.float8e4nv), mask=offs_k < k_padded)
        else:
            tl.store(codes_ptr + offs_k, tl.where(inside, _int8_code(value, scale, zero), 0).to(tl.int8), mask=offs_k < k_padded)


@triton.jit
def _int8_code(value, scale, zero):
    """round(value / scale + zero) as a float, saturating to [-128, 127], halves to even."""
    return _round_half_even(tl.minimum(tl.maximum(tl.div_rn(value, scale) + zero, -128.0), 127.0))


@triton.jit
def _round_half_even(value):
    """The nearest integer, halves to even, for |value| < 2**22: adding 1.5 * 2**23 pushes the fraction out of the mantissa."""
    return (value + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["M"])
def quantize_fp8_per_group_kernel(
    x_ptr, codes_ptr, scale_ptr, M, K, k_padded, groups, scale_stride_m, scale_stride_group, limit,
    E8M0_SCALE: tl.constexpr, MIN_SCALE: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """x [M, K] to codes float8_e4m3fn [m_padded, k_padded] and scale float32 [m_padded, groups]; program ids are (row, groups).

    scale = max(amax / 448, MIN_SCALE); with E8M0_SCALE the power of two of `act_quant.mx_exponent`, and 1 for a group of zeros.
    """
    row = tl.program_id(0)
    offs_g = tl.program_id(1) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    offs_k = offs_g[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = (offs_k < K) & (row < M)
    value = tl.load(x_ptr + row.to(tl.int64) * K + offs_k, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(value), axis=1)
    if E8M0_SCALE:
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 126 - 9 + ((bits & 0x7FFFFF) >= 0x600000).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, -127), 127)
        # 2**-127 is subnormal: half of the smallest normal number.
        normal = ((tl.maximum(exponent, -126) + 127) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(amax > 0, tl.where(exponent == -127, normal * 0.5, normal), 1.0)
    else:
        scale = tl.maximum(tl.div_rn(tl.minimum(amax, limit), tl.full((GROUPS_PER_PROGRAM,), 448.0, tl.float32)), MIN_SCALE)
    tl.store(
        scale_ptr + row.to(tl.int64) * scale_stride_m + offs_g.to(tl.int64) * scale_stride_group, scale, mask=offs_g < groups
    )
    value = tl.div_rn(value, tl.broadcast_to(scale[:, None], (GROUPS_PER_PROGRAM, GROUP_SIZE)))
    value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    tl.store(codes_ptr + row.to(tl.int64) * k_padded + offs_k, value.to(tl.float8e4nv), mask=offs_k < k_padded)
