# mypy: disable-error-code="no-untyped-def"

"""Device code of the weight-only kernels: one source for NVIDIA, AMD and Intel, no inline assembly, no atomics.

Packed layout: `codes` int32 [chunks, N, 16]. A chunk is 512 / F.bits columns of K; word j of a row holds, in field f of its
low half (bits f*F.bits) and of its high half (bits 16 + f*F.bits), the codes of columns 32*f + 2*j and 32*f + 2*j + 1. Of
codes of 3, 5 and 6 bits these are the low 2 and 4 bits; `side` has the others.
So a tile of rows is one contiguous run of memory, one mask takes a pair of neighbouring columns out of each word, and
the pair lands in one register, as matrix instructions want it: weights never pass through shared memory as 16-bit
numbers (read in the machine code for sm_90: 2.8 to 3.5 instructions per 4-bit weight).

Codes as numbers that 16 bits hold exactly are multiplied first; the sum over a span (the columns of a chunk that share a
scale) is scaled in float32. Zero points and offsets multiply the span's sum of x, which a product with ones gives in the same
layout. One-byte scales of 16 or 32 columns (`side` [chunks, N, 32 // F.fine], a word with one byte for each field) multiply
the numbers themselves, which is exact too; then the sum over all of K is scaled, by one factor for each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitline.kernels.triton.device.dequant import chunk as decode_chunk
from bitline.kernels.triton.device.dequant import columns as decode_columns
from bitline.kernels.triton.device.dequant import high_bits


@triton.jit
def _dot(w, x, acc, S: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, UPCAST: tl.constexpr):
    """acc [S, BN, BM] + w [S, BN, C] @ x [S, C, BM]. UPCAST: in float32, as the interpreter cannot multiply bfloat16.

    One slice is multiplied as matrices, for which there are larger instructions than for a batch of them.
    """
    if UPCAST:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    if S == 1:
        w2 = tl.reshape(w, (BN, w.shape[2]))
        x2 = tl.reshape(x, (x.shape[1], BM))
        return tl.reshape(tl.dot(w2, x2, tl.reshape(acc, (BN, BM)), input_precision="ieee"), (1, BN, BM))
    else:
        return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def _per_row(ptr, group, row, N):
    """Values of a [groups, N] table for groups [S] and rows [BN], float32 [S, BN, 1]."""
    return tl.load(ptr + group[:, None] * N + row[None, :]).to(tl.float32)[:, :, None]


@triton.jit
def _side(ptr, words, at, F: tl.constexpr):
    """What comes with the words of rows and chunks `at` = chunk * N + row, [S, BN, 1]: see `decode_device`."""
    if F.table:
        return ptr
    elif F.fine > 0:
        each = tl.arange(0, 32 // F.fine)[None, None, :]
        return tl.load(ptr + at * (32 // F.fine) + each, eviction_policy="evict_first").to(tl.uint32)
    elif F.high > 0:
        return high_bits(tl.load(ptr + at * 16 + tl.arange(0, 16)[None, None, :], eviction_policy="evict_first").to(tl.uint32), F)
    else:
        return words


@triton.jit
def _correction(
    scale, zero_ptr, offset_ptr, group, row, N, ADJUST: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr
):
    """What the sum of x over a span is multiplied by: scale * (ADJUST - zero) + offset, float32 [S, BN, 1]."""
    if HAS_ZERO:
        value = scale * (ADJUST - _per_row(zero_ptr, group, row, N))
        if HAS_OFFSET:
            value += _per_row(offset_ptr, group, row, N)
        return value
    else:
        return _per_row(offset_ptr, group, row, N)


@triton.jit(do_not_specialize=["M", "shift", "chunks", "groups", "chunks_per_split"])
def gemm_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, offset_ptr, side_ptr, perm_ptr, bias_ptr, out_ptr,
    M, N, K, shift, chunks, groups, chunks_per_split,
    F: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_PERM: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum_k x[m, k] W[n, k] for a tile of BN rows of W and BM rows of x; program ids are (n, m, split).

    x [M, K]; scale, zero, offset [groups, N]; perm int32 [packed K] (column of x, or K where there is none).
    GROUP: columns per scale, a multiple of 32, or 0 where one scale serves a row. SPAN: columns whose sum is scaled at a time;
    with GROUP 0 and a whole chunk that is done once, at the end. S chunks are worked on at a time and added up at the end (by
    different warps, where S is the number of warps). EVEN: no column needs a mask.
    With SPLIT, out is float32 [splits, M, N] and `reduce_kernel` finishes; else out is y [M, N] with the bias added.
    """
    POLICY: tl.constexpr = "evict_first"
    CHUNK: tl.constexpr = 512 // F.bits
    ONCE: tl.constexpr = GROUP == 0 and SPAN == CHUNK
    CORRECTED: tl.constexpr = HAS_ZERO or HAS_OFFSET
    WIDTH: tl.constexpr = CHUNK if SPAN == CHUNK else 32
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Rows past the end repeat the last one; only the store is masked.
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(rows, N - 1)
    cols = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    first = split * chunks_per_split
    last = tl.minimum(first + chunks_per_split, chunks)
    slices = tl.arange(0, S)
    k_in = tl.arange(0, WIDTH)[None, :, None]
    # Rows of x past M: a narrow tile masks them, since repeating one row in every program is slow (28672x4096, M=1: 35 us
    # against 25); a wide one repeats the last, since its masks are slower (M=256: 260 us against 197).
    MASKED: tl.constexpr = BM <= 16
    col = cols if MASKED else tl.minimum(cols, M - 1)
    col_ok = (cols < M)[None, None, :] if MASKED else tl.full((1, 1, BM), True, tl.int1)
    x_rows = x_ptr + col.to(tl.int64)[None, None, :] * K
    tile = codes_ptr + (row[None, :, None] * 16 + tl.arange(0, 16)[None, None, :])
    ones = tl.full((S, BN, WIDTH), 1.0, tl.float32).to(DTYPE)
    none = tl.zeros((S, BN, BM), tl.float32)
    acc = tl.zeros((S, BN, BM), tl.float32)
    part = tl.zeros((S, BN, BM), tl.float32)
    sums = tl.zeros((S, BN, BM), tl.float32)
    for c in range(first, last, S):
        chunk = c + slices
        if not EVEN:
            chunk = tl.minimum(chunk, chunks - 1)  # past the end x is zero
        words = tl.load(tile + chunk.to(tl.int64)[:, None, None] * (N * 16), eviction_policy=POLICY).to(tl.uint32, bitcast=True)
        side = _side(side_ptr, words, (chunk.to(tl.int64)[:, None] * N + row[None, :])[:, :, None], F)
        for f in tl.static_range(CHUNK // WIDTH):
            k = (c + slices)[:, None, None] * CHUNK + f * WIDTH + k_in
            if EVEN:
                if MASKED:
                    x = tl.load(x_rows + k, mask=col_ok, other=0.0)
                else:
                    x = tl.load(x_rows + k)
            else:
                inside = k < last * CHUNK
                if HAS_PERM:
                    k = tl.load(perm_ptr + k, mask=inside, other=K)
                else:
                    k -= shift
                x = tl.load(x_rows + k, mask=col_ok & inside & (k >= 0) & (k < K), other=0.0)
            if WIDTH == CHUNK:
                w = decode_chunk(words, side, S, BN, DTYPE, F)
            else:
                w = decode_columns(words, side, f, S, BN, DTYPE, F)
            if ONCE:
                acc = _dot(w, x, acc, S, BN, BM, UPCAST)
                if CORRECTED:
                    sums = _dot(ones, x, sums, S, BN, BM, UPCAST)
            else:
                if (f * WIDTH) % SPAN == 0:
                    part = none
                    sums = none
                part = _dot(w, x, part, S, BN, BM, UPCAST)
                if CORRECTED:
                    sums = _dot(ones, x, sums, S, BN, BM, UPCAST)
                if ((f + 1) * WIDTH) % SPAN == 0:
                    group = (chunk * CHUNK + f * WIDTH) // GROUP if GROUP != 0 else chunk * 0
                    if not EVEN:
                        group = tl.minimum(group, groups - 1)  # a chunk may reach past the last group
                    scale = _per_row(scale_ptr, group, row, N)
                    acc += part * scale
                    if CORRECTED:
                        acc += sums * _correction(
                            scale, zero_ptr, offset_ptr, group, row, N, F.adjust, HAS_ZERO, HAS_OFFSET
                        )  # fmt: skip
    if ONCE:
        group = tl.zeros((S,), tl.int32)
        scale = _per_row(scale_ptr, group, row, N)
        acc *= scale
        if CORRECTED:
            acc += sums * _correction(scale, zero_ptr, offset_ptr, group, row, N, F.adjust, HAS_ZERO, HAS_OFFSET)
    if S == 1:
        y = tl.reshape(acc, (BN, BM))
    else:
        y = tl.sum(acc, 0)
    at = cols.to(tl.int64)[None, :] * N + rows[:, None]
    ok = (cols < M)[None, :] & (rows < N)[:, None]
    if SPLIT:
        tl.store(out_ptr + split.to(tl.int64) * M * N + at, y, mask=ok)
    else:
        if HAS_BIAS:
            y += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["size"])
def reduce_kernel(parts_ptr, bias_ptr, out_ptr, size, N, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """y = sum over splits of float32 [splits, size] in their order, plus the bias, rounded once; size is M*N."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLITS):
        acc += tl.load(parts_ptr + s * size.to(tl.int64) + at, mask=ok, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + at % N, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["shift", "first_row", "last_row", "groups"])
def dequantize_kernel(
    codes_ptr, scale_ptr, zero_ptr, offset_ptr, side_ptr, out_ptr,
    N, K, shift, first_row, last_row, groups,
    F: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows [first_row, last_row) of W as out [rows, K], computed in float32 and rounded once; program ids are (n, chunk).

    Column k of `out` is packed column shift + k.
    """
    CHUNK: tl.constexpr = 512 // F.bits
    WIDTH: tl.constexpr = CHUNK if SPAN == CHUNK else 32
    rows = first_row + tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(rows, N - 1)
    c = tl.program_id(1)
    tile = codes_ptr + c.to(tl.int64) * N * 16 + (row[:, None] * 16 + tl.arange(0, 16)[None, :])
    words = tl.reshape(tl.load(tile).to(tl.uint32, bitcast=True), (1, BN, 16))
    side = _side(side_ptr, words, c.to(tl.int64) * N + row[None, :, None], F)
    out_rows = out_ptr + (rows - first_row).to(tl.int64)[:, None] * K
    for f in tl.static_range(CHUNK // WIDTH):
        group = tl.zeros((1,), tl.int32)
        if GROUP != 0:
            group += tl.minimum((c * CHUNK + f * WIDTH) // GROUP, groups - 1)
        scale = _per_row(scale_ptr, group, row, N)
        if WIDTH == CHUNK:
            w = decode_chunk(words, side, 1, BN, tl.float32, F)
        else:
            w = decode_columns(words, side, f, 1, BN, tl.float32, F)
        if HAS_ZERO:
            w += F.adjust - _per_row(zero_ptr, group, row, N)
        w = w * scale
        if HAS_OFFSET:
            w += _per_row(offset_ptr, group, row, N)
        k = c * CHUNK + f * WIDTH + tl.arange(0, WIDTH) - shift
        ok = (rows < last_row)[:, None] & ((k >= 0) & (k < K))[None, :]
        tl.store(out_rows + k[None, :], tl.reshape(w, (BN, WIDTH)).to(out_ptr.dtype.element_ty), mask=ok)
