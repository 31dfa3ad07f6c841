# mypy: ignore-errors
"""y = quantized x times 4-bit W for larger M, by wgmma of 8 bits with W in registers as operand A: persistent, warp-specialized.

A producer warp loads packed codes and scales of W and codes of x by TMA, 128 columns a stage. Each of two consumer warpgroups
unpacks 64 rows of W (`w4a8_fragment`) and multiplies them with tile_m rows of x, or with tile_m + tile_m_extra as two MMAs of the
same fragment. Tensor cores add E4M3 products with few bits, so the product of every 128 columns, or of a scale group, is added to
float32 accumulators, scaled first where weight scales change along K; the other warpgroup's MMAs run meanwhile, for which named
barriers make the warpgroups take turns. int8 products with a scale per row are added up in int32. Tile scheduler and epilogue are
those of `wgmma_persistent`.

`scheme` is a `w4a8_scheme.W4A8Traits`, `cfg` a `traits.WgmmaTraits`. Tuples:
schedule, work: see `wgmma_persistent`. buffers: x, extra x, W, its scales.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bitline.kernels.hopper.device.common import pipeline_barriers
from bitline.kernels.hopper.device.epilogue import epilogue
from bitline.kernels.hopper.device.scaled_persistent import allocate_x, zero_accumulators
from bitline.kernels.hopper.device.w4a8_fragment import block_fragments, load_row_scales, load_words
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

# ---- producer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_weights(descs, full, buffers, stage, k, pid_n, _stages_per_tile, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of W of one stage; expect the bytes of all of the stage."""
    GROUPS: gl.constexpr = scheme.groups_per_k_block
    X_BYTES: gl.constexpr = (cfg.tile_m + cfg.tile_m_extra) * 128
    mbarrier.expect(full.index(stage), X_BYTES + 8 * (1024 + (64 * GROUPS if scheme.scaled_in_groups else 0)))
    async_load(descs[0], [pid_n * 8, k * 256], full.index(stage), buffers[2].index(stage))
    if scheme.scaled_in_groups:
        entry = k // scheme.k_blocks_per_scale * GROUPS
        async_load(descs[1], [pid_n * 8, entry * 16], full.index(stage), buffers[3].index(stage))


@gluon.jit
def load_x(descs, full, buffers, stage, k, pid_m, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of x of one stage."""
    m = pid_m * (cfg.tile_m + cfg.tile_m_extra)
    async_load(descs[0], [m, k * 128], full.index(stage), buffers[0].index(stage))
    if cfg.tile_m_extra > 0:
        async_load(descs[1], [m + cfg.tile_m, k * 128], full.index(stage), buffers[1].index(stage))


@gluon.jit
def producer(x_descs, w_descs, buffers, barriers, schedule, scheme: gl.constexpr, cfg: gl.constexpr):
    """The producer warp: see `wgmma_persistent.produce`."""
    produce(load_weights, load_x, x_descs, w_descs, buffers, barriers, schedule, True, scheme, cfg)


# ---- consumer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def issue_mma(warpgroup: gl.constexpr, acc, a, x, turn, more, TILE_M: gl.constexpr, scheme: gl.constexpr, cfg: gl.constexpr):
    """The MMA in flight of 64 rows of W and TILE_M rows of x over a scale group, or 128 columns."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    zero = gl.zeros([64, TILE_M], gl.float32 if scheme.fp8 else gl.int32, MMA)
    take_turn(turn, warpgroup, cfg)
    if scheme.exact_int32:
        p = warpgroup_mma(a, x.permute([1, 0]), acc, is_async=True)
    else:
        p = warpgroup_mma(a, x.permute([1, 0]), zero, use_acc=False, is_async=True)
    pass_turn(turn, more, warpgroup, cfg)
    return p


@gluon.jit
def finish_mma(acc, p, scale_smem, TILE_M: gl.constexpr, scheme: gl.constexpr):
    """acc plus a product, once it is there."""
    p = warpgroup_mma_wait(0, deps=[p])
    if scheme.exact_int32:
        return p
    elif scheme.scaled_in_groups:
        return acc + p.to(gl.float32) * load_row_scales(scale_smem, TILE_M)
    else:
        return acc + p


@gluon.jit
def for_tile(fragment, TILE_M: gl.constexpr):
    """An operand A for an MMA with TILE_M rows of x; the same registers."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    return gl.convert_layout(fragment, gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4), assert_trivial=True)


@gluon.jit
def stage_words(warpgroup: gl.constexpr, w, stage):
    """Packed codes of the warpgroup's 64 rows in a stage."""
    block = w.index(stage).slice(warpgroup * 4, 4, dim=0)
    return (load_words(block, 0), load_words(block, 1))


@gluon.constexpr_function
def prefetches(scheme, cfg):
    """Whether a stage's packed codes are loaded while the last MMA of the one before runs; else registers are too few."""
    return cfg.tile_m_extra < 128 or scheme.exact_int32


@gluon.jit
def mma_stage(
    warpgroup: gl.constexpr, acc, words, full, buffers, stage, next_stage, next_phase, turn, more, scheme: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Accumulators after a stage, and packed codes of the next one if it `prefetches`. more: whether stages follow."""
    TILE_M: gl.constexpr = cfg.tile_m
    EXTRA_M: gl.constexpr = cfg.tile_m_extra
    GROUPS: gl.constexpr = scheme.groups_per_k_block
    COLUMNS: gl.constexpr = 128 // GROUPS
    PREFETCH: gl.constexpr = prefetches(scheme, cfg)
    x, x_extra, w, scales = buffers
    fragments = block_fragments(words, TILE_M, scheme)
    scale_smem = scales.index(stage).slice(warpgroup * 4, 4, dim=0)
    first = acc[0]
    second = acc[0]
    if EXTRA_M > 0:
        second = acc[1]
    for i in gl.static_range(GROUPS):
        of_group = scale_smem.slice(i * 16, 16, dim=1) if scheme.scaled_in_groups else scale_smem
        columns = x.index(stage).slice(i * COLUMNS, COLUMNS, dim=1)
        follows = more | (EXTRA_M > 0) | (i + 1 < GROUPS)
        p = issue_mma(warpgroup, first, fragments[i], columns, turn, follows, TILE_M, scheme, cfg)
        if EXTRA_M > 0:
            first = finish_mma(first, p, of_group, TILE_M, scheme)
            columns = x_extra.index(stage).slice(i * COLUMNS, COLUMNS, dim=1)
            same = for_tile(fragments[i], EXTRA_M)
            p2 = issue_mma(warpgroup, second, same, columns, turn, more | (i + 1 < GROUPS), EXTRA_M, scheme, cfg)
            if PREFETCH and i + 1 == GROUPS:
                if more:
                    mbarrier.wait(full.index(next_stage), next_phase)
                words = stage_words(warpgroup, w, next_stage)
            second = finish_mma(second, p2, of_group, EXTRA_M, scheme)
        else:
            if PREFETCH and i + 1 == GROUPS:
                if more:
                    mbarrier.wait(full.index(next_stage), next_phase)
                words = stage_words(warpgroup, w, next_stage)
            first = finish_mma(first, p, of_group, TILE_M, scheme)
    out = (first,)
    if EXTRA_M > 0:
        out = out + (second,)
    return out, words


@gluon.jit
def scale_tile(acc, n, m, scales, M, N, TILE_M: gl.constexpr, scheme: gl.constexpr):
    """Accumulators [64, TILE_M] at y[m, n] in float32, scaled by token, and by row where weight scales do not change along K."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    x_scale_ptr, w_scale_ptr = scales
    token = gl.minimum(m + gl.arange(0, TILE_M, gl.SliceLayout(0, MMA)), M - 1)
    v = acc.to(gl.float32) * gl.expand_dims(gl.load(x_scale_ptr + token), 0)
    if not scheme.scaled_in_groups:  # a table of 16 rows to an entry, rows g and g + 8 side by side
        row = gl.minimum(n + gl.arange(0, 64, gl.SliceLayout(1, MMA)), N - 1)
        v = v * gl.expand_dims(gl.load(w_scale_ptr + ((row & -16) + (row & 7) * 2 + ((row >> 3) & 1))), 1)
    return v


@gluon.jit
def consumer(
    warpgroup: gl.constexpr, y_descs, buffers, y_smem, barriers, pointers, scales, M, N, schedule, scheme: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: the MMAs and epilogues of all of the CTA's work, for its 64 rows of W."""
    TILE_M: gl.constexpr = cfg.tile_m
    EXTRA_M: gl.constexpr = cfg.tile_m_extra
    full, empty = barriers
    whole_tiles = schedule[4]
    cta = gl.program_id(0)
    u0, u1, stream_k_tiles = stream_k_range(cta, schedule)
    left = whole_tiles * schedule[0] + (u1 - u0)  # stages of all of the CTA's work
    stage = 0
    phase = 0
    give_first_turn(N, warpgroup, cfg)
    PREFETCH: gl.constexpr = prefetches(scheme, cfg)
    words = ()
    if PREFETCH:
        mbarrier.wait(full.index(0), 0)
        words = stage_words(warpgroup, buffers[2], 0)
    for s in range(whole_tiles + stream_k_tiles):
        work = get_work(s, cta, u0, u1, schedule, cfg)
        acc = zero_accumulators(gl.int32 if scheme.exact_int32 else gl.float32, cfg)
        for _k in range(work[1], work[2]):
            left -= 1
            after, after_phase = advance(stage, phase, cfg.stages)
            more = left > 0
            if PREFETCH:
                acc, words = mma_stage(warpgroup, acc, words, full, buffers, stage, after, after_phase, N, more, scheme, cfg)
            else:
                mbarrier.wait(full.index(stage), phase)
                these = stage_words(warpgroup, buffers[2], stage)
                acc, _w = mma_stage(warpgroup, acc, these, full, buffers, stage, after, after_phase, N, more, scheme, cfg)
            mbarrier.arrive(empty.index(stage), count=1)
            stage = after
            phase = after_phase
        if s == 0:
            gdc_wait()
        n = work[3] * 128 + warpgroup * 64
        m = work[4] * (TILE_M + EXTRA_M)
        scaled = (scale_tile(acc[0], n, m, scales, M, N, TILE_M, scheme),)
        if EXTRA_M > 0:
            scaled = scaled + (scale_tile(acc[1], n, m + TILE_M, scales, M, N, EXTRA_M, scheme),)
        epilogue(warpgroup, scaled, y_descs, y_smem, pointers, work, cta, N, schedule, scheme, cfg)
    tma.store_wait(0)


# ---- kernel -------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["M", "N", "stages_per_tile", "tiles_m", "tiles_n", "num_ctas", "whole_tiles", "stream_k_stages"])
def w4a8_persistent(
    x_desc, x_extra_desc, w_desc, scale_desc, y_desc, y_extra_desc, partials_ptr, flags_ptr, x_scale_ptr, w_scale_ptr, bias_ptr,
    M, N, stages_per_tile, tiles_m, tiles_n, num_ctas, whole_tiles, stream_k_stages, scheme: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """y [M, N] = (codes of x [M, K] @ codes of W.T) scaled, plus bias.

    Tensor maps: x_desc of codes [M, K'], box [tile_m, 128], the extra one [tile_m_extra, 128]; w_desc of packed int32 [N / 16,
    K / 128 * 256], box [8, 256]; scale_desc of the scales float32 [N / 16, groups * 16], box [8, 16 * groups_per_k_block]; y_desc
    and y_extra_desc as in `wgmma_persistent`. x_scale_ptr: [M]. w_scale_ptr: the same scales. partials_ptr, flags_ptr: the
    workspace of stream-K.
    """
    CONSUMER: gl.constexpr = cfg.consumer_registers
    PRODUCER: gl.constexpr = cfg.producer_registers
    x, x_extra = allocate_x(x_desc, cfg)
    w = gl.allocate_shared_memory(gl.int32, [cfg.stages, 8, 256], w_desc.layout)
    w_scales = w
    if scheme.scaled_in_groups:
        w_scales = gl.allocate_shared_memory(gl.float32, [cfg.stages, 8, 16 * scheme.groups_per_k_block], scale_desc.layout)
    y_smem = gl.allocate_shared_memory(gl.float16 if scheme.fp16 else gl.bfloat16, [2, cfg.tile_m, 64], y_desc.layout)
    gdc_launch_dependents()
    barriers = pipeline_barriers(cfg.stages, 2)
    schedule = (stages_per_tile, tiles_m, tiles_n, num_ctas, whole_tiles, stream_k_stages)
    x_descs, w_descs, y_descs = (x_desc, x_extra_desc), (w_desc, scale_desc), (y_desc, y_extra_desc)
    pointers = (partials_ptr, flags_ptr, bias_ptr, bias_ptr)
    buffers, scales = (x, x_extra, w, w_scales), (x_scale_ptr, w_scale_ptr)
    # fmt: off
    gl.warp_specialize([
        (consumer, (0, y_descs, buffers, y_smem, barriers, pointers, scales, M, N, schedule, scheme, cfg)),
        (consumer, (1, y_descs, buffers, y_smem, barriers, pointers, scales, M, N, schedule, scheme, cfg)),
        (producer, (x_descs, w_descs, buffers, barriers, schedule, scheme, cfg)),
    ], [4, 1], [CONSUMER, PRODUCER])
    # fmt: on
