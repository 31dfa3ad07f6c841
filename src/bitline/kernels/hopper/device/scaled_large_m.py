# mypy: ignore-errors
"""y = quantized x times quantized W for large M, by wgmma on the codes: persistent and warp-specialized; x is operand A.

A producer warp loads codes of x and W by TMA, 128 columns a stage; each of two consumer warpgroups multiplies 64 rows of x with
cfg.tile_n rows of W, 128 at a time. With x as operand A a thread holds two rows of x, so that scales which change along K are two
numbers a thread and part, and each accumulator takes one FMA. Tensor cores add E4M3 products with few bits, so the product of
every 128 columns is added to float32 accumulators, while the other warpgroup's MMAs run. int8 products are exact in int32, and
the next stage's MMAs are issued before the last one's are waited for.

Accumulators are tuples of parts, [64 rows of x, 128 rows of W] each. What the epilogue multiplies and adds is loaded when a tile
begins. Stream-K tiles are reduced as in `epilogue`; the tile scheduler is that of `wgmma_persistent`.

`scheme` is a `scaled_scheme.ScaledTraits`, `cfg` a `scaled_config.LargeMConfig`. Tuples:
schedule, work: see `wgmma_persistent`. tokens: scales and zero points of x, M. scales: weight scales, column sums, bias.
layout: rows of a scale block, row offset, entries per row of the weight's scales. buffers: x, W, scales of x.
pipeline: stage, its phase, stages left of the CTA's work.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bitline.kernels.hopper.device.common import barrier, pipeline_barriers
from bitline.kernels.hopper.device.epilogue import (
    add_partials,
    async_store,
    end_cta,
    partial_offsets,
    thread_major,
    wait_for_partials,
)
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
from bitline.kernels.hopper.scaled_config import WHOLE_ROW as WHOLE_ROW_K_BLOCKS

WHOLE_ROW = gl.constexpr(WHOLE_ROW_K_BLOCKS)

# ---- producer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_weights(w_desc, full, buffers, stage, k, pid_n, num_k_blocks, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of W of one stage; expect the bytes of all of the stage."""
    N64: gl.constexpr = cfg.tile_n // 64
    _x, w, _x_scales = buffers
    mbarrier.expect(full.index(stage), (128 + cfg.tile_n) * 128 + (512 if scheme.scaled_in_groups else 0))
    for i in gl.static_range(N64):
        half = w.index(stage * (N64 // 2) + i // 2).slice(i % 2 * 64, 64, dim=0)
        async_load(w_desc, [((pid_n * N64 + i) * num_k_blocks + k) * 64, 0], full.index(stage), half)


@gluon.jit
def load_x(descs, full, buffers, stage, k, pid_m, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of x of one stage, and of its scales where they change along K."""
    x_desc, x_scale_desc = descs
    x, _w, x_scales = buffers
    for i in gl.static_range(2):
        async_load(x_desc, [pid_m * 128 + i * 64, k * 128], full.index(stage), x.index(stage * 2 + i))
    if scheme.scaled_in_groups:
        async_load(x_scale_desc, [k // scheme.k_blocks_per_x_scale, pid_m * 128], full.index(stage), x_scales.index(stage))


@gluon.jit
def producer(x_descs, w_descs, buffers, barriers, schedule, scheme: gl.constexpr, cfg: gl.constexpr):
    """The producer warp: see `wgmma_persistent.produce`."""
    produce(load_weights, load_x, x_descs, w_descs, buffers, barriers, schedule, True, scheme, cfg)


# ---- consumer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def block_scales(scales, n, k, layout, N, scheme: gl.constexpr, cfg: gl.constexpr):
    """Weight scales of the tile's parts at a K block: a scalar each, 1 where they do not change along K."""
    block_rows, offset, entries = layout
    found = ()
    for i in gl.static_range(cfg.tile_n // 128):
        if scheme.k_blocks_per_weight_scale < WHOLE_ROW:
            row = (gl.minimum(n + i * 128, N - 1) + offset) // block_rows
            found = found + (gl.load(scales[0] + row * entries + k // scheme.k_blocks_per_weight_scale),)
        else:
            found = found + (1.0,)
    return found


@gluon.jit
def mma_stage_fp8(
    warpgroup: gl.constexpr, acc, buffers, empty, stage, by_block, turn, more, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Accumulators after a stage of E4M3 codes, which is released. by_block: see `block_scales`. more: whether stages follow."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    PARTS: gl.constexpr = cfg.tile_n // 128
    x, w, x_scales = buffers
    a = x.index(stage * 2 + warpgroup)
    by_token = 1.0
    if scheme.scaled_in_groups:
        by_token = x_scales.index(stage).reshape([128]).slice(warpgroup * 64, 64).load(gl.SliceLayout(1, MMA))
    zero = gl.zeros([64, 128], gl.float32, MMA)
    out = ()
    for i in gl.static_range(PARTS):
        take_turn(turn, warpgroup, cfg)
        p = warpgroup_mma(a, w.index(stage * PARTS + i).permute([1, 0]), zero, use_acc=False, is_async=True)
        pass_turn(turn, more | (i < PARTS - 1), warpgroup, cfg)
        p = warpgroup_mma_wait(0, deps=[p])
        if i == PARTS - 1:
            mbarrier.arrive(empty.index(stage), count=1)
        if scheme.scaled_in_groups:
            out = out + (gl.fma(p, gl.expand_dims(by_token * by_block[i], 1), acc[i]),)
        else:
            out = out + (acc[i] + p,)
    return out


@gluon.jit
def zero_accumulators(dtype: gl.constexpr, cfg: gl.constexpr):
    """A warpgroup's accumulators."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    acc = ()
    for _i in gl.static_range(cfg.tile_n // 128):
        acc = acc + (gl.zeros([64, 128], dtype, MMA),)
    return acc


@gluon.jit
def mma_tile_fp8(
    warpgroup: gl.constexpr, buffers, barriers, pipeline, work, n, scales, layout, N, num_k_blocks, scheme: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Accumulators of a work unit of E4M3 codes, and the pipeline's position after it."""
    full, empty = barriers
    stage, phase, left = pipeline
    acc = zero_accumulators(gl.float32, cfg)
    next_by_block = block_scales(scales, n, work[1], layout, N, scheme, cfg)
    for k in range(work[1], work[2]):
        by_block = next_by_block  # loaded a stage ahead
        next_by_block = block_scales(scales, n, gl.minimum(k + 1, num_k_blocks - 1), layout, N, scheme, cfg)
        mbarrier.wait(full.index(stage), phase)
        left -= 1
        acc = mma_stage_fp8(warpgroup, acc, buffers, empty, stage, by_block, N, left > 0, scheme, cfg)
        stage, phase = advance(stage, phase, cfg.stages)
    return acc, (stage, phase, left)


@gluon.jit
def mma_stage_int8(warpgroup: gl.constexpr, acc, buffers, stage, cfg: gl.constexpr):
    """Accumulators while the MMAs of a stage of int8 codes run, those of the stage before being done."""
    x, w, _x_scales = buffers
    a = x.index(stage * 2 + warpgroup)
    if cfg.tile_n == 256:
        first = warpgroup_mma(a, w.index(stage * 2).permute([1, 0]), acc[0], is_async=True)
        second = warpgroup_mma(a, w.index(stage * 2 + 1).permute([1, 0]), acc[1], is_async=True)
        return warpgroup_mma_wait(2, deps=[first, second])
    else:
        first = warpgroup_mma(a, w.index(stage).permute([1, 0]), acc[0], is_async=True)
        return (warpgroup_mma_wait(1, deps=[first]),)


@gluon.jit
def previous(stage, cfg: gl.constexpr):
    """The pipeline stage before."""
    return gl.where(stage == 0, cfg.stages - 1, stage - 1)


@gluon.jit
def mma_tile_int8(warpgroup: gl.constexpr, buffers, barriers, pipeline, work, cfg: gl.constexpr):
    """Accumulators of a work unit of int8 codes, and the pipeline's position after it."""
    full, empty = barriers
    stage, phase, left = pipeline
    acc = zero_accumulators(gl.int32, cfg)
    for k in range(work[1], work[2]):
        mbarrier.wait(full.index(stage), phase)
        acc = mma_stage_int8(warpgroup, acc, buffers, stage, cfg)
        mbarrier.arrive(empty.index(previous(stage, cfg)), count=1, pred=k > work[1])
        stage, phase = advance(stage, phase, cfg.stages)
    if cfg.tile_n == 256:
        acc = warpgroup_mma_wait(0, deps=[acc[0], acc[1]])
    else:
        acc = (warpgroup_mma_wait(0, deps=[acc[0]]),)
    mbarrier.arrive(empty.index(previous(stage, cfg)), count=1)
    return acc, (stage, phase, left)


# ---- epilogue -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_columns(n, scales, layout, N, scheme: gl.constexpr, cfg: gl.constexpr):
    """Of the rows of W of each part: scales, column sums and bias, one row a thread; what a scheme lacks is 0."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    scale_ptr, colsum_ptr, bias_ptr = scales
    block_rows, offset, entries = layout
    found = ()
    for i in gl.static_range(cfg.tile_n // 128):
        row = gl.minimum(n + i * 128 + gl.arange(0, 128, L), N - 1)
        by_row = 0.0
        colsum = 0
        bias = 0.0
        if scheme.k_blocks_per_weight_scale == WHOLE_ROW:
            by_row = gl.load(scale_ptr + (row + offset) // block_rows * entries)
        if scheme.zero_points:
            colsum = gl.load(colsum_ptr + row)
        if scheme.has_bias:
            bias = gl.load(bias_ptr + row).to(gl.float32)
        found = found + ((by_row, colsum, bias),)
    return found


@gluon.jit
def load_tokens(m, tokens, scheme: gl.constexpr):
    """Scales and zero points of 64 rows of x; what a scheme lacks is 0."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    x_scale_ptr, x_zero_ptr, M = tokens
    token = gl.minimum(m + gl.arange(0, 64, gl.SliceLayout(1, MMA)), M - 1)
    by_token = 0.0
    zero = 0
    if not scheme.scaled_in_groups:
        by_token = gl.load(x_scale_ptr + token)
    if scheme.zero_points:
        zero = gl.load(x_zero_ptr + token)
    return by_token, zero


@gluon.jit
def along_columns(v):
    """A vector of `load_columns`, to broadcast against accumulators."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    return gl.expand_dims(gl.convert_layout(v, gl.SliceLayout(0, MMA)), 0)


@gluon.jit
def scale_part(acc, tokens, columns, first, scheme: gl.constexpr):
    """Accumulators of a part in float32, zero-point correction subtracted (first: by one CTA of a tile), scaled."""
    by_token, zero = tokens
    by_row, colsum, _bias = columns
    v = acc
    if scheme.zero_points:
        v -= gl.expand_dims(zero, 1) * first * along_columns(colsum)
    v = v.to(gl.float32)
    if not scheme.scaled_in_groups:
        v *= gl.expand_dims(by_token, 1)
    if scheme.k_blocks_per_weight_scale == WHOLE_ROW:
        v *= along_columns(by_row)
    return v


@gluon.jit
def store_part(v, y_desc, smem, n, m, bias, scheme: gl.constexpr):
    """y[m : m + 64, n : n + 128] from `thread_major` accumulators plus bias, by TMA through smem [64, 128]."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    v = gl.permute(gl.reshape(v, [4, 8, 4, 16, 2, 2]), [0, 4, 1, 3, 2, 5])
    acc = gl.convert_layout(gl.reshape(v, [64, 128]), MMA, assert_trivial=True)
    if scheme.has_bias:
        acc += along_columns(bias)
    tma.store_wait(0)
    barrier()
    smem.store(acc.to(gl.float16 if scheme.fp16 else gl.bfloat16))
    fence_async_shared()
    barrier()
    async_store(y_desc, [m, n], smem)


@gluon.jit
def store_work(
    warpgroup: gl.constexpr, acc, columns, y_desc, smem, pointers, work, cta, schedule, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Store a whole tile; reduce a stream-K tile as `epilogue.epilogue` does. acc: scaled accumulators of each part."""
    PARTS: gl.constexpr = cfg.tile_n // 128
    CTA_STRIDE: gl.constexpr = 128 * cfg.tile_n
    tile, k0, k1, pid_n, pid_m = work
    partials_ptr, flags_ptr = pointers
    stages_per_tile, _tiles_m, _tiles_n, num_ctas, whole_tiles, _stream_k_stages = schedule
    flag = flags_ptr + ((tile - whole_tiles * num_ctas) * 2 + warpgroup)
    partials = partials_ptr + warpgroup * (64 * cfg.tile_n)
    if k0 > 0:
        for i in gl.static_range(PARTS):
            gl.store(partials + (cta * CTA_STRIDE + i * 8192) + partial_offsets(128), thread_major(acc[i], 128))
        barrier()
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        end = cta + 1
        if k1 < stages_per_tile:
            end = end_cta(tile, schedule)
            wait_for_partials(flag, end - 1 - cta)
        for i in gl.static_range(PARTS):
            v = add_partials(thread_major(acc[i], 128), partials + i * 8192, cta + 1, end, CTA_STRIDE, 128, False)
            n = pid_n * cfg.tile_n + i * 128
            store_part(v, y_desc, smem, n, pid_m * 128 + warpgroup * 64, columns[i][2], scheme)


@gluon.jit
def consumer(
    warpgroup: gl.constexpr, y_desc, buffers, y_smem, barriers, pointers, tokens, scales, layout, N, schedule,
    scheme: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: the MMAs and epilogues of all of the CTA's work, for its 64 rows of x."""
    whole_tiles = schedule[4]
    cta = gl.program_id(0)
    u0, u1, stream_k_tiles = stream_k_range(cta, schedule)
    left = whole_tiles * schedule[0] + (u1 - u0)
    pipeline = (0, 0, left)
    give_first_turn(N, warpgroup, cfg)
    gdc_wait()
    for s in range(whole_tiles + stream_k_tiles):
        work = get_work(s, cta, u0, u1, schedule, cfg)
        n = work[3] * cfg.tile_n
        columns = load_columns(n, scales, layout, N, scheme, cfg)
        of_tokens = load_tokens(work[4] * 128 + warpgroup * 64, tokens, scheme)
        if scheme.fp8:
            acc, pipeline = mma_tile_fp8(
                warpgroup, buffers, barriers, pipeline, work, n, scales, layout, N, schedule[0], scheme, cfg
            )
        else:
            acc, pipeline = mma_tile_int8(warpgroup, buffers, barriers, pipeline, work, cfg)
        first = gl.where(work[1] == 0, 1, 0)
        scaled = ()
        for i in gl.static_range(cfg.tile_n // 128):
            scaled = scaled + (scale_part(acc[i], of_tokens, columns[i], first, scheme),)
        store_work(warpgroup, scaled, columns, y_desc, y_smem.index(warpgroup), pointers, work, cta, schedule, scheme, cfg)
    tma.store_wait(0)


# ---- kernel -------------------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        "M", "N", "stages_per_tile", "tiles_m", "tiles_n", "num_ctas", "whole_tiles", "stream_k_stages", "block_rows",
        "row_offset", "scale_columns",
    ]
)  # fmt: skip
def scaled_large_m(
    x_desc, x_scale_desc, w_desc, y_desc, partials_ptr, flags_ptr, x_scale_ptr, x_zero_ptr, w_scale_ptr, colsum_ptr, bias_ptr, M,
    N, block_rows, row_offset, scale_columns, stages_per_tile, tiles_m, tiles_n, num_ctas, whole_tiles, stream_k_stages,
    scheme: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """y [M, N] = (codes of x [M, K] @ codes of W.T) scaled, plus bias.

    Tensor maps: x_desc of codes [M, K'], box [64, 128]; x_scale_desc, where scales change along K, of scales float32
    [groups, M'], box [1, 128]; w_desc of W in blocks, as in `scaled_small_m`, box [64, 128]; y_desc of y, box [64, 128]. The
    other arguments are those of `scaled_persistent`.
    """
    STAGES: gl.constexpr = cfg.stages
    N128: gl.constexpr = cfg.tile_n // 128
    CONSUMER: gl.constexpr = cfg.consumer_registers
    PRODUCER: gl.constexpr = cfg.producer_registers
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, 64, 128], x_desc.layout)
    w = gl.allocate_shared_memory(w_desc.dtype, [STAGES * N128, 128, 128], w_desc.layout)
    x_scales = x
    if scheme.scaled_in_groups:
        x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], x_scale_desc.layout)
    y_smem = gl.allocate_shared_memory(gl.float16 if scheme.fp16 else gl.bfloat16, [2, 64, 128], y_desc.layout)
    gdc_launch_dependents()
    barriers = pipeline_barriers(cfg.stages, 2)
    schedule = (stages_per_tile, tiles_m, tiles_n, num_ctas, whole_tiles, stream_k_stages)
    pointers, tokens = (partials_ptr, flags_ptr), (x_scale_ptr, x_zero_ptr, M)
    scales, layout = (w_scale_ptr, colsum_ptr, bias_ptr), (block_rows, row_offset, scale_columns)
    buffers = (x, w, x_scales)
    # fmt: off
    gl.warp_specialize([
        (consumer, (0, y_desc, buffers, y_smem, barriers, pointers, tokens, scales, layout, N, schedule, scheme, cfg)),
        (consumer, (1, y_desc, buffers, y_smem, barriers, pointers, tokens, scales, layout, N, schedule, scheme, cfg)),
        (producer, ((x_desc, x_scale_desc), w_desc, buffers, barriers, schedule, scheme, cfg)),
    ], [4, 1], [CONSUMER, PRODUCER])
    # fmt: on
