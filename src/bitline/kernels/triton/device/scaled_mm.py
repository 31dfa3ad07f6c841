# mypy: disable-error-code="no-untyped-def"
"""Device code of the W8A8 GEMM: int8 or FP8 codes, scaled in float32. One source for NVIDIA, AMD and Intel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mma(a, b, acc, ACC_DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b. UPCAST: by a float32 matmul, as the interpreter has none of int8 or FP8."""
    if UPCAST:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), out_dtype=tl.float32).to(ACC_DTYPE)
    else:
        return tl.dot(a, b, acc, out_dtype=ACC_DTYPE)


@triton.jit
def _partial_mma(a, b, ACC_DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b in float32, for a partial accumulator that is scaled next."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), out_dtype=tl.float32)
    else:
        return tl.dot(a, b, out_dtype=ACC_DTYPE).to(tl.float32)


@triton.jit
def _accumulate(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, row_m, row_n, valid_m, scale_row, K, a_groups, b_groups, offset_k,
    SCALE_BLOCK_K: tl.constexpr, ACT_GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    ACC_DTYPE: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    """The accumulator of a tile, [BLOCK_SIZE_M, BLOCK_SIZE_N], with one K slice; see `scaled_mm_kernel`."""
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + row_m.to(tl.int64)[:, None] * K + offs_k[None, :]
    b_ptrs = b_ptr + row_n.to(tl.int64)[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32 if SCALE_BLOCK_K > 0 else ACC_DTYPE)
    for start in range(0, K, BLOCK_SIZE_K):
        if EVEN_K:
            a = tl.load(a_ptrs + start, mask=valid_m[:, None], other=ZERO) if BLOCK_SIZE_M <= 32 else tl.load(a_ptrs + start)
            b = tl.load(b_ptrs + start)
        else:
            valid_k = offs_k + start < K
            a = tl.load(a_ptrs + start, mask=valid_m[:, None] & valid_k[None, :], other=ZERO)
            b = tl.load(b_ptrs + start, mask=valid_k[:, None], other=ZERO)
        if SCALE_BLOCK_K > 0:
            partial = _partial_mma(a, b, ACC_DTYPE, UPCAST)
            b_scale = tl.load(b_scale_ptr + scale_row * b_groups + (start + offset_k) // SCALE_BLOCK_K)
            a_scale = tl.load(a_scale_ptr + row_m * a_groups + start // ACT_GROUP_SIZE)
            acc += partial * (a_scale[:, None] * b_scale[None, :])
        else:
            acc = _mma(a, b, acc, ACC_DTYPE, UPCAST)
    return acc


@triton.jit
def _accumulate_sliced(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, row_m, row_n, valid_m, scale_row, K, a_groups, b_groups, offset_k,
    SCALE_BLOCK_K: tl.constexpr, ACT_GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    ACC_DTYPE: tl.constexpr, ZERO: tl.constexpr, K_SLICES: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    """As `_accumulate`, with K_SLICES tiles of K per iteration, whose accumulators are reduced at the end."""
    slice_k = tl.arange(0, K_SLICES) * BLOCK_SIZE_K
    offs_k = slice_k[:, None] + tl.arange(0, BLOCK_SIZE_K)[None, :]
    a_ptrs = a_ptr + row_m.to(tl.int64)[None, :, None] * K + offs_k[:, None, :]
    b_ptrs = b_ptr + row_n.to(tl.int64)[None, None, :] * K + offs_k[:, :, None]
    acc = tl.zeros((K_SLICES, BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32 if SCALE_BLOCK_K > 0 else ACC_DTYPE)
    for start in range(0, K, K_SLICES * BLOCK_SIZE_K):
        if EVEN_K:
            a = tl.load(a_ptrs + start, mask=valid_m[None, :, None], other=ZERO)
            b = tl.load(b_ptrs + start)
        else:
            valid_k = offs_k + start < K
            a = tl.load(a_ptrs + start, mask=valid_m[None, :, None] & valid_k[:, None, :], other=ZERO)
            b = tl.load(b_ptrs + start, mask=valid_k[:, :, None], other=ZERO)
        if SCALE_BLOCK_K > 0:
            partial = _partial_mma(a, b, ACC_DTYPE, UPCAST)
            k = slice_k + start
            b_offs = scale_row[None, :] * b_groups + ((k + offset_k) // SCALE_BLOCK_K)[:, None]
            a_offs = row_m[None, :] * a_groups + (k // ACT_GROUP_SIZE)[:, None]
            b_scale = tl.load(b_scale_ptr + b_offs, mask=(k < K)[:, None], other=0.0)
            a_scale = tl.load(a_scale_ptr + a_offs, mask=(k < K)[:, None], other=0.0)
            acc += partial * (a_scale[:, :, None] * b_scale[:, None, :])
        else:
            acc = _mma(a, b, acc, ACC_DTYPE, UPCAST)
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=["M", "offset_n", "offset_k"])
def scaled_mm_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, a_zero_ptr, colsum_ptr, bias_ptr, out_ptr,
    M, N, K, a_groups, b_groups, offset_n, offset_k,
    PER_TOKEN: tl.constexpr, SCALE_BLOCK_N: tl.constexpr, SCALE_BLOCK_K: tl.constexpr, ACT_GROUP_SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, K_SLICES: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    """y[m, n] = a_scale[m] * b_scale[n] * sum_k (a[m, k] - a_zero[m]) b[n, k] + bias[n], one output tile per program.

    a [M, K], b [N, K], int8 or FP8; program ids are (n, m). PER_TOKEN: a_scale and a_zero have an element per row of a, else one.
    colsum int32 [N]: the sums of b's rows, which a_zero multiplies.
    SCALE_BLOCK_K != 0: scales change along K: b_scale[(n + offset_n) // SCALE_BLOCK_N, (k + offset_k) // SCALE_BLOCK_K] and
    a_scale[m, k // ACT_GROUP_SIZE]; BLOCK_SIZE_K columns then share both.
    K_SLICES: tiles of K per iteration, each multiplied by its own warps and reduced at the end (intra-CTA split-K). EVEN_K: K is
    a multiple of K_SLICES * BLOCK_SIZE_K.
    """
    IS_INT8: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ACC_DTYPE: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    ZERO: tl.constexpr = 0 if IS_INT8 else 0.0
    offs_n = tl.program_id(0) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    offs_m = tl.program_id(1) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    # Rows past the end repeat the last one; only the store is masked.
    row_n = tl.minimum(offs_n, N - 1)
    row_m = tl.minimum(offs_m, M - 1)
    # At small M, rows of a past the end are masked: if every program repeated the last one, they would contend for a cache line.
    valid_m = offs_m < M
    scale_row = (row_n + offset_n) // SCALE_BLOCK_N
    if K_SLICES == 1:
        acc = _accumulate(
            a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, row_m, row_n, valid_m, scale_row, K, a_groups, b_groups, offset_k,
            SCALE_BLOCK_K, ACT_GROUP_SIZE, EVEN_K, UPCAST, ACC_DTYPE, ZERO, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
        )  # fmt: skip
    else:
        acc = _accumulate_sliced(
            a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, row_m, row_n, valid_m, scale_row, K, a_groups, b_groups, offset_k,
            SCALE_BLOCK_K, ACT_GROUP_SIZE, EVEN_K, UPCAST, ACC_DTYPE, ZERO, K_SLICES, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
        )  # fmt: skip
    if HAS_ZERO:
        zero = tl.load(a_zero_ptr + (row_m if PER_TOKEN else row_m * 0))
        acc -= zero[:, None] * tl.load(colsum_ptr + row_n)[None, :]
    y = acc.to(tl.float32)
    if SCALE_BLOCK_K == 0:
        a_scale = tl.load(a_scale_ptr + (row_m if PER_TOKEN else row_m * 0))
        y *= a_scale[:, None]
        y *= tl.load(b_scale_ptr + row_n)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])
