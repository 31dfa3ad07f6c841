# mypy: disable-error-code="no-untyped-def"
"""Device code of the W8A8 kernels: int8 or FP8 codes times codes, scaled in float32. One source for NVIDIA, AMD and Intel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "off_n", "off_k"])
def scaled_mm_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, a_zero_ptr, colsum_ptr, bias_ptr, out_ptr,
    M, N, K, a_groups, b_groups, off_n, off_k,
    A_TOKEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr, SLICES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, n] = a_scale[m] * b_scale[n] * sum_k (a[m, k] - a_zero[m]) b[n, k] + bias[n] for a tile of BM x BN.

    a [M, K], b [N, K], int8 or FP8. A_TOKEN: one a_scale (and a_zero) for each row, else one for all. colsum int32 [N]:
    the row sums of b, which a_zero multiplies. BLOCK_K, GROUP: where they are not 0 scales change along K:
    b_scale[(n + off_n) // BLOCK_N, (k + off_k) // BLOCK_K] and a_scale[m, k // GROUP]; BK columns then share both.
    SLICES pieces of BK columns are multiplied side by side, each by warps of its own, and added at the end. EVEN: K is a
    multiple of all of them.
    """
    WHOLE: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ACC: tl.constexpr = tl.int32 if WHOLE else tl.float32
    EMPTY: tl.constexpr = 0 if WHOLE else 0.0
    STEP: tl.constexpr = SLICES * BK
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.program_id(1) * BM + tl.arange(0, BM)
    row = tl.minimum(rows, N - 1)
    col = tl.minimum(cols, M - 1)
    k = tl.arange(0, BK)
    here = cols < M  # of few rows: programs that all read the last one again ask for one line of the cache
    b_row = (row + off_n) // BLOCK_N
    if SLICES == 1:
        a_tile = a_ptr + col.to(tl.int64)[:, None] * K + k[None, :]
        b_tile = b_ptr + row.to(tl.int64)[None, :] * K + k[:, None]
        total = tl.zeros((BM, BN), tl.float32 if BLOCK_K > 0 else ACC)
        for start in range(0, K, STEP):
            if EVEN:
                a = tl.load(a_tile + start, mask=here[:, None], other=EMPTY) if BM <= 32 else tl.load(a_tile + start)
                b = tl.load(b_tile + start)
            else:
                inside = k + start < K
                a = tl.load(a_tile + start, mask=here[:, None] & inside[None, :], other=EMPTY)
                b = tl.load(b_tile + start, mask=inside[:, None], other=EMPTY)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            if BLOCK_K > 0:
                part = tl.dot(a, b, out_dtype=tl.float32 if UPCAST else ACC).to(tl.float32)
                b_scale = tl.load(b_scale_ptr + b_row * b_groups + (start + off_k) // BLOCK_K)
                a_scale = tl.load(a_scale_ptr + col * a_groups + start // GROUP)
                total += part * (a_scale[:, None] * b_scale[None, :])
            elif UPCAST:
                total += tl.dot(a, b, out_dtype=tl.float32).to(ACC)
            else:
                total = tl.dot(a, b, total, out_dtype=ACC)
    else:
        first = tl.arange(0, SLICES) * BK
        at = first[:, None] + k[None, :]
        a_tile = a_ptr + col.to(tl.int64)[None, :, None] * K + at[:, None, :]
        b_tile = b_ptr + row.to(tl.int64)[None, None, :] * K + at[:, :, None]
        sums = tl.zeros((SLICES, BM, BN), tl.float32 if BLOCK_K > 0 else ACC)
        for start in range(0, K, STEP):
            if EVEN:
                a = tl.load(a_tile + start, mask=here[None, :, None], other=EMPTY)
                b = tl.load(b_tile + start)
            else:
                inside = at + start < K
                a = tl.load(a_tile + start, mask=here[None, :, None] & inside[:, None, :], other=EMPTY)
                b = tl.load(b_tile + start, mask=inside[:, :, None], other=EMPTY)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            if BLOCK_K > 0:
                part = tl.dot(a, b, out_dtype=tl.float32 if UPCAST else ACC).to(tl.float32)
                piece = first + start
                in_b = b_row[None, :] * b_groups + ((piece + off_k) // BLOCK_K)[:, None]
                in_a = col[None, :] * a_groups + (piece // GROUP)[:, None]
                b_scale = tl.load(b_scale_ptr + in_b, mask=(piece < K)[:, None], other=0.0)
                a_scale = tl.load(a_scale_ptr + in_a, mask=(piece < K)[:, None], other=0.0)
                sums += part * (a_scale[:, :, None] * b_scale[:, None, :])
            elif UPCAST:
                sums += tl.dot(a, b, out_dtype=tl.float32).to(ACC)
            else:
                sums = tl.dot(a, b, sums, out_dtype=ACC)
        total = tl.sum(sums, axis=0)
    if HAS_ZERO:
        zero = tl.load(a_zero_ptr + (col if A_TOKEN else col * 0))
        total -= zero[:, None] * tl.load(colsum_ptr + row)[None, :]
    y = total.to(tl.float32)
    if BLOCK_K == 0:
        a_scale = tl.load(a_scale_ptr + (col if A_TOKEN else col * 0))
        y *= a_scale[:, None]
        y *= tl.load(b_scale_ptr + row)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    out = out_ptr + cols.to(tl.int64)[:, None] * N + rows[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=(cols < M)[:, None] & (rows < N)[None, :])
