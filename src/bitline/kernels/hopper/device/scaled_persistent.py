# mypy: ignore-errors
"""y = quantized x times quantized W for larger M, by wgmma on the codes: persistent and warp-specialized; W is operand A.

A producer warp loads codes of W and x by TMA, 128 columns a stage; each consumer warpgroup multiplies 64 rows of W with tile_m
rows of x, or with tile_m + tile_m_extra as two MMAs. Tensor cores add E4M3 products with few bits, so the product of every 128
columns is added to float32 accumulators, scaled first where scales change along K; the other warpgroup's MMAs run meanwhile, for
which named barriers make the warpgroups take turns (cfg.pingpong): else both wait for their MMAs at the same time.
int8 products are exact in int32. Accumulators are scaled before the epilogue, which stores them or, of a stream-K tile, reduces
partials: `epilogue`. The tile scheduler is that of `wgmma_persistent`.

`scheme` is a `scaled.ScaledTraits`, `cfg` a `traits.WgmmaTraits`. Tuples:
schedule, work: see `wgmma_persistent`. space: scales and zero points of x, entries per row of the scales, M.
scales: weight scales, column sums. layout: rows of a scale block, row offset, entries per row of the weight's scales.
buffers: x, extra x, W, scales of x, of extra x.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bitline.kernels.hopper.device.common import pipeline_barriers
from bitline.kernels.hopper.device.epilogue import epilogue
from bitline.kernels.hopper.device.scaled_small_m import reinterpret, weight_scale
from bitline.kernels.hopper.device.wgmma_persistent import (
    advance,
    async_load,
    get_work,
    give_first_turn,
    pass_turn,
    produce,
    stream_k_range,
    take_turn,
)

SCALE_BOX = gl.constexpr(32)  # scales of x are loaded in multiples of 128 bytes


# ---- producer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_weights(w_desc, full, buffers, stage, k, pid_n, num_k_blocks, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of W of one stage; expect the bytes of all of the stage."""
    PARTS: gl.constexpr = cfg.num_consumer_warpgroups
    X_ROWS: gl.constexpr = cfg.tile_m + cfg.tile_m_extra
    mbarrier.expect(full.index(stage), (64 * PARTS + X_ROWS) * 128 + (4 * X_ROWS if scheme.scaled_in_groups else 0))
    for i in gl.static_range(PARTS):
        block = (pid_n * PARTS + i) * num_k_blocks + k
        async_load(w_desc, [block * 64, 0], full.index(stage), buffers[2].index(stage * PARTS + i))


@gluon.jit
def load_x(descs, full, buffers, stage, k, pid_m, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of x of one stage, and of its scales where they change along K."""
    x_desc, x_extra_desc, x_scale_desc, x_extra_scale_desc = descs
    x, x_extra, _w, x_scales, x_extra_scales = buffers
    m = pid_m * (cfg.tile_m + cfg.tile_m_extra)
    async_load(x_desc, [m, k * 128], full.index(stage), x.index(stage))
    if cfg.tile_m_extra > 0:
        async_load(x_extra_desc, [m + cfg.tile_m, k * 128], full.index(stage), x_extra.index(stage))
    if scheme.scaled_in_groups:
        group = k // scheme.k_blocks_per_x_scale
        async_load(x_scale_desc, [group, m], full.index(stage), x_scales.index(stage))
        if cfg.tile_m_extra > 0:
            async_load(x_extra_scale_desc, [group, m + cfg.tile_m], full.index(stage), x_extra_scales.index(stage))


@gluon.jit
def producer(x_descs, w_descs, buffers, barriers, schedule, scheme: gl.constexpr, cfg: gl.constexpr):
    """The producer warp: see `wgmma_persistent.produce`."""
    produce(load_weights, load_x, x_descs, w_descs, buffers, barriers, schedule, True, scheme, cfg)


# ---- consumer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_x_scales(smem, TILE_M: gl.constexpr, MMA: gl.constexpr):
    """Scales of the rows of x of a stage, [1, TILE_M]; they lie in the order of `quantize.scale_position`."""
    flat = reinterpret(smem, gl.float32, [TILE_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if TILE_M == 128:
        REG: gl.constexpr = [[1], [2], [16], [32], [64]]
    else:
        REG: gl.constexpr = [[1], [2], [16], [32]]
    L: gl.constexpr = gl.DistributedLinearLayout(REG, [[4], [8], [0], [0], [0]], [[0], [0]], [], [TILE_M])
    v = gl.permute(gl.reshape(flat.load(L), [TILE_M // 16, 4, 2, 2]), [0, 2, 1, 3])
    return gl.expand_dims(gl.convert_layout(gl.reshape(v, [TILE_M]), gl.SliceLayout(0, MMA), assert_trivial=True), 0)


@gluon.jit
def tile_scales(scales, n, k, layout, N, TILE_M: gl.constexpr, scheme: gl.constexpr):
    """Weight scales of 64 rows at a K block: a scalar where one scale block holds them all, else [64, 1]."""
    if scheme.one_scale_per_warpgroup:
        return weight_scale(scales[0], gl.minimum(n, N - 1), k, layout, scheme)
    else:
        MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
        row = gl.minimum(n + gl.arange(0, 64, gl.SliceLayout(1, MMA)), N - 1)
        return gl.expand_dims(weight_scale(scales[0], row, k, layout, scheme), 1)


@gluon.jit
def row_scales(scales, n, k, layout, N, scheme: gl.constexpr, cfg: gl.constexpr):
    """`tile_scales` for each of a warpgroup's accumulators, where scales change along K."""
    TILE_M: gl.constexpr = cfg.tile_m
    EXTRA_M: gl.constexpr = cfg.tile_m_extra
    found = (1.0, 1.0)
    if scheme.scaled_in_groups:
        found = (tile_scales(scales, n, k, layout, N, TILE_M, scheme), 1.0)
        if EXTRA_M > 0:
            found = (found[0], tile_scales(scales, n, k, layout, N, EXTRA_M, scheme))
    return found


@gluon.jit
def mma_tile_fp8(
    warpgroup: gl.constexpr, acc, a, x, x_scales, by_row, turn, more, TILE_M: gl.constexpr, scheme: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """acc plus the product of 64 rows of W and TILE_M rows of x over 128 columns."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    zero = gl.zeros([64, TILE_M], gl.float32, MMA)
    take_turn(turn, warpgroup, cfg)
    p = warpgroup_mma(a, x.permute([1, 0]), zero, use_acc=False, is_async=True)
    pass_turn(turn, more, warpgroup, cfg)
    p = warpgroup_mma_wait(0, deps=[p])
    if scheme.scaled_in_groups:
        scales = load_x_scales(x_scales, TILE_M, MMA)
        if scheme.one_scale_per_warpgroup:
            p *= scales * by_row
        else:
            p = p * by_row * scales
    return acc + p


@gluon.jit
def zero_accumulators(dtype: gl.constexpr, cfg: gl.constexpr):
    """A warpgroup's accumulators, see `epilogue`."""
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    acc = (gl.zeros([64, TILE_M], dtype, MMA),)
    if cfg.tile_m_extra > 0:
        EXTRA_M: gl.constexpr = cfg.tile_m_extra
        MMA2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EXTRA_M, 32])
        acc = acc + (gl.zeros([64, EXTRA_M], dtype, MMA2),)
    return acc


@gluon.jit
def mma_stage_fp8(
    warpgroup: gl.constexpr, acc, buffers, stage, by_row, turn, more, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Accumulators after a stage of E4M3 codes. by_row: see `row_scales`. more: whether stages follow."""
    TILE_M: gl.constexpr = cfg.tile_m
    EXTRA_M: gl.constexpr = cfg.tile_m_extra
    x, x_extra, w, x_scales, x_extra_scales = buffers
    a = w.index(stage * cfg.num_consumer_warpgroups + warpgroup)
    first = mma_tile_fp8(
        warpgroup, acc[0], a, x.index(stage), x_scales.index(stage), by_row[0], turn, more | (EXTRA_M > 0), TILE_M, scheme, cfg
    )  # fmt: skip
    out = (first,)
    if EXTRA_M > 0:
        second = mma_tile_fp8(
            warpgroup, acc[1], a, x_extra.index(stage), x_extra_scales.index(stage), by_row[1], turn, more, EXTRA_M, scheme, cfg
        )  # fmt: skip
        out = out + (second,)
    return out


@gluon.jit
def mma_stage_int8(warpgroup: gl.constexpr, acc, buffers, stage, turn, more, cfg: gl.constexpr):
    """Accumulators after a stage of int8 codes."""
    x, x_extra, w, _x_scales, _x_extra_scales = buffers
    a = w.index(stage * cfg.num_consumer_warpgroups + warpgroup)
    take_turn(turn, warpgroup, cfg)
    first = warpgroup_mma(a, x.index(stage).permute([1, 0]), acc[0], is_async=True)
    if cfg.tile_m_extra > 0:
        second = warpgroup_mma(a, x_extra.index(stage).permute([1, 0]), acc[1], is_async=True)
        pass_turn(turn, more, warpgroup, cfg)
        return warpgroup_mma_wait(0, deps=[first, second])
    else:
        pass_turn(turn, more, warpgroup, cfg)
        return (warpgroup_mma_wait(0, deps=[first]),)


@gluon.jit
def scale_tile(acc, n, m, first, space, scales, layout, N, TILE_M: gl.constexpr, scheme: gl.constexpr):
    """Accumulators [64, TILE_M] at y[m, n] in float32, zero-point correction subtracted (first: by one CTA of a tile), scaled."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    x_scale_ptr, x_zero_ptr, M = space
    w_scale_ptr, colsum_ptr = scales
    row = gl.minimum(n + gl.arange(0, 64, gl.SliceLayout(1, MMA)), N - 1)
    token = gl.minimum(m + gl.arange(0, TILE_M, gl.SliceLayout(0, MMA)), M - 1)
    v = acc
    if scheme.zero_points:
        zero = gl.expand_dims(gl.load(x_zero_ptr + token), 0) * first
        v -= zero * gl.expand_dims(gl.load(colsum_ptr + row), 1)
    v = v.to(gl.float32)
    if not scheme.scaled_in_groups:
        by_token = gl.expand_dims(gl.load(x_scale_ptr + token), 0)
        v = v * by_token * gl.expand_dims(weight_scale(w_scale_ptr, row, 0, layout, scheme), 1)
    return v


@gluon.jit
def consumer(
    warpgroup: gl.constexpr, y_descs, buffers, y_smem, barriers, pointers, space, scales, layout, N, schedule,
    scheme: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: the MMAs and epilogues of all of the CTA's work, for its 64 rows of W."""
    TILE_M: gl.constexpr = cfg.tile_m
    EXTRA_M: gl.constexpr = cfg.tile_m_extra
    ROWS: gl.constexpr = 64 * cfg.num_consumer_warpgroups
    full, empty = barriers
    whole_tiles = schedule[4]
    cta = gl.program_id(0)
    u0, u1, stream_k_tiles = stream_k_range(cta, schedule)
    left = whole_tiles * schedule[0] + (u1 - u0)  # stages of all of the CTA's work
    stage = 0
    phase = 0
    give_first_turn(N, warpgroup, cfg)
    for s in range(whole_tiles + stream_k_tiles):
        work = get_work(s, cta, u0, u1, schedule, cfg)
        n = work[3] * ROWS + warpgroup * 64
        m = work[4] * (TILE_M + EXTRA_M)
        acc = zero_accumulators(gl.float32 if scheme.fp8 else gl.int32, cfg)
        next_by_row = row_scales(scales, n, work[1], layout, N, scheme, cfg)
        for k in range(work[1], work[2]):
            by_row = next_by_row  # loaded a stage ahead
            next_by_row = row_scales(scales, n, gl.minimum(k + 1, schedule[0] - 1), layout, N, scheme, cfg)
            mbarrier.wait(full.index(stage), phase)
            left -= 1
            if scheme.fp8:
                acc = mma_stage_fp8(warpgroup, acc, buffers, stage, by_row, N, left > 0, scheme, cfg)
            else:
                acc = mma_stage_int8(warpgroup, acc, buffers, stage, N, left > 0, cfg)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = advance(stage, phase, cfg.stages)
        if s == 0:
            gdc_wait()
        first = gl.where(work[1] == 0, 1, 0)
        scaled = (scale_tile(acc[0], n, m, first, space, scales, layout, N, TILE_M, scheme),)
        if cfg.tile_m_extra > 0:
            scaled = scaled + (scale_tile(acc[1], n, m + TILE_M, first, space, scales, layout, N, EXTRA_M, scheme),)
        epilogue(warpgroup, scaled, y_descs, y_smem, pointers, work, cta, N, schedule, scheme, cfg)
    tma.store_wait(0)


# ---- kernel -------------------------------------------------------------------------------------------------------------


@gluon.jit
def allocate_x(x_desc, cfg: gl.constexpr):
    """Shared memory of the stages of x, and of extra x; without any, x again."""
    STAGES: gl.constexpr = cfg.stages
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, cfg.tile_m, 128], x_desc.layout)
    x_extra = x
    if cfg.tile_m_extra > 0:
        x_extra = gl.allocate_shared_memory(x_desc.dtype, [STAGES, cfg.tile_m_extra, 128], x_desc.layout)
    return x, x_extra


@gluon.jit(
    do_not_specialize=[
        "M", "N", "stages_per_tile", "tiles_m", "tiles_n", "num_ctas", "whole_tiles", "stream_k_stages", "block_rows",
        "row_offset", "scale_columns",
    ]
)  # fmt: skip
def scaled_persistent(
    x_desc, x_extra_desc, x_scale_desc, x_extra_scale_desc, w_desc, y_desc, y_extra_desc, partials_ptr, flags_ptr, x_scale_ptr,
    x_zero_ptr, w_scale_ptr, colsum_ptr, bias_ptr, M, N, block_rows, row_offset, scale_columns, stages_per_tile, tiles_m, tiles_n,
    num_ctas, whole_tiles, stream_k_stages, scheme: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """y [M, N] = (codes of x [M, K] @ codes of W.T) scaled, plus bias.

    Tensor maps: x_desc of codes [M, K'], box [tile_m, 128], the extra one [tile_m_extra, 128]; x_scale_desc, where scales change
    along K, of scales float32 [groups, M'], boxes [1, tile_m] and [1, tile_m_extra]; w_desc of W in blocks, as in
    `scaled_small_m`, box [64, 128]; y_desc and y_extra_desc as in `wgmma_persistent`. x_scale_ptr, x_zero_ptr: [M] otherwise.
    w_scale_ptr: float32 [row blocks, scale_columns]. partials_ptr, flags_ptr: the workspace of stream-K.
    """
    STAGES: gl.constexpr = cfg.stages
    TILE_M: gl.constexpr = cfg.tile_m
    EXTRA_M: gl.constexpr = cfg.tile_m_extra
    WARPGROUPS: gl.constexpr = cfg.num_consumer_warpgroups
    CONSUMER: gl.constexpr = cfg.consumer_registers
    PRODUCER: gl.constexpr = cfg.producer_registers
    x, x_extra = allocate_x(x_desc, cfg)
    w = gl.allocate_shared_memory(w_desc.dtype, [STAGES * WARPGROUPS, 64, 128], w_desc.layout)
    x_scales = x
    x_extra_scales = x
    if scheme.scaled_in_groups:
        x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE_M], x_scale_desc.layout)
        x_extra_scales = x_scales
        if EXTRA_M > 0:
            x_extra_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, EXTRA_M], x_scale_desc.layout)
    y_smem = gl.allocate_shared_memory(gl.float16 if scheme.fp16 else gl.bfloat16, [WARPGROUPS, TILE_M, 64], y_desc.layout)
    gdc_launch_dependents()
    barriers = pipeline_barriers(cfg.stages, WARPGROUPS)
    schedule = (stages_per_tile, tiles_m, tiles_n, num_ctas, whole_tiles, stream_k_stages)
    x_descs, y_descs = (x_desc, x_extra_desc, x_scale_desc, x_extra_scale_desc), (y_desc, y_extra_desc)
    pointers = (partials_ptr, flags_ptr, bias_ptr, bias_ptr)
    space, scales, layout = (x_scale_ptr, x_zero_ptr, M), (w_scale_ptr, colsum_ptr), (block_rows, row_offset, scale_columns)
    buffers = (x, x_extra, w, x_scales, x_extra_scales)
    # fmt: off
    gl.warp_specialize([
        (consumer, (0, y_descs, buffers, y_smem, barriers, pointers, space, scales, layout, N, schedule, scheme, cfg)),
        (consumer, (1, y_descs, buffers, y_smem, barriers, pointers, space, scales, layout, N, schedule, scheme, cfg)),
        (producer, (x_descs, w_desc, buffers, barriers, schedule, scheme, cfg)),
    ], [4, 1], [CONSUMER, PRODUCER])
    # fmt: on
