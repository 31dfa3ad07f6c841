# mypy: disable-error-code="no-untyped-def"
"""Dynamic per-token FP8 quantization in one pass over x, bit for bit what `activations.quantize_input` computes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def quantize_kernel(x_ptr, codes_ptr, scale_ptr, M, K, columns, TINY: tl.constexpr, BLOCK: tl.constexpr):
    """Row m of x [M, K] to codes float8_e4m3fn [rows, columns], scale float32 [rows]; zeros right of K and below M.

    scale = max(max|x| / 448, TINY); code = x / scale, both divisions rounded to nearest as torch's are.
    """
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * K
    codes_ptr += row.to(tl.int64) * columns
    peak = 0.0
    if row < M:
        largest = tl.zeros((BLOCK,), tl.float32)
        for k in range(0, K, BLOCK):
            at = k + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)))
        peak = tl.max(largest)
    scale = tl.maximum(tl.div_rn(peak, 448.0), TINY)
    tl.store(scale_ptr + row, scale)
    for k in range(0, columns, BLOCK):
        at = k + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + at, mask=(at < K) & (row < M), other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * scale)
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        tl.store(codes_ptr + at, value.to(tl.float8e4nv), mask=at < columns)
