# mypy: ignore-errors
"""y = quantized x times quantized W for M <= 64, bandwidth-bound, by wgmma on the codes: W is operand A, x operand B.

A tile is cfg.rows rows of W, a multiple of 8, so that all SMs get equally many; the grid is persistent over tiles. W lies in
64 x 128 blocks, each contiguous and followed by the next along K (`scaled_linear`). A producer warp loads codes of W and x by TMA
into a multi-stage pipeline, in boxes of cfg.box_rows rows, and one or two consumer warpgroups multiply 64-row parts of the tile
with all rows of x; what lies past the tile's rows is not loaded and not stored. Tensor cores add E4M3 products with few bits, so
the product of every 128 columns is added to float32 accumulators, scaled first where scales change along K; int8 products are
exact in int32.

The first warpgroup quantizes x while the pipeline fills with weights: the CTA's share of units (`quantize`), after which the CTA
counts itself in, and the producer loads codes of x once all CTAs have; or with cfg.private all of x, for the CTA alone.

`scheme` is a `scaled_scheme.ScaledTraits`, `act` an `ActTraits`, `cfg` a `scaled_config.ScaledSmallMConfig`.
Tuples:
sizes: M, N, K blocks of 128 columns, tiles, CTAs, CTAs that quantize, K, limit of x, units and parts (`quantize`), groups of a
row of x.
space, static: see `quantize`. scales: weight scales, column sums, bias. layout: see `weight_scale`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bitline.kernels.hopper.device.common import pipeline_barriers
from bitline.kernels.hopper.device.quantize import (
    FENCE_PROXY,
    fence_writes,
    leave,
    publish,
    quantize_unit,
    wait_for_count,
)

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.8
_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # renamed in Triton 3.9


@gluon.jit
def weight_scale(scale_ptr, row, k_block, layout, scheme: gl.constexpr):
    """Scales of rows of W at a block of 128 columns. layout: rows of a scale block, row offset, entries per row of the table."""
    block_rows, offset, entries = layout
    return gl.load(scale_ptr + (row + offset) // block_rows * entries + k_block // scheme.k_blocks_per_weight_scale)


# ---- producer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_weights(w_desc, full, w, stage, tile, step, num_k_blocks, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of W of one stage; expect the bytes of all of the stage."""
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    BOXES: gl.constexpr = cfg.rows // cfg.box_rows
    SCALE_BYTES: gl.constexpr = 4 * cfg.scale_box if scheme.scaled_in_groups else 0
    mbarrier.expect(full.index(stage), K_BLOCKS * ((cfg.rows + cfg.tile_m) * 128 + SCALE_BYTES))
    for b in gl.static_range(K_BLOCKS):
        for i in gl.static_range(BOXES):
            buffer = w.index((stage * K_BLOCKS + b) * BOXES + i)
            n = tile * cfg.rows + i * cfg.box_rows
            k_block = gl.minimum(step * K_BLOCKS + b, num_k_blocks - 1)  # past the last one, x is zero
            async_load(w_desc, [(n // 64 * num_k_blocks + k_block) * 64 + n % 64, 0], full.index(stage), buffer)


@gluon.jit
def load_x(
    x_desc, x_scale_desc, full, x, x_scales, stage, first, step, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Issue the TMA loads of x of one stage, and of its scales where they change along K. first: row and group of the copy."""
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    for b in gl.static_range(K_BLOCKS):
        k_block = step * K_BLOCKS + b
        async_load(x_desc, [first[0], k_block * 128], full.index(stage), x.index(stage * K_BLOCKS + b))
        if scheme.scaled_in_groups:
            group = first[1] + k_block // scheme.k_blocks_per_x_scale
            async_load(x_scale_desc, [group, 0], full.index(stage), x_scales.index(stage * K_BLOCKS + b))


@gluon.jit
def producer(descs, buffers, barriers, flags_ptr, sizes, scheme: gl.constexpr, cfg: gl.constexpr):
    """The producer warp: load the stages of all of the CTA's tiles."""
    x_desc, x_scale_desc, w_desc = descs
    x, x_scales, w = buffers
    full, empty, quantized = barriers
    _M, _N, num_k_blocks, num_tiles, num_ctas, num_quantizers, _K, _limit, _units, _parts, groups = sizes
    cta = gl.program_id(0)
    steps = (num_k_blocks + cfg.k_blocks_per_stage - 1) // cfg.k_blocks_per_stage
    total = (num_tiles - cta + num_ctas - 1) // num_ctas * steps
    prefetched = gl.minimum(cfg.stages, total)
    for i in range(prefetched):
        tile = cta + i // steps * num_ctas
        load_weights(w_desc, full, w, i, tile, i % steps, num_k_blocks, scheme, cfg)
    first = (0, 0)
    if cfg.private:
        mbarrier.wait(quantized.index(0), 0)
        gl.inline_asm_elementwise(FENCE_PROXY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        first = (cta * cfg.tile_m, cta * groups)
    else:
        gdc_wait()  # the counters are the stream's, and so the previous kernel's as well
        wait_for_count(flags_ptr, num_quantizers)
    for i in range(prefetched):
        tile = cta + i // steps * num_ctas
        load_x(x_desc, x_scale_desc, full, x, x_scales, i, first, i % steps, scheme, cfg)
    stage = 0
    phase = 0
    for i in range(prefetched, total):
        mbarrier.wait(empty.index(stage), phase)
        tile = cta + i // steps * num_ctas
        load_weights(w_desc, full, w, stage, tile, i % steps, num_k_blocks, scheme, cfg)
        load_x(x_desc, x_scale_desc, full, x, x_scales, stage, first, i % steps, scheme, cfg)
        last = stage + 1 == cfg.stages
        stage = gl.where(last, 0, stage + 1)
        phase = gl.where(last, phase ^ 1, phase)


# ---- consumer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def zero_accumulators(scheme: gl.constexpr, cfg: gl.constexpr):
    """A warpgroup's accumulators: one tensor for each of its 64-row parts."""
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    T: gl.constexpr = cfg.n64_per_warpgroup
    acc = ()
    for _t in gl.static_range(T):
        acc = acc + (gl.zeros([64, TILE_M], gl.float32 if scheme.fp8 else gl.int32, MMA),)
    return acc


@gluon.jit
def wait_all(tokens):
    """Wait for all MMAs in flight; accumulators."""
    if len(tokens) == 1:
        return (warpgroup_mma_wait(0, deps=[tokens[0]]),)
    else:
        return warpgroup_mma_wait(0, deps=tokens)


@gluon.jit
def load_x_scales(smem, MMA: gl.constexpr, cfg: gl.constexpr):
    """Scales of the rows of x in a K block, [1, tile_m]."""
    TILE_M: gl.constexpr = cfg.tile_m
    SCALE_BOX: gl.constexpr = cfg.scale_box
    flat = reinterpret(smem, gl.float32, [SCALE_BOX], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return gl.expand_dims(flat.slice(0, TILE_M, dim=0).load(gl.SliceLayout(0, MMA)), 0)


@gluon.jit
def rows64(w, k_block, part, cfg: gl.constexpr):
    """The part-th 64 rows of a K block of W; those past the tile's are of other buffers, and their products are not used."""
    first = w.index(k_block * (cfg.rows // cfg.box_rows) + part * (64 // cfg.box_rows))
    return reinterpret(first, w.dtype, [64, 128], w.layout)


@gluon.jit
def stage_factors(
    warpgroup: gl.constexpr, step, tile, scales, layout, num_k_blocks, N, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Weight scales of the warpgroup's rows, [64] for each K block and 64-row part of a stage; empty where they multiply y."""
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    T: gl.constexpr = cfg.n64_per_warpgroup
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    factors = ()
    if scheme.scaled_in_groups:
        rows = gl.arange(0, 64, gl.SliceLayout(1, MMA))
        for b in gl.static_range(K_BLOCKS):
            k_block = gl.minimum(step * K_BLOCKS + b, num_k_blocks - 1)
            for t in gl.static_range(T):
                row = gl.minimum(tile * cfg.rows + (warpgroup * T + t) * 64 + rows, N - 1)
                factors = factors + (weight_scale(scales[0], row, k_block, layout, scheme),)
    return factors


@gluon.jit
def scaled_product(p, factors, x_scales, buffer, i: gl.constexpr, scheme: gl.constexpr, cfg: gl.constexpr):
    """A K block's product times the scales that change along K."""
    if scheme.scaled_in_groups:
        TILE_M: gl.constexpr = cfg.tile_m
        MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
        return p * load_x_scales(x_scales.index(buffer), MMA, cfg) * gl.expand_dims(factors[i], 1)
    else:
        return p


@gluon.jit
def mma_stage_fp8(warpgroup: gl.constexpr, acc, buffers, stage, factors, scheme: gl.constexpr, cfg: gl.constexpr):
    """Accumulators after a stage of E4M3 codes: all MMAs in flight together, or one after the other where registers are few."""
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    T: gl.constexpr = cfg.n64_per_warpgroup
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    TOGETHER: gl.constexpr = TILE_M * K_BLOCKS * T <= 128
    x, x_scales, w = buffers
    zero = gl.zeros([64, TILE_M], gl.float32, MMA)
    products = ()
    for b in gl.static_range(K_BLOCKS):
        out = ()
        for t in gl.static_range(T):
            a = rows64(w, stage * K_BLOCKS + b, warpgroup * T + t, cfg)
            p = warpgroup_mma(a, x.index(stage * K_BLOCKS + b).permute([1, 0]), zero, use_acc=False, is_async=True)
            if TOGETHER:
                products = products + (p,)
            else:
                p = warpgroup_mma_wait(0, deps=[p])
                out = out + (acc[t] + scaled_product(p, factors, x_scales, stage * K_BLOCKS + b, b * T + t, scheme, cfg),)
        if not TOGETHER:
            acc = out
    if TOGETHER:
        products = wait_all(products)
        for b in gl.static_range(K_BLOCKS):
            out = ()
            for t in gl.static_range(T):
                p = scaled_product(products[b * T + t], factors, x_scales, stage * K_BLOCKS + b, b * T + t, scheme, cfg)
                out = out + (acc[t] + p,)
            acc = out
    return acc


@gluon.jit
def mma_stage_int8(warpgroup: gl.constexpr, acc, buffers, stage, cfg: gl.constexpr):
    """Accumulators after a stage of int8 codes."""
    T: gl.constexpr = cfg.n64_per_warpgroup
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    x, _x_scales, w = buffers
    for b in gl.static_range(K_BLOCKS):
        out = ()
        for t in gl.static_range(T):
            a = rows64(w, stage * K_BLOCKS + b, warpgroup * T + t, cfg)
            out = out + (warpgroup_mma(a, x.index(stage * K_BLOCKS + b).permute([1, 0]), acc[t], is_async=True),)
        acc = out
    return wait_all(acc)


@gluon.jit
def store_tile(
    warpgroup: gl.constexpr, acc, tile, y_ptr, space, scales, layout, M, N, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """y of a tile: zero-point correction, scales, bias."""
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    _codes_ptr, x_scale_ptr, x_zero_ptr, _k_padded, _scale_stride = space
    w_scale_ptr, colsum_ptr, bias_ptr = scales
    m = gl.arange(0, TILE_M, gl.SliceLayout(0, MMA))
    T: gl.constexpr = cfg.n64_per_warpgroup
    for t in gl.static_range(T):
        row = (warpgroup * T + t) * 64 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
        n = tile * cfg.rows + row
        inside = (row < cfg.rows) & (n < N)
        v = acc[t]
        if scheme.zero_points:
            zero = gl.load(x_zero_ptr + m, mask=m < M, other=0, cache_modifier=".cg")
            v -= gl.expand_dims(zero, 0) * gl.expand_dims(gl.load(colsum_ptr + n, mask=inside, other=0), 1)
        v = v.to(gl.float32)
        if not scheme.scaled_in_groups:
            by_token = gl.load(x_scale_ptr + m, mask=m < M, other=0.0, cache_modifier=".cg")
            by_row = weight_scale(w_scale_ptr, gl.minimum(n, N - 1), 0, layout, scheme)
            v = v * gl.expand_dims(by_token, 0) * gl.expand_dims(by_row, 1)
        if scheme.has_bias:
            v += gl.expand_dims(gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32), 1)
        offsets = gl.expand_dims(m, 0) * N + gl.expand_dims(n, 1)
        mask = gl.expand_dims(m < M, 0) & gl.expand_dims(inside, 1)
        gl.store(y_ptr + offsets, v.to(gl.float16 if scheme.fp16 else gl.bfloat16), mask=mask)


@gluon.jit
def private_space(space, cta, groups, cfg: gl.constexpr):
    """A CTA's copy of `space`."""
    codes_ptr, x_scale_ptr, x_zero_ptr, k_padded, scale_stride = space
    codes_ptr += (cta * cfg.tile_m).to(gl.int64) * k_padded
    return codes_ptr, x_scale_ptr + cta * groups * scale_stride, x_zero_ptr + cta * scale_stride, k_padded, scale_stride


@gluon.jit
def consumer(
    warpgroup: gl.constexpr, x_ptr, y_ptr, buffers, barriers, flags_ptr, space, static, scales, layout, sizes,
    scheme: gl.constexpr, act: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: quantize the CTA's share of x, then multiply and store all of its tiles."""
    full, empty, quantized = barriers
    M, N, num_k_blocks, num_tiles, num_ctas, num_quantizers, K, limit, units, parts, groups = sizes
    cta = gl.program_id(0)
    if cfg.private:
        space = private_space(space, cta, groups, cfg)
    if warpgroup == 0:
        gdc_wait()
        if cfg.private:
            for unit in range(units):
                quantize_unit(unit, parts, x_ptr, space, static, K, limit, act)
            fence_writes()
            mbarrier.arrive(quantized.index(0), count=1)
        else:
            for unit in range(cta, units, num_ctas):
                quantize_unit(unit, parts, x_ptr, space, static, K, limit, act)
            if cta < num_quantizers:
                publish(flags_ptr)
    steps = (num_k_blocks + cfg.k_blocks_per_stage - 1) // cfg.k_blocks_per_stage
    stage = 0
    phase = 0
    for tile in range(cta, num_tiles, num_ctas):
        acc = zero_accumulators(scheme, cfg)
        for step in range(steps):
            factors = stage_factors(warpgroup, step, tile, scales, layout, num_k_blocks, N, scheme, cfg)
            mbarrier.wait(full.index(stage), phase)
            if scheme.fp8:
                acc = mma_stage_fp8(warpgroup, acc, buffers, stage, factors, scheme, cfg)
            else:
                acc = mma_stage_int8(warpgroup, acc, buffers, stage, cfg)
            mbarrier.arrive(empty.index(stage), count=1)
            last = stage + 1 == cfg.stages
            stage = gl.where(last, 0, stage + 1)
            phase = gl.where(last, phase ^ 1, phase)
        store_tile(warpgroup, acc, tile, y_ptr, space, scales, layout, M, N, scheme, cfg)
    if warpgroup == 0 and not cfg.private:
        leave(flags_ptr, num_ctas)


# ---- kernel -------------------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        "M", "N", "k8", "k16", "num_k_blocks", "num_tiles", "num_ctas", "num_quantizers", "units", "parts", "groups", "limit",
        "scale_stride", "block_rows", "row_offset", "scale_columns",
    ]
)  # fmt: skip
def scaled_small_m(
    x_desc, x_scale_desc, w_desc, x_ptr, y_ptr, codes_ptr, x_scale_ptr, x_zero_ptr, flags_ptr, static_scale_ptr, static_zero_ptr,
    w_scale_ptr, colsum_ptr, bias_ptr, M, N, k8, k16, num_k_blocks, num_tiles, num_ctas, num_quantizers, units, parts, groups,
    limit, scale_stride, block_rows, row_offset, scale_columns, scheme: gl.constexpr, act: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """y [M, N] = (codes of x [M, K] @ codes of W.T) scaled, plus bias.

    x_ptr: x [M, 8 * k8]. codes_ptr, x_scale_ptr, x_zero_ptr: see `quantize`; x_desc is of the codes [M, 16 * k16], box
    [tile_m, 128], x_scale_desc of the scales where they change along K, box [1, scale_box], w_desc of W in blocks [blocks * 64,
    128], box [box_rows, 128]. w_scale_ptr: float32 [row blocks, scale_columns]; block_rows, row_offset: rows of W to a scale, and
    of the first block that precede row 0. colsum_ptr: int32 [N]. flags_ptr: two counters, zero before and after.
    """
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    COUNT: gl.constexpr = cfg.stages * K_BLOCKS
    TILE_M: gl.constexpr = cfg.tile_m
    BOX_ROWS: gl.constexpr = cfg.box_rows
    SCALE_BOX: gl.constexpr = cfg.scale_box
    BOXES: gl.constexpr = COUNT * (cfg.rows // BOX_ROWS) + 64 // BOX_ROWS  # MMAs read up to 64 rows past a tile's
    x = gl.allocate_shared_memory(x_desc.dtype, [COUNT, TILE_M, 128], x_desc.layout)
    w = gl.allocate_shared_memory(w_desc.dtype, [BOXES, BOX_ROWS, 128], w_desc.layout)
    x_scales = x
    if scheme.scaled_in_groups:
        x_scales = gl.allocate_shared_memory(gl.float32, [COUNT, 1, SCALE_BOX], x_scale_desc.layout)
    quantized = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    gdc_launch_dependents()
    mbarrier.init(quantized.index(0), count=1)
    barriers = pipeline_barriers(cfg.stages, cfg.num_consumer_warpgroups) + (quantized,)
    K = k8 * 8
    sizes = (M, N, num_k_blocks, num_tiles, num_ctas, num_quantizers, K, limit, units, parts, groups)
    space = (codes_ptr, x_scale_ptr, x_zero_ptr, k16 * 16, scale_stride)
    static, scales = (static_scale_ptr, static_zero_ptr), (w_scale_ptr, colsum_ptr, bias_ptr)
    layout = (block_rows, row_offset, scale_columns)
    buffers, descs = (x, x_scales, w), (x_desc, x_scale_desc, w_desc)
    # fmt: off
    if cfg.num_consumer_warpgroups == 1:
        gl.warp_specialize([
            (consumer, (0, x_ptr, y_ptr, buffers, barriers, flags_ptr, space, static, scales, layout, sizes, scheme, act, cfg)),
            (producer, (descs, buffers, barriers, flags_ptr, sizes, scheme, cfg)),
        ], [1], [40])
    else:
        gl.warp_specialize([
            (consumer, (0, x_ptr, y_ptr, buffers, barriers, flags_ptr, space, static, scales, layout, sizes, scheme, act, cfg)),
            (consumer, (1, x_ptr, y_ptr, buffers, barriers, flags_ptr, space, static, scales, layout, sizes, scheme, act, cfg)),
            (producer, (descs, buffers, barriers, flags_ptr, sizes, scheme, cfg)),
        ], [4, 1], [232, 40])
    # fmt: on
