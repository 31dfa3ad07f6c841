# mypy: ignore-errors
"""A projection of experts for few tokens each: `small_m_pipelined` for blocks of up to 32 pairs of one expert.

A CTA multiplies 16 * n16_per_cta rows of an expert's W by rows of x, those of a block of pairs, which it gathers by cp.async. It
reads on the device which these are. Where W holds a gate above "up", a warp's two tiles of W are one of each, and the gate is
applied to the sums in the epilogue.

`scheme` is a `traits.SchemeTraits`, `cfg` a `traits.SmallMTraits` with stage_x and split_k = 1, `experts` an
`experts_traits.ExpertsTraits`. Other tuples: tables: index, sorted, blocks, num_blocks, num_experts (see `experts_common`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bitline.kernels.hopper.device.common import GRID_DEPENDENCY_WAIT, emit
from bitline.kernels.hopper.device.experts_common import activate, block_of_pairs, gate_up, of_expert, pairs_of
from bitline.kernels.hopper.device.small_m_pipelined import (
    SMEM_BASE,
    allocate_stages,
    channel_scales,
    fill_pipeline,
    main_loop,
    share_accumulators,
    stage_addresses,
    sum_k_slices,
    thread_position,
    weight_source,
)


@gluon.jit
def gathered_x(
    x_ptr, smem_slice, slice_warp, k_slice, lane, block, pairs, pairs_per_x, K, experts: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Where a lane's copies of x go in stage 0, and `x_source`: rows of x are those of the block's pairs."""
    X: gl.constexpr = cfg.k_tile_x_bytes
    WARPS: gl.constexpr = cfg.warps_per_k_slice
    VECTORS: gl.constexpr = cfg.x_vectors_per_lane
    first_pair, count = pairs
    write = ()
    offsets = ()
    for j in gl.static_range(VECTORS):
        row = (slice_warp + j * WARPS) % (2 * cfg.m8_tiles) * 4 + lane // 8
        x_row = pairs_of(row, block, first_pair, count, experts) // pairs_per_x
        write = write + (smem_slice + row * 128 + ((lane % 8) ^ (row % 2)) * 16,)
        offsets = offsets + (x_row * (2 * K) + (lane % 8) * 16 + k_slice * X,)
    bytes_left = 2 * K - (lane % 8) * 16 - k_slice * X
    return write, (x_ptr.to(gl.int64), offsets, bytes_left)


@gluon.jit
def scaled(y, n, bias_ptr, alpha_ptr, N, scheme: gl.constexpr):
    """Sums of rows n of an expert's W times its global scale, plus its bias."""
    if scheme.has_global_scale:
        y *= gl.load(alpha_ptr)
    if scheme.has_bias:
        y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    return y


@gluon.jit
def store_pairs(
    smem_base, tid, first_n16, block, pairs, output, L: gl.constexpr, scheme: gl.constexpr, cfg: gl.constexpr,
    experts: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[pair] of the block's pairs from the shared accumulators: K slices added, global scale, bias, gate or activation."""
    WARPS: gl.constexpr = cfg.warps_per_k_slice
    THREADS: gl.constexpr = 32 * num_warps
    HALVES: gl.constexpr = 2 if experts.gated else 1
    TILES: gl.constexpr = cfg.n16_per_warp // HALVES  # of a warp, of output channels
    TILE_ACC: gl.constexpr = 4 * cfg.m8_tiles  # accumulators of a thread and tile
    NUM_ACC: gl.constexpr = cfg.n16_per_warp * TILE_ACC
    ELEMENTS: gl.constexpr = TILES * TILE_ACC * WARPS * 32  # of out, per CTA
    bias_ptr, alpha_ptr, out_ptr, N = output
    first_pair, count = pairs
    width = N // HALVES
    for j in gl.static_range((ELEMENTS + THREADS - 1) // THREADS):
        e = tid + j * THREADS
        at = e // (32 * WARPS)
        i = at % TILE_ACC
        lane = e % 32
        n = (first_n16 + e // 32 % WARPS * TILES + at // TILE_ACC) * 16 + lane // 4 + i % 4 // 2 * 8
        m = i // 4 * 8 + lane % 4 * 2 + i % 2
        y = scaled(sum_k_slices(e, smem_base, NUM_ACC, L, cfg, num_warps), n, bias_ptr, alpha_ptr, N, scheme)
        if experts.gated:
            other = sum_k_slices(e + TILE_ACC * 32 * WARPS, smem_base, NUM_ACC, L, cfg, num_warps)
            y = gate_up(y, scaled(other, n + width, bias_ptr, alpha_ptr, N, scheme), experts)
        else:
            y = activate(y, experts)
        valid = (e < ELEMENTS) & (m < count) & (n < width)
        pair = pairs_of(m, block, first_pair, count, experts)
        gl.store(out_ptr + (pair.to(gl.int64) * width + n), y.to(gl.float16 if scheme.fp16 else gl.bfloat16), mask=valid)


@gluon.jit
def project_block(
    x_ptr, w_ptr, scale_ptr, zero_ptr, block, first_n16, pairs, output, pairs_per_x, K, num_k_blocks, half_tiles, scales_per_row,
    num_iters, scheme: gl.constexpr, cfg: gl.constexpr, experts: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The CTA's rows of W of one expert times the block's rows of x. half_tiles: 16-row tiles of the gate."""
    THREADS: gl.constexpr = 32 * num_warps
    HALVES: gl.constexpr = 2 if experts.gated else 1
    NUM_ACC: gl.constexpr = cfg.n16_per_warp * 4 * cfg.m8_tiles
    L: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    allocation = allocate_stages(cfg, num_warps)
    tid, lane, g, q, k_slice, slice_warp = thread_position(L, cfg, num_warps)
    n16_tile = first_n16 + slice_warp * (cfg.n16_per_warp // HALVES)
    source = weight_source(w_ptr, scale_ptr, zero_ptr, n16_tile, num_k_blocks, scales_per_row, lane, scheme)
    if experts.gated:  # the warp's second tile is "up" of the same channels
        w_addr, w_stride, scale_addr, zero_addr, scale_row, per_row, k_blocks = source
        source = (w_addr, w_stride * half_tiles, scale_addr, zero_addr, scale_row, per_row * half_tiles, k_blocks)
    smem_base = gl.inline_asm_elementwise(SMEM_BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    smem_slice = smem_base + k_slice * cfg.slice_bytes
    write, read = stage_addresses(smem_slice, slice_warp, lane, g, q, scheme, cfg)
    x_read = smem_slice + g * 128 + ((q * 2) ^ (g % 2)) * 16
    x_write, x_source = gathered_x(x_ptr, smem_slice, slice_warp, k_slice, lane, block, pairs, pairs_per_x, K, experts, cfg)
    smem = (write, x_write, read, x_read)
    channel = channel_scales(scale_ptr, zero_ptr, source, g, scheme, cfg)
    x_at = fill_pipeline(smem, source, x_source, k_slice, num_iters, lane, scheme, cfg)
    acc = ()
    for _i in gl.static_range(NUM_ACC):
        acc = acc + (gl.zeros([THREADS], gl.float32, L),)
    acc = main_loop(acc, x_at, smem, source, x_source, channel, k_slice, k_slice, num_iters, lane, scheme, cfg, num_warps)
    share_accumulators(acc, allocation, smem_base, tid, NUM_ACC, THREADS)
    store_pairs(smem_base, tid, first_n16, block, pairs, output, L, scheme, cfg, experts, num_warps)


_STRIDES = ["w_units", "scale_units", "zero_units", "alpha_units"]
_SIZES = ["N", "K", "num_k_blocks", "num_n16_tiles", "scales_per_row", "num_iters", "num_blocks", "num_experts", "pairs_per_x",
          "tiles_n"]  # fmt: skip


@gluon.jit(do_not_specialize=_STRIDES + _SIZES)
def experts_small_m(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, alpha_ptr, out_ptr, index_ptr, sorted_ptr, blocks_ptr,
    w_units, scale_units, zero_units, alpha_units, N, K, num_k_blocks, num_n16_tiles, scales_per_row, num_iters, num_blocks,
    num_experts, pairs_per_x, tiles_n, scheme: gl.constexpr, cfg: gl.constexpr, experts: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[p] = f(x[p // pairs_per_x] @ W[e].T + bias[e]) of every pair p with an expert e; other rows stay unwritten.

    W, scales, zero points and alpha: stacks of those of `small_m_pipelined`, whose experts are so many times 256 bytes apart;
    bias [E, N]. Program ids are block * tiles_n + tile of N. f: a gate of two halves of N rows, which are multiples of 16, an
    activation, or nothing. out [pairs, N or N / 2] in x's dtype.
    """
    HALVES: gl.constexpr = 2 if experts.gated else 1
    TILES: gl.constexpr = cfg.n16_per_warp // HALVES * cfg.warps_per_k_slice  # of output channels
    if experts.waits_first:  # the routing may be what the previous kernel writes
        emit(GRID_DEPENDENCY_WAIT)
    block = gl.program_id(0) // tiles_n
    expert, first_pair, count = block_of_pairs(block, index_ptr, sorted_ptr, blocks_ptr, num_blocks, num_experts, experts)
    if expert < num_experts:
        half_tiles = num_n16_tiles // HALVES
        first_n16 = gl.minimum(gl.program_id(0) % tiles_n * TILES, half_tiles - TILES)  # the last repeats rows
        w = of_expert(w_ptr, expert, w_units, 64)
        scale = of_expert(scale_ptr, expert, scale_units, 64)
        zero = of_expert(zero_ptr, expert, zero_units, 128)
        output = (bias_ptr + expert.to(gl.int64) * N, of_expert(alpha_ptr, expert, alpha_units, 64), out_ptr, N)
        project_block(
            x_ptr, w, scale, zero, block, first_n16, (first_pair, count), output, pairs_per_x, K, num_k_blocks, half_tiles,
            scales_per_row, num_iters, scheme, cfg, experts, num_warps,
        )  # fmt: skip
