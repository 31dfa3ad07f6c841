# mypy: ignore-errors
"""A projection of experts for many tokens: `wgmma_persistent` over the tiles that the routing leaves, with rows sorted by expert.

Rows of x are those of the pairs of token and slot, each expert's padded to whole tiles of tile_m rows, so that x and y are
matrices and a tile along M belongs to one expert. How many tiles there are, and of which experts, is read on the device: a CTA
takes every num_ctas-th tile. Where W holds a gate above "up", each consumer warpgroup has 64 rows of both against the same rows
of x, and the epilogue applies the gate to its accumulators.

`scheme` is a `traits.SchemeTraits`, `cfg` a `traits.WgmmaTraits` without tile_m_extra, whose raster_group_n counts tiles along M,
`experts` an `experts_traits.ExpertsTraits`. Tuples:
tables: blocks of `experts_sort`, their number at most, num_experts. sizes: stages per tile, tiles along N, 16-row tiles of one
expert's W, N. work: expert, its indices along N and M.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bitline.kernels.hopper.device.common import pipeline_barriers
from bitline.kernels.hopper.device.epilogue import scale_and_add_bias, store_through_shared
from bitline.kernels.hopper.device.experts_common import activate, gate_up, of_expert
from bitline.kernels.hopper.device.wgmma_persistent import (
    PINGPONG_ARRIVE,
    advance,
    allocate_buffers,
    async_load,
    finish_mma,
    load_x,
    mma_stage,
    mma_stage_pingpong,
    scale_factors,
    start_mma,
    zero_accumulators,
)


@gluon.jit
def num_tiles(tables, sizes):
    """Tiles that the routing leaves, along M and in all."""
    blocks_ptr, num_blocks, _num_experts = tables
    used = gl.load(blocks_ptr + 3 * num_blocks)
    return used, used * sizes[1]


@gluon.jit
def get_tile(tile, used, tables, sizes, cfg: gl.constexpr):
    """A tile's `work`, rasterized in groups along M, whose tiles may share an expert; the last tile's past the end."""
    blocks_ptr, _num_blocks, num_experts = tables
    tiles_n = sizes[1]
    tile = gl.maximum(gl.minimum(tile, used * tiles_n - 1), 0)
    group_tiles = cfg.raster_group_n * tiles_n
    group = tile // group_tiles
    r = tile - group * group_tiles
    group_m = gl.maximum(gl.minimum(used - group * cfg.raster_group_n, cfg.raster_group_n), 1)
    pid_m = group * cfg.raster_group_n + r % group_m
    expert = gl.minimum(gl.load(blocks_ptr + pid_m), num_experts - 1)  # where no tile is used, none of the routing's
    return expert, r // group_m, pid_m


@gluon.jit
def load_part(descs, bar, buffers, buffer, at: gl.constexpr, rows: gl.constexpr, row, weight_column, entry, scheme: gl.constexpr):
    """Issue the TMA loads of 16-row tiles `row` and on of W to those `at` and on of a buffer."""
    w_desc, scale_desc, zero_desc = descs
    _x, _x_extra, w, scales, zeros = buffers
    ENTRY: gl.constexpr = 16 if scheme.fp32_scales else 8  # int32 or float32 of a 16-row tile's scales
    async_load(w_desc, [row, weight_column], bar, w.index(buffer).slice(at, rows, dim=0))
    async_load(scale_desc, [row, entry * ENTRY], bar, scales.index(buffer).slice(at, rows, dim=0))
    if scheme.zero_points:
        async_load(zero_desc, [row, entry * 8], bar, zeros.index(buffer).slice(at, rows, dim=0))


@gluon.jit
def load_expert(
    descs, full, buffers, stage, k, work, sizes, scheme: gl.constexpr, cfg: gl.constexpr, experts: gl.constexpr
):  # fmt: skip
    """Issue the TMA loads of packed weights, scales and zero points of one stage; expect its bytes, those of x included."""
    expert, pid_n, _pid_m = work
    N64: gl.constexpr = cfg.num_consumer_warpgroups * cfg.n64_per_warpgroup
    INT32: gl.constexpr = 128 * scheme.planes
    ENTRY: gl.constexpr = 16 if scheme.fp32_scales else 8
    TABLE_BYTES: gl.constexpr = ENTRY * scheme.scales_per_k_block + (4 * scheme.scales_per_k_block if scheme.zero_points else 0)
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    num_n16 = sizes[2]
    bar = full.index(stage)
    mbarrier.expect(bar, K_BLOCKS * (cfg.tile_m * 128 + N64 * 16 * (INT32 + TABLE_BYTES)))
    for b in gl.static_range(K_BLOCKS):
        k_block = k * K_BLOCKS + b
        buffer = stage * K_BLOCKS + b
        if scheme.k_tiles_per_scale > 0:
            entry = k_block * scheme.scales_per_k_block // scheme.k_tiles_per_scale
        else:
            entry = k_block * 0
        if experts.gated:
            for half in gl.static_range(2):  # gate rows above those of up
                row = expert * num_n16 + half * (num_n16 // 2) + pid_n * (N64 * 2)
                load_part(descs, bar, buffers, buffer, half * (N64 * 2), N64 * 2, row, k_block * INT32, entry, scheme)
        else:
            row = expert * num_n16 + pid_n * (N64 * 4)
            load_part(descs, bar, buffers, buffer, 0, N64 * 4, row, k_block * INT32, entry, scheme)


@gluon.jit
def producer(
    x_desc, w_descs, buffers, barriers, tables, sizes, num_ctas, scheme: gl.constexpr, cfg: gl.constexpr, experts: gl.constexpr
):  # fmt: skip
    """The producer warp: load the stages of all of the CTA's tiles."""
    full, empty = barriers
    gdc_wait()
    used, tiles = num_tiles(tables, sizes)
    stage = 0
    phase = 1
    work = get_tile(gl.program_id(0), used, tables, sizes, cfg)
    for tile in range(gl.program_id(0), tiles, num_ctas):
        following = get_tile(tile + num_ctas, used, tables, sizes, cfg)  # read while this tile's stages are loaded
        for k in range(0, sizes[0]):
            mbarrier.wait(empty.index(stage), phase)
            load_expert(w_descs, full, buffers, stage, k, work, sizes, scheme, cfg, experts)
            load_x((x_desc, x_desc), full, buffers, stage, k, work[2], scheme, cfg)
            stage, phase = advance(stage, phase, cfg.stages)
        work = following


@gluon.jit
def store_rows(
    warpgroup: gl.constexpr, acc, y_desc, y_smem, pointers, work, sizes, scheme: gl.constexpr, cfg: gl.constexpr,
    experts: gl.constexpr,
):  # fmt: skip
    """Store a warpgroup's accumulators of a tile: global scale, bias, gate or activation, then TMA, which clips to N."""
    expert, pid_n, pid_m = work
    bias_ptr, alpha_ptr, alpha_units = pointers
    N = sizes[3]
    bias = bias_ptr + expert.to(gl.int64) * N
    alpha = of_expert(alpha_ptr, expert, alpha_units, 64)
    m = pid_m * cfg.tile_m
    if experts.gated:
        width = N // 2
        n = (pid_n * cfg.num_consumer_warpgroups + warpgroup) * 64
        gate = scale_and_add_bias(acc[0], n, bias, alpha, width, cfg.tile_m, scheme)
        up = scale_and_add_bias(acc[1], n + width, bias, alpha, N, cfg.tile_m, scheme)
        store_through_shared(gate_up(gate, up, experts), y_desc, y_smem.index(warpgroup), n, m, scheme)
    else:
        n = (pid_n * cfg.num_consumer_warpgroups + warpgroup) * (64 * cfg.n64_per_warpgroup)
        N64: gl.constexpr = cfg.n64_per_warpgroup
        for i in gl.static_range(N64):
            y = activate(scale_and_add_bias(acc[i], n + 64 * i, bias, alpha, N, cfg.tile_m, scheme), experts)
            smem = y_smem.index(warpgroup * cfg.n64_per_warpgroup + i)
            store_through_shared(y, y_desc, smem, n + 64 * i, m, scheme)


@gluon.jit
def expert_factors(expert, pointers, scheme: gl.constexpr):
    """`scale_factors` of an expert."""
    _bias_ptr, alpha_ptr, alpha_units = pointers
    factors = (0, 0)
    if scheme.folds_exponent_bias:
        factors = scale_factors(of_expert(alpha_ptr, expert, alpha_units, 64), scheme)
    return factors


@gluon.jit
def consumer(
    warpgroup: gl.constexpr, y_desc, buffers, y_smem, barriers, pointers, tables, sizes, num_ctas, scheme: gl.constexpr,
    cfg: gl.constexpr, experts: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: the MMAs and epilogues of all of the CTA's tiles, for its 64-row tiles of W."""
    full, empty = barriers
    LAST: gl.constexpr = cfg.num_consumer_warpgroups - 1
    FIRST: gl.constexpr = warpgroup if experts.gated else warpgroup * cfg.n64_per_warpgroup  # 64-row tile of W in the buffers
    SECOND: gl.constexpr = cfg.num_consumer_warpgroups + warpgroup if experts.gated else FIRST + 1
    gdc_wait()
    used, tiles = num_tiles(tables, sizes)
    cta = gl.program_id(0)
    num_stages = gl.maximum((tiles - cta + num_ctas - 1) // num_ctas, 0) * sizes[0]  # of all of the CTA's tiles
    count = 0
    stage = 0
    phase = 0
    if cfg.pingpong:
        gl.static_assert(cfg.num_consumer_warpgroups == 2)
        if (warpgroup == LAST) & (num_stages > 0):
            gl.inline_asm_elementwise(PINGPONG_ARRIVE[0], "=r,r", [num_ctas], dtype=gl.int32, is_pure=False, pack=1)
    work = get_tile(cta, used, tables, sizes, cfg)
    factors = expert_factors(work[0], pointers, scheme)
    for tile in range(cta, tiles, num_ctas):
        following = get_tile(tile + num_ctas, used, tables, sizes, cfg)  # read while this tile is multiplied
        acc = zero_accumulators(cfg)
        tokens = start_mma(acc)
        for _k in range(0, sizes[0]):
            count += 1
            mbarrier.wait(full.index(stage), phase)
            if cfg.pingpong:
                tokens = mma_stage_pingpong(
                    warpgroup, tokens, buffers, stage, factors, count, num_stages, num_ctas, scheme, cfg
                )  # fmt: skip
            else:
                tokens = mma_stage(FIRST, SECOND, tokens, buffers, stage, factors, scheme, cfg)
            acc = finish_mma(tokens)
            tokens = start_mma(acc)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = advance(stage, phase, cfg.stages)
        acc = finish_mma(tokens)
        if scheme.folds_exponent_bias:
            factors = expert_factors(following[0], pointers, scheme)  # read while this tile is stored
        store_rows(warpgroup, acc, y_desc, y_smem, pointers, work, sizes, scheme, cfg, experts)
        work = following
    tma.store_wait(0)


_SIZES = ["alpha_units", "N", "stages_per_tile", "tiles_n", "num_n16_tiles", "num_blocks", "num_experts", "num_ctas"]


@gluon.jit(do_not_specialize=_SIZES)
def experts_persistent(
    x_desc, w_desc, scale_desc, zero_desc, y_desc, bias_ptr, alpha_ptr, blocks_ptr, alpha_units, N, stages_per_tile, tiles_n,
    num_n16_tiles, num_blocks, num_experts, num_ctas, scheme: gl.constexpr, cfg: gl.constexpr, experts: gl.constexpr,
):  # fmt: skip
    """y[r] = f(x[r] @ W[e].T + bias[e]) of the rows r of each tile that has an expert e; other rows stay unwritten.

    Tensor maps: x_desc [rows, K] and y_desc [rows, N or N / 2] with boxes [tile_m, 64]; w_desc, scale_desc and zero_desc of all
    experts' W below each other, as those of `wgmma_persistent`, with boxes of half as many rows where it is gated. alpha: one a
    expert, so many times 256 bytes apart; bias [E, N]. blocks: of `experts_sort`, int32 [3, num_blocks] and how many are used.
    """
    N64: gl.constexpr = cfg.num_consumer_warpgroups * cfg.n64_per_warpgroup
    STORED: gl.constexpr = cfg.num_consumer_warpgroups if experts.gated else N64
    buffers = allocate_buffers(x_desc, w_desc, scale_desc, zero_desc, scheme, cfg)
    y_smem = gl.allocate_shared_memory(gl.float16 if scheme.fp16 else gl.bfloat16, [STORED, cfg.tile_m, 64], y_desc.layout)
    if cfg.pdl:
        gdc_launch_dependents()
    barriers = pipeline_barriers(cfg.stages, cfg.num_consumer_warpgroups)
    tables = (blocks_ptr, num_blocks, num_experts)
    sizes = (stages_per_tile, tiles_n, num_n16_tiles, N)
    w_descs, pointers = (w_desc, scale_desc, zero_desc), (bias_ptr, alpha_ptr, alpha_units)
    # fmt: off
    gl.warp_specialize([
        (consumer, (0, y_desc, buffers, y_smem, barriers, pointers, tables, sizes, num_ctas, scheme, cfg, experts)),
        (consumer, (1, y_desc, buffers, y_smem, barriers, pointers, tables, sizes, num_ctas, scheme, cfg, experts)),
        (producer, (x_desc, w_descs, buffers, barriers, tables, sizes, num_ctas, scheme, cfg, experts)),
    ], [4, 1], [cfg.consumer_registers, cfg.producer_registers])
    # fmt: on
