# mypy: disable-error-code="no-untyped-def"
"""Device code of experts: the fused GEMM of blocks of (token, slot) pairs, the gate in its epilogue, and the weighted sum.

A pair is t * k + j, slot j of token t. The GEMM is that of device/gemm.py for the weight of a block's expert, with the rows of x
gathered by pair; rows of a weight that holds a gate and "up" are read in two halves, so that a program has both of a channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitline.kernels.triton.device.experts_gate import activate, gate_up
from bitline.kernels.triton.device.experts_sort import load_experts
from bitline.kernels.triton.device.gemm import _add_zero_points, _dequantize, _load_aux, _load_per_row, _load_x, _mma


@triton.jit
def _of_expert(ptr, expert, stride):
    """The expert's part of a stack; stride in elements. Parts start at multiples of 256 bytes."""
    return ptr + tl.multiple_of(expert.to(tl.int64) * stride, 16)


@triton.jit
def _accumulate(
    x_rows, valid_m, row_n, codes_ptr, scale_ptr, zero_ptr, offset_ptr, aux_ptr, perm_ptr, N, K, k_offset, k_blocks, groups,
    FMT: tl.constexpr, SCALE_BLOCK_K: tl.constexpr, PROMOTE_K: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_PERM: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, MASK_M: tl.constexpr, DTYPE: tl.constexpr,
    K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Rows row_n of W times rows of x, float32 [BLOCK_SIZE_N, BLOCK_SIZE_M]; arguments as in `gemm.gemm_kernel`."""
    BLOCK_SIZE_K: tl.constexpr = 512 // FMT.low_bits
    SCALE_AT_END: tl.constexpr = SCALE_BLOCK_K == 0 and PROMOTE_K == BLOCK_SIZE_K
    NEEDS_X_SUMS: tl.constexpr = HAS_ZERO or HAS_OFFSET
    WIDTH: tl.constexpr = BLOCK_SIZE_K if PROMOTE_K == BLOCK_SIZE_K else 32  # columns per MMA
    slices = tl.arange(0, K_SLICES)
    offs_k = tl.arange(0, WIDTH)[None, :, None]
    codes_tile = codes_ptr + (row_n[None, :, None] * 16 + tl.arange(0, 16)[None, None, :])
    ones = tl.full((K_SLICES, BLOCK_SIZE_N, WIDTH), 1.0, tl.float32).to(DTYPE)
    zeros = tl.zeros((K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M), tl.float32)
    acc = zeros
    partial = zeros
    x_sums = zeros
    for c in range(0, k_blocks, K_SLICES):
        block = c + slices
        if not EVEN_K:
            block = tl.minimum(block, k_blocks - 1)  # past the end x is zero
        packed = tl.load(codes_tile + block.to(tl.int64)[:, None, None] * (N * 16)).to(tl.uint32, bitcast=True)
        aux = _load_aux(aux_ptr, packed, (block.to(tl.int64)[:, None] * N + row_n[None, :])[:, :, None], FMT)
        for f in tl.static_range(BLOCK_SIZE_K // WIDTH):
            k = (c + slices)[:, None, None] * BLOCK_SIZE_K + f * WIDTH + offs_k
            x = _load_x(x_rows, perm_ptr, k, k_blocks * BLOCK_SIZE_K, valid_m, K, k_offset, HAS_PERM, EVEN_K, MASK_M)
            w = _dequantize(packed, aux, f, WIDTH, BLOCK_SIZE_K, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
            if not SCALE_AT_END and (f * WIDTH) % PROMOTE_K == 0:
                partial = zeros
                x_sums = zeros
            partial = _mma(w, x, partial, K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M, UPCAST)
            if NEEDS_X_SUMS:
                x_sums = _mma(ones, x, x_sums, K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M, UPCAST)
            if not SCALE_AT_END and ((f + 1) * WIDTH) % PROMOTE_K == 0:
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
        acc = partial * scale
        acc = _add_zero_points(acc, x_sums, scale, zero_ptr, offset_ptr, group, row_n, N, FMT.zero_base, HAS_ZERO, HAS_OFFSET)
    return tl.reshape(acc, (BLOCK_SIZE_N, BLOCK_SIZE_M)) if K_SLICES == 1 else tl.sum(acc, 0)


@triton.jit
def _block_of_pairs(
    block, index_ptr, sorted_ptr, blocks_ptr, num_blocks, num_experts, SORTED: tl.constexpr, BLOCK_SIZE_M: tl.constexpr
):
    """(expert, pairs [BLOCK_SIZE_M], which of them are the block's; the others repeat its last).

    SORTED: of `blocks_kernel`, else block b is pair b alone.
    """
    if SORTED:
        expert = tl.load(blocks_ptr + block)
        start = tl.load(blocks_ptr + num_blocks + block)
        end = tl.load(blocks_ptr + 2 * num_blocks + block)
        at = start + tl.arange(0, BLOCK_SIZE_M)
        pair = tl.load(sorted_ptr + tl.minimum(at, end - 1), mask=expert < num_experts, other=0)
    else:
        expert = load_experts(index_ptr, block, block >= 0, num_experts)
        end = block + 1
        at = block + tl.arange(0, BLOCK_SIZE_M)
        pair = tl.minimum(at, block)
    return expert, pair, at < end


_STRIDES = ["codes_stride", "scale_stride", "zero_stride", "offset_stride", "aux_stride", "perm_stride"]
_SIZES = ["k_offset", "k_blocks", "groups", "num_blocks", "num_experts", "pairs_per_x", "tiles_n"]


@triton.jit(do_not_specialize=_STRIDES + _SIZES)
def experts_gemm_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, offset_ptr, aux_ptr, perm_ptr, bias_ptr, out_ptr, index_ptr, sorted_ptr, blocks_ptr,
    codes_stride, scale_stride, zero_stride, offset_stride, aux_stride, perm_stride,
    N, K, k_offset, k_blocks, groups, num_blocks, num_experts, pairs_per_x, tiles_n,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SORTED: tl.constexpr,
    FMT: tl.constexpr, SCALE_BLOCK_K: tl.constexpr, PROMOTE_K: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_PERM: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_M: tl.constexpr,
):  # fmt: skip
    """out[p] = f(x[p // pairs_per_x] @ W[e].T + bias[e]) of every pair p with an expert e; rows of other pairs stay unwritten.

    Tensors of the weights are stacks [E, ...] of those of `gemm.gemm_kernel`, with their strides; index [pairs]; sorted, blocks:
    of experts_sort, where SORTED. Program ids are block * tiles_n + tile of N. f: a gate of two halves of N rows where GATED, an
    activation, or with the empty ACTIVATION nothing. out [pairs, N or N / 2].
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    CHANNELS: tl.constexpr = BLOCK_SIZE_N // HALVES
    block = tl.program_id(0) // tiles_n
    expert, pair, valid_pair = _block_of_pairs(
        block, index_ptr, sorted_ptr, blocks_ptr, num_blocks, num_experts, SORTED, BLOCK_SIZE_M
    )
    if expert >= num_experts:
        return
    # Rows of W past the end repeat the last one; only the store is masked.
    width = N // HALVES
    first_channel = tl.program_id(0) % tiles_n * CHANNELS
    row = tl.arange(0, BLOCK_SIZE_N)
    row_n = tl.minimum(first_channel + row % CHANNELS, width - 1) + row // CHANNELS * width
    MASK_M: tl.constexpr = BLOCK_SIZE_M <= 16  # as in gemm_kernel
    valid_m = valid_pair[None, None, :] if MASK_M else tl.full((1, 1, BLOCK_SIZE_M), True, tl.int1)
    x_rows = x_ptr + (pair // pairs_per_x).to(tl.int64)[None, None, :] * K
    y = _accumulate(
        x_rows, valid_m, row_n, _of_expert(codes_ptr, expert, codes_stride), _of_expert(scale_ptr, expert, scale_stride),
        _of_expert(zero_ptr, expert, zero_stride), _of_expert(offset_ptr, expert, offset_stride),
        _of_expert(aux_ptr, expert, aux_stride), _of_expert(perm_ptr, expert, perm_stride), N, K, k_offset, k_blocks, groups,
        FMT, SCALE_BLOCK_K, PROMOTE_K, HAS_ZERO, HAS_OFFSET, HAS_PERM, EVEN_K, UPCAST, MASK_M, x_ptr.dtype.element_ty,
        K_SLICES, BLOCK_SIZE_N, BLOCK_SIZE_M,
    )  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias_ptr + expert.to(tl.int64) * N + row_n).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, CHANNELS, BLOCK_SIZE_M)), (1, 2, 0)))
        y = gate_up(gate, up, ACTIVATION, ALPHA, LIMIT)
    else:
        y = activate(y, ACTIVATION)
    channel = first_channel + tl.arange(0, CHANNELS)
    offs = pair.to(tl.int64)[None, :] * width + channel[:, None]
    tl.store(out_ptr + offs, y.to(out_ptr.dtype.element_ty), mask=valid_pair[None, :] & (channel < width)[:, None])


@triton.jit(do_not_specialize=["num_experts", "top_k", "tiles_n"])
def weighted_sum_kernel(
    y_ptr, index_ptr, weights_ptr, rows_ptr, out_ptr, num_experts, top_k, tiles_n,
    N: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over j of weights[t, j] * y[row of pair t * top_k + j], in the order of j in float32.

    y [rows, N]; index, weights [T, top_k]; out [T, N]. Program ids are t * tiles_n + tile of N. A pair's row is rows[pair] with
    HAS_ROWS, else its number. A pair without an expert counts as zero and is not read.
    """
    token = (tl.program_id(0) // tiles_n).to(tl.int64)
    offs = tl.program_id(0) % tiles_n * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    acc = tl.zeros((BLOCK_SIZE,), tl.float32)
    for j in range(0, top_k):
        pair = token * top_k + j
        exists = load_experts(index_ptr, pair, pair >= 0, num_experts) < num_experts
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        row = pair
        if HAS_ROWS:
            row = tl.load(rows_ptr + pair, mask=exists, other=0).to(tl.int64)
        y = tl.load(y_ptr + row * N + offs, mask=(offs < N) & exists, other=0.0).to(tl.float32)
        acc += tl.where(exists, weight * y, 0.0)
    tl.store(out_ptr + token * N + offs, acc.to(out_ptr.dtype.element_ty), mask=offs < N)
