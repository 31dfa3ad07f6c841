# mypy: disable-error-code="no-untyped-def"

"""Device code of the weight-only GEMM: one source for NVIDIA, AMD and Intel, no inline assembly, no atomics.

Packed codes are int32 [k_blocks, N, 16] (`layout.pack`), so a tile of rows of a K block is one contiguous run of memory, and
dequantized weights go from registers into the MMA without passing through shared memory (machine code for sm_90: 2.8 to 3.5
instructions per 4-bit weight).

Codes, as numbers that 16 bits hold exactly, enter the MMA first; the partial accumulator of PROMOTE_K columns that share a scale
is scaled in float32 and added to the result. Zero points and offsets multiply the sums of x over the same columns, which an MMA
with ones gives in the same layout. One-byte block scales (MX, NVFP4) multiply the dequantized weights instead, which is exact
too; then one factor per row scales the final accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitline.kernels.triton.device.dequant import dequantize_block, dequantize_field, unpack_high_bits


@triton.jit
def _mma(w, x, acc, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, UPCAST: tl.constexpr):
    """acc [K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M] + w [.., BLOCK_SIZE_N, C] @ x [.., C, BLOCK_SIZE_M].

    One slice is multiplied as matrices, for which there are larger instructions than for a batch. UPCAST: in float32, since the
    interpreter has no bfloat16 matmul.
    """
    if UPCAST:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    if K_SLICES == 1:
        w2 = tl.reshape(w, (BLOCK_SIZE_N, w.shape[2]))
        x2 = tl.reshape(x, (x.shape[1], BLOCK_SIZE_M))
        acc2 = tl.reshape(acc, (BLOCK_SIZE_N, BLOCK_SIZE_M))
        return tl.reshape(tl.dot(w2, x2, acc2, input_precision="ieee"), (1, BLOCK_SIZE_N, BLOCK_SIZE_M))
    else:
        return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def _load_per_row(ptr, group, row, N):
    """Values of a table [groups, N] for groups [K_SLICES] and rows [BLOCK_SIZE_N], float32 [K_SLICES, BLOCK_SIZE_N, 1]."""
    return tl.load(ptr + group[:, None] * N + row[None, :]).to(tl.float32)[:, :, None]


@triton.jit
def _load_aux(aux_ptr, packed, block_row, FMT: tl.constexpr):
    """What accompanies packed codes (see device/dequant.py); block_row [K_SLICES, BLOCK_SIZE_N, 1] is K block * N + row."""
    if FMT.lut:
        return aux_ptr
    elif FMT.sf_vec_size > 0:
        offs = tl.arange(0, 32 // FMT.sf_vec_size)[None, None, :]
        return tl.load(aux_ptr + block_row * (32 // FMT.sf_vec_size) + offs, eviction_policy="evict_first").to(tl.uint32)
    elif FMT.high_bits > 0:
        offs = tl.arange(0, 16)[None, None, :]
        return unpack_high_bits(tl.load(aux_ptr + block_row * 16 + offs, eviction_policy="evict_first").to(tl.uint32), FMT)
    else:
        return packed


@triton.jit
def _load_x(x_rows, perm_ptr, k, k_end, valid_m, K, k_offset, HAS_PERM: tl.constexpr, EVEN_K: tl.constexpr, MASK_M: tl.constexpr):
    """x at packed columns k, zero for padding columns; x_rows: pointers to the rows of x."""
    if EVEN_K:
        if MASK_M:
            return tl.load(x_rows + k, mask=valid_m, other=0.0)
        else:
            return tl.load(x_rows + k)
    else:
        inside = k < k_end
        if HAS_PERM:
            k = tl.load(perm_ptr + k, mask=inside, other=K)
        else:
            k -= k_offset
        return tl.load(x_rows + k, mask=valid_m & inside & (k >= 0) & (k < K), other=0.0)


@triton.jit
def _dequantize(
    packed, aux, f: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr,
):  # fmt: skip
    """Columns [f * WIDTH, (f + 1) * WIDTH) of a K block: all of it, or one field of 32."""
    if WIDTH == BLOCK_SIZE_K:
        return dequantize_block(packed, aux, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
    else:
        return dequantize_field(packed, aux, f, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)


@triton.jit
def _add_zero_points(
    acc, x_sums, scale, zero_ptr, offset_ptr, group, row, N,
    ZERO_BASE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """acc + x_sums * (scale * (ZERO_BASE - zero) + offset) of a group; x_sums: the sums of x over the group's columns."""
    if HAS_ZERO:
        factor = scale * (ZERO_BASE - _load_per_row(zero_ptr, group, row, N))
        if HAS_OFFSET:
            factor += _load_per_row(offset_ptr, group, row, N)
        acc += x_sums * factor
    elif HAS_OFFSET:
        acc += x_sums * _load_per_row(offset_ptr, group, row, N)
    return acc


@triton.jit
def _store_tile(out_ptr, bias_ptr, y, offs_m, offs_n, row_n, split, M, N, HAS_BIAS: tl.constexpr, IS_SPLIT_K: tl.constexpr):
    """Epilogue: y float32 [BLOCK_SIZE_N, BLOCK_SIZE_M] to a split-K partial, or with the bias added and rounded to the output."""
    offs = offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]
    valid = (offs_m < M)[None, :] & (offs_n < N)[:, None]
    if IS_SPLIT_K:
        tl.store(out_ptr + split.to(tl.int64) * M * N + offs, y, mask=valid)
    else:
        if HAS_BIAS:
            y += tl.load(bias_ptr + row_n).to(tl.float32)[:, None]
        tl.store(out_ptr + offs, y.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["M", "k_offset", "k_blocks", "groups", "k_blocks_per_split"])
def gemm_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, offset_ptr, aux_ptr, perm_ptr, bias_ptr, out_ptr,
    M, N, K, k_offset, k_blocks, groups, k_blocks_per_split,
    FMT: tl.constexpr, SCALE_BLOCK_K: tl.constexpr, PROMOTE_K: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_PERM: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, IS_SPLIT_K: tl.constexpr, UPCAST: tl.constexpr,
    K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_M: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum_k x[m, k] W[n, k] + bias[n], one tile per program; program ids are (n, m, K split).

    x [M, K]; scale, zero, offset [groups, N]; perm int32 [packed K], the column of x, or K for padding.
    SCALE_BLOCK_K: columns per scale, a multiple of 32, or 0 for per-channel scales. PROMOTE_K: columns accumulated before the
    partial accumulator is scaled; with per-channel scales and a whole K block that happens once, at the end.
    K_SLICES: K blocks per iteration, reduced at the end (intra-CTA split-K, by different warps where it equals num_warps).
    EVEN_K: no column needs a mask. IS_SPLIT_K: out holds partials float32 [split_k, M, N] for `reduce_kernel`, else y [M, N].
    """
    BLOCK_SIZE_K: tl.constexpr = 512 // FMT.low_bits
    SCALE_AT_END: tl.constexpr = SCALE_BLOCK_K == 0 and PROMOTE_K == BLOCK_SIZE_K
    NEEDS_X_SUMS: tl.constexpr = HAS_ZERO or HAS_OFFSET
    WIDTH: tl.constexpr = BLOCK_SIZE_K if PROMOTE_K == BLOCK_SIZE_K else 32  # columns per MMA
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Rows of W past the end repeat the last one; only the store is masked.
    offs_n = tl.program_id(0) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    row_n = tl.minimum(offs_n, N - 1)
    offs_m = tl.program_id(1) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    split = tl.program_id(2)
    first_block = split * k_blocks_per_split
    end_block = tl.minimum(first_block + k_blocks_per_split, k_blocks)
    slices = tl.arange(0, K_SLICES)
    offs_k = tl.arange(0, WIDTH)[None, :, None]
    # Rows of x past M: a narrow tile masks them, since repeating one row in every program is slow (28672x4096, M=1: 35 us
    # against 25); a wide one repeats the last, since its masks are slower (M=256: 260 us against 197).
    MASK_M: tl.constexpr = BLOCK_SIZE_M <= 16
    row_m = offs_m if MASK_M else tl.minimum(offs_m, M - 1)
    valid_m = (offs_m < M)[None, None, :] if MASK_M else tl.full((1, 1, BLOCK_SIZE_M), True, tl.int1)
    x_rows = x_ptr + row_m.to(tl.int64)[None, None, :] * K
    codes_tile = codes_ptr + (row_n[None, :, None] * 16 + tl.arange(0, 16)[None, None, :])
    ones = tl.full((K_SLICES, BLOCK_SIZE_N, WIDTH), 1.0, tl.float32).to(DTYPE)
    zeros = tl.zeros((K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M), tl.float32)
    acc = tl.zeros((K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M), tl.float32)
    partial = tl.zeros((K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M), tl.float32)
    x_sums = tl.zeros((K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M), tl.float32)
    for c in range(first_block, end_block, K_SLICES):
        block = c + slices
        if not EVEN_K:
            block = tl.minimum(block, k_blocks - 1)  # past the end x is zero
        packed = tl.load(codes_tile + block.to(tl.int64)[:, None, None] * (N * 16), eviction_policy="evict_first")
        packed = packed.to(tl.uint32, bitcast=True)
        aux = _load_aux(aux_ptr, packed, (block.to(tl.int64)[:, None] * N + row_n[None, :])[:, :, None], FMT)
        for f in tl.static_range(BLOCK_SIZE_K // WIDTH):
            k = (c + slices)[:, None, None] * BLOCK_SIZE_K + f * WIDTH + offs_k
            x = _load_x(x_rows, perm_ptr, k, end_block * BLOCK_SIZE_K, valid_m, K, k_offset, HAS_PERM, EVEN_K, MASK_M)
            w = _dequantize(packed, aux, f, WIDTH, BLOCK_SIZE_K, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
            if SCALE_AT_END:
                acc = _mma(w, x, acc, K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M, UPCAST)
                if NEEDS_X_SUMS:
                    x_sums = _mma(ones, x, x_sums, K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M, UPCAST)
            else:
                if (f * WIDTH) % PROMOTE_K == 0:
                    partial = zeros
                    x_sums = zeros
                partial = _mma(w, x, partial, K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M, UPCAST)
                if NEEDS_X_SUMS:
                    x_sums = _mma(ones, x, x_sums, K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M, UPCAST)
                if ((f + 1) * WIDTH) % PROMOTE_K == 0:
                    group = (block * BLOCK_SIZE_K + f * WIDTH) // SCALE_BLOCK_K if SCALE_BLOCK_K != 0 else block * 0
                    if not EVEN_K:
                        group = tl.minimum(group, groups - 1)  # a K block may reach past the last group
                    scale = _load_per_row(scale_ptr, group, row_n, N)
                    acc += partial * scale
                    acc = _add_zero_points(
                        acc, x_sums, scale, zero_ptr, offset_ptr, group, row_n, N, FMT.zero_base, HAS_ZERO, HAS_OFFSET
                    )
    if SCALE_AT_END:
        group = tl.zeros((K_SLICES,), tl.int32)
        scale = _load_per_row(scale_ptr, group, row_n, N)
        acc *= scale
        acc = _add_zero_points(acc, x_sums, scale, zero_ptr, offset_ptr, group, row_n, N, FMT.zero_base, HAS_ZERO, HAS_OFFSET)
    y = tl.reshape(acc, (BLOCK_SIZE_N, BLOCK_SIZE_M)) if K_SLICES == 1 else tl.sum(acc, 0)
    _store_tile(out_ptr, bias_ptr, y, offs_m, offs_n, row_n, split, M, N, HAS_BIAS, IS_SPLIT_K)


@triton.jit(do_not_specialize=["size"])
def reduce_kernel(
    partials_ptr, bias_ptr, out_ptr, size, N, SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """y = sum over split-K partials float32 [SPLIT_K, size], in a fixed order, plus the bias, rounded once; size is M * N."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    valid = offs < size
    acc = tl.zeros((BLOCK_SIZE,), tl.float32)
    for s in tl.static_range(SPLIT_K):
        acc += tl.load(partials_ptr + s * size.to(tl.int64) + offs, mask=valid, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs % N, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["k_offset", "first_row", "end_row", "groups"])
def dequantize_kernel(
    codes_ptr, scale_ptr, zero_ptr, offset_ptr, aux_ptr, out_ptr,
    N, K, k_offset, first_row, end_row, groups,
    FMT: tl.constexpr, SCALE_BLOCK_K: tl.constexpr, PROMOTE_K: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr, BLOCK_SIZE_N: tl.constexpr,
):  # fmt: skip
    """Rows [first_row, end_row) of W as out [rows, K], computed in float32 and rounded once; program ids are (n, K block).

    Column k of `out` is packed column k_offset + k.
    """
    BLOCK_SIZE_K: tl.constexpr = 512 // FMT.low_bits
    WIDTH: tl.constexpr = BLOCK_SIZE_K if PROMOTE_K == BLOCK_SIZE_K else 32
    offs_n = first_row + tl.program_id(0) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    row_n = tl.minimum(offs_n, N - 1)
    block = tl.program_id(1)
    codes_tile = codes_ptr + block.to(tl.int64) * N * 16 + (row_n[:, None] * 16 + tl.arange(0, 16)[None, :])
    packed = tl.reshape(tl.load(codes_tile).to(tl.uint32, bitcast=True), (1, BLOCK_SIZE_N, 16))
    aux = _load_aux(aux_ptr, packed, block.to(tl.int64) * N + row_n[None, :, None], FMT)
    out_rows = out_ptr + (offs_n - first_row).to(tl.int64)[:, None] * K
    for f in tl.static_range(BLOCK_SIZE_K // WIDTH):
        group = tl.zeros((1,), tl.int32)
        if SCALE_BLOCK_K != 0:
            group += tl.minimum((block * BLOCK_SIZE_K + f * WIDTH) // SCALE_BLOCK_K, groups - 1)
        scale = _load_per_row(scale_ptr, group, row_n, N)
        w = _dequantize(packed, aux, f, WIDTH, BLOCK_SIZE_K, 1, BLOCK_SIZE_N, tl.float32, FMT)
        if HAS_ZERO:
            w += FMT.zero_base - _load_per_row(zero_ptr, group, row_n, N)
        w = w * scale
        if HAS_OFFSET:
            w += _load_per_row(offset_ptr, group, row_n, N)
        k = block * BLOCK_SIZE_K + f * WIDTH + tl.arange(0, WIDTH) - k_offset
        valid = (offs_n < end_row)[:, None] & ((k >= 0) & (k < K))[None, :]
        tl.store(out_rows + k[None, :], tl.reshape(w, (BLOCK_SIZE_N, WIDTH)).to(out_ptr.dtype.element_ty), mask=valid)
