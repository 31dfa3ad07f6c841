# mypy: ignore-errors
"""y = quantized x times 4-bit W for M <= 32, bandwidth-bound, by wgmma of 8 bits with W in registers as operand A.

A tile is cfg.n16 16-row tiles of W, as many as give all SMs equally many; the grid is persistent over tiles. A producer warp
loads packed codes, their scales and codes of x by TMA into a multi-stage pipeline. Two consumer warpgroups share K: each takes
every other stage of a tile, all rows of it (`w4a8_fragment`), and the first adds up the accumulators of both. The number of
stages is even, so that a stage always belongs to the same warpgroup: else one might wait for a stage's next phase before the
load of this one has completed, and a wait by parity would take the phase before for it.
Tensor cores add E4M3 products with few bits, so the product of every 128 columns, or of a scale group, is added to float32
accumulators, scaled first where weight scales change along K; int8 products are exact in int32.

x is quantized by the first warpgroups of all CTAs, as in `scaled_small_m`; or with cfg.resident, for M = 1, each CTA quantizes x
into shared memory for itself, all of its consumer warps together.

`scheme` is a `w4a8_scheme.W4A8Traits`, `act` a `scaled_scheme.ActTraits`, `cfg` a `w4a8_config.W4A8SmallMConfig`. Tuples:
sizes: M, N, K blocks of 128 columns, tiles, CTAs, CTAs that quantize, K, limit of x, units and parts (`quantize`), 16-row tiles
of W, scale groups of a row.
space, static: see `quantize`. buffers: x, W, scales, reduction, largest values of x.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bitline.kernels.hopper.device.common import pipeline_barriers
from bitline.kernels.hopper.device.quantize import encode, leave, publish, quantize_unit, token_scale, wait_for_count
from bitline.kernels.hopper.device.w4a8_fragment import block_fragments, load_row_scales, load_words, reinterpret

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.8
# Both consumer warpgroups; Triton takes the first few named barriers for its own
SYNC_CONSUMERS = gl.constexpr("fence.proxy.async; bar.sync 8,256; // $0 $1")
WARPGROUPS = gl.constexpr(2)  # that share K
CHUNK = gl.constexpr(2048)  # columns of x that a warpgroup quantizes at a time, with cfg.resident


@gluon.jit
def sync_consumers(any_number):
    """Wait for both consumer warpgroups; their writes to shared memory are seen by all, and by wgmma."""
    gl.inline_asm_elementwise(SYNC_CONSUMERS, "=r,r", [any_number], dtype=gl.int32, is_pure=False, pack=1)


# ---- producer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_weights(descs, full, buffers, stage, tile, step, sizes, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of W and its scales of one stage; expect the bytes of all of the stage. Past the last K block, x is
    zero; past the last row, y is not stored."""
    _x_desc, w_desc, scale_desc = descs
    num_k_blocks, num_n16, groups = sizes[2], sizes[10], sizes[11]
    K_BLOCKS: gl.constexpr = cfg.k_blocks
    N16: gl.constexpr = cfg.n16
    X_BYTES: gl.constexpr = 0 if cfg.resident else cfg.tile_m * 128 * K_BLOCKS
    SCALE_BYTES: gl.constexpr = 64 * cfg.scale_entries if scheme.scaled_in_groups else 0
    mbarrier.expect(full.index(stage), X_BYTES + N16 * (1024 * K_BLOCKS + SCALE_BYTES))
    for i in gl.static_range(N16):
        n16 = gl.minimum(tile * N16 + i, num_n16 - 1)
        async_load(w_desc, [n16 * num_k_blocks + step * K_BLOCKS, 0], full.index(stage), buffers[1].index(stage * N16 + i))
        if scheme.scaled_in_groups:
            entry = n16 * groups + step * K_BLOCKS * scheme.groups_per_k_block // scheme.k_blocks_per_scale
            async_load(scale_desc, [entry, 0], full.index(stage), buffers[2].index(stage * N16 + i))


@gluon.jit
def load_x(x_desc, full, x, stage, step, cfg: gl.constexpr):
    """Issue the TMA loads of x of one stage."""
    if not cfg.resident:
        K_BLOCKS: gl.constexpr = cfg.k_blocks
        for b in gl.static_range(K_BLOCKS):
            async_load(x_desc, [0, (step * K_BLOCKS + b) * 128], full.index(stage), x.index(stage * K_BLOCKS + b))


@gluon.jit
def producer(descs, buffers, barriers, flags_ptr, sizes, scheme: gl.constexpr, cfg: gl.constexpr):
    """The producer warp: load the stages of all of the CTA's tiles."""
    full, empty = barriers
    num_k_blocks, num_tiles, num_ctas, num_quantizers = sizes[2], sizes[3], sizes[4], sizes[5]
    cta = gl.program_id(0)
    steps = (num_k_blocks + cfg.k_blocks - 1) // cfg.k_blocks
    total = (num_tiles - cta + num_ctas - 1) // num_ctas * steps
    prefetched = gl.minimum(cfg.stages, total)
    for i in range(prefetched):
        load_weights(descs, full, buffers, i, cta + i // steps * num_ctas, i % steps, sizes, scheme, cfg)
    if not cfg.resident:
        gdc_wait()  # the counters are the stream's, and so the previous kernel's as well
        wait_for_count(flags_ptr, num_quantizers)
        for i in range(prefetched):
            load_x(descs[0], full, buffers[0], i, i % steps, cfg)
    stage = 0
    phase = 0
    for i in range(prefetched, total):
        mbarrier.wait(empty.index(stage), phase)
        load_weights(descs, full, buffers, stage, cta + i // steps * num_ctas, i % steps, sizes, scheme, cfg)
        load_x(descs[0], full, buffers[0], stage, i % steps, cfg)
        last = stage + 1 == cfg.stages
        stage = gl.where(last, 0, stage + 1)
        phase = gl.where(last, phase ^ 1, phase)


# ---- quantization of one row in shared memory ---------------------------------------------------------------------------


@gluon.jit
def quantize_resident(
    warpgroup: gl.constexpr, x_ptr, buffers, static, K, limit, act: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Quantize x [1, K] into the first row of each K block of shared memory; its scale. Loads are all in flight together."""
    x, amax = buffers[0], buffers[4]
    CHUNKS: gl.constexpr = (cfg.x_chunks - warpgroup + WARPGROUPS - 1) // WARPGROUPS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = gl.expand_dims(gl.arange(0, CHUNK // 128, gl.SliceLayout(1, L)), 1)
    offs = rows * 128 + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, L)), 0)
    gdc_wait()
    values = ()
    for i in gl.static_range(CHUNKS):
        k = (warpgroup + i * WARPGROUPS) * CHUNK + offs
        values = values + (gl.load(x_ptr + k, mask=k < K, other=0.0).to(gl.float32),)
    if act.granularity == "token":
        high = 0.0
        for i in gl.static_range(CHUNKS):
            high = gl.maximum(high, gl.max(gl.max(gl.abs(values[i]), 1), 0))
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        amax.index(warpgroup).store(gl.full([32], 0.0, gl.float32, ONE) + high)
        sync_consumers(K)
        for i in gl.static_range(WARPGROUPS):
            high = gl.maximum(high, gl.max(amax.index(i).load(ONE), 0))
        scale, _zero = token_scale(high, 0.0, limit, act)
    else:
        scale = gl.load(static[0])
    inverse = gl.div_rn(1.0, scale)
    for i in gl.static_range(CHUNKS):
        divisor = gl.zeros_like(values[i]) + scale
        codes = encode(values[i], divisor, gl.zeros_like(values[i]) + inverse, 0.0, act)
        chunk = reinterpret(x.index((warpgroup + i * WARPGROUPS) * (CHUNK // 128)), gl.int8, [CHUNK // 128, 1024], PLAIN)
        chunk.slice(0, 128, dim=1).store(codes)
    sync_consumers(K)
    return scale


# ---- consumer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def zero_accumulators(scheme: gl.constexpr, cfg: gl.constexpr):
    """A warpgroup's accumulators: one tensor for each 64 rows of a tile."""
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    PARTS: gl.constexpr = (cfg.n16 + 3) // 4
    acc = ()
    for _t in gl.static_range(PARTS):
        acc = acc + (gl.zeros([64, TILE_M], gl.int32 if scheme.exact_int32 else gl.float32, MMA),)
    return acc


@gluon.jit
def add_product(acc, p, x_sums, scale_smem, group: gl.constexpr, scheme: gl.constexpr, cfg: gl.constexpr):
    """acc plus a product, scaled where weight scales change along K. group: of the stage. x_sums: see `sums_of_x`."""
    if scheme.odd:
        p -= x_sums
    if scheme.scaled_in_groups:
        ENTRY: gl.constexpr = group // scheme.k_blocks_per_scale
        s = load_row_scales(scale_smem.slice(ENTRY * 16, 16, dim=1), cfg.tile_m)
        return acc + p.to(gl.float32) * s
    else:
        return acc + p


@gluon.jit
def sums_of_x(x_block, scheme: gl.constexpr, cfg: gl.constexpr):
    """Where codes of W are unpacked to 2 * code + 1, what that 1 adds to each product: sums of codes of x over a scale group, in
    all rows of a product, by MMAs with ones. Tensors in flight."""
    TILE_M: gl.constexpr = cfg.tile_m
    GROUPS: gl.constexpr = scheme.groups_per_k_block
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    out = ()
    if scheme.odd:
        ones = gl.full([64, 128 // GROUPS], 1, gl.int8, A).to(gl.float8e4nv, bitcast=True)  # 2**-9
        zero = gl.zeros([64, TILE_M], gl.float32, MMA)
        for i in gl.static_range(GROUPS):
            columns = x_block.slice(i * (128 // GROUPS), 128 // GROUPS, dim=1)
            out = out + (warpgroup_mma(ones, columns.permute([1, 0]), zero, use_acc=False, is_async=True),)
    else:
        for _i in gl.static_range(GROUPS):
            out = out + (0,)
    return out


@gluon.jit
def part_products(
    acc, part: gl.constexpr, b: gl.constexpr, buffers, stage, x_block, x_sums, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """MMAs in flight of a 64-row part of a tile with a K block, one for each scale group; and acc plus them, without
    cfg.overlap."""
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    K_BLOCKS: gl.constexpr = cfg.k_blocks
    GROUPS: gl.constexpr = scheme.groups_per_k_block
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = reinterpret(buffers[1].index(stage * cfg.n16 + part * 4), gl.int32, [4, K_BLOCKS * 256], PLAIN)
    block = words.slice(b * 256, 256, dim=1)
    fragments = block_fragments((load_words(block, 0), load_words(block, 1)), TILE_M, scheme)
    zero = gl.zeros([64, TILE_M], gl.float32 if scheme.fp8 else gl.int32, MMA)
    out = ()
    for i in gl.static_range(GROUPS):
        columns = x_block.slice(i * (128 // GROUPS), 128 // GROUPS, dim=1)
        p = warpgroup_mma(fragments[i], columns.permute([1, 0]), zero, use_acc=False, is_async=True)
        if cfg.overlap:
            out = out + (p,)
        else:
            p = warpgroup_mma_wait(0, deps=[p])
            scales = stage_scales(part, buffers, stage, scheme, cfg)
            acc = add_product(acc, p, x_sums[i], scales, b * GROUPS + i, scheme, cfg)
    return out, acc


@gluon.jit
def stage_scales(part: gl.constexpr, buffers, stage, scheme: gl.constexpr, cfg: gl.constexpr):
    """Scales of a 64-row part of a tile in a stage, float32 [4, entries * 16] in shared memory."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if scheme.scaled_in_groups:
        return reinterpret(buffers[2].index(stage * cfg.n16 + part * 4), gl.float32, [4, cfg.scale_entries * 16], PLAIN)
    else:
        return buffers[2]


@gluon.jit
def add_products(
    acc, products, x_sums, part: gl.constexpr, b: gl.constexpr, buffers, stage, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """acc plus the products of a part and K block."""
    GROUPS: gl.constexpr = scheme.groups_per_k_block
    scales = stage_scales(part, buffers, stage, scheme, cfg)
    for i in gl.static_range(GROUPS):
        acc = add_product(acc, products[i], x_sums[i], scales, b * GROUPS + i, scheme, cfg)
    return acc


@gluon.jit
def mma_stage(acc, buffers, stage, step, scheme: gl.constexpr, cfg: gl.constexpr):
    """Accumulators after a stage. With cfg.overlap a product is added while the next one's MMA runs."""
    K_BLOCKS: gl.constexpr = cfg.k_blocks
    PARTS: gl.constexpr = (cfg.n16 + 3) // 4
    GROUPS: gl.constexpr = scheme.groups_per_k_block
    IN_FLIGHT: gl.constexpr = 2 * GROUPS if scheme.odd else GROUPS
    x = buffers[0]
    x_sums = ()
    pending = ()
    for b in gl.static_range(K_BLOCKS):
        x_block = x.index(step * K_BLOCKS + b) if cfg.resident else x.index(stage * K_BLOCKS + b)
        sums = sums_of_x(x_block, scheme, cfg)
        if scheme.odd and not cfg.overlap:
            sums = wait_products(sums, 0)
        for t in gl.static_range(PARTS):
            products, v = part_products(acc[t], t, b, buffers, stage, x_block, sums, scheme, cfg)
            acc = replace(acc, t, v)
            if cfg.overlap:
                if t > 0:
                    acc = finish_part(acc, pending, x_sums, t - 1, b, GROUPS, buffers, stage, scheme, cfg)
                else:
                    if b > 0:
                        acc = finish_part(acc, pending, x_sums, PARTS - 1, b - 1, IN_FLIGHT, buffers, stage, scheme, cfg)
                    x_sums = sums
                    if scheme.odd:
                        x_sums = wait_products(sums, GROUPS)
                pending = products
    if cfg.overlap:
        acc = finish_part(acc, pending, x_sums, PARTS - 1, K_BLOCKS - 1, 0, buffers, stage, scheme, cfg)
    return acc


@gluon.jit
def finish_part(
    acc, products, x_sums, part: gl.constexpr, b: gl.constexpr, in_flight: gl.constexpr, buffers, stage, scheme: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Accumulators plus the products of a part and K block, once they are there; in_flight: MMAs issued after them."""
    done = wait_products(products, in_flight)
    return replace(acc, part, add_products(acc[part], done, x_sums, part, b, buffers, stage, scheme, cfg))


@gluon.jit
def wait_products(products, in_flight: gl.constexpr):
    """Wait for products; those issued after them may be in flight."""
    if len(products) == 1:
        return (warpgroup_mma_wait(in_flight, deps=[products[0]]),)
    else:
        return warpgroup_mma_wait(in_flight, deps=products)


@gluon.jit
def replace(values, i: gl.constexpr, value):
    """A tuple with its i-th element replaced."""
    out = ()
    for j in gl.static_range(len(values)):
        if j == i:
            out = out + (value,)
        else:
            out = out + (values[j],)
    return out


@gluon.jit
def reduce_warpgroups(warpgroup: gl.constexpr, acc, buffers, N, scheme: gl.constexpr, cfg: gl.constexpr):
    """The sums of both warpgroups' accumulators, in the first one."""
    PARTS: gl.constexpr = (cfg.n16 + 3) // 4
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    if warpgroup == 1:
        for t in gl.static_range(PARTS):
            buffers[3].index(t).store(acc[t])
    sync_consumers(N)
    if warpgroup == 0:
        out = ()
        for t in gl.static_range(PARTS):
            out = out + (acc[t] + buffers[3].index(t).load(MMA),)
        acc = out
    sync_consumers(N)
    return acc


@gluon.jit
def store_tile(acc, tile, y_ptr, token_scales, w_scale_ptr, bias_ptr, M, N, scheme: gl.constexpr, cfg: gl.constexpr):
    """y of a tile: scales, bias. token_scales: a pointer, or with cfg.resident the scale."""
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    PARTS: gl.constexpr = (cfg.n16 + 3) // 4
    m = gl.arange(0, TILE_M, gl.SliceLayout(0, MMA))
    if cfg.resident:
        by_token = token_scales
    else:
        by_token = gl.expand_dims(gl.load(token_scales + m, mask=m < M, other=0.0, cache_modifier=".cg"), 0)
    for t in gl.static_range(PARTS):
        row = t * 64 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
        n = tile * (cfg.n16 * 16) + row
        inside = (row < cfg.n16 * 16) & (n < N)
        v = acc[t].to(gl.float32) * by_token
        if not scheme.scaled_in_groups:  # a table of 16 rows to an entry, rows g and g + 8 side by side
            at = (n & -16) + (n & 7) * 2 + ((n >> 3) & 1)
            v = v * gl.expand_dims(gl.load(w_scale_ptr + at, mask=inside, other=0.0), 1)
        if scheme.has_bias:
            v += gl.expand_dims(gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32), 1)
        offsets = gl.expand_dims(m, 0) * N + gl.expand_dims(n, 1)
        mask = gl.expand_dims(m < M, 0) & gl.expand_dims(inside, 1)
        gl.store(y_ptr + offsets, v.to(gl.float16 if scheme.fp16 else gl.bfloat16), mask=mask)


@gluon.jit
def consumer(
    warpgroup: gl.constexpr, x_ptr, y_ptr, buffers, barriers, flags_ptr, space, static, scales, sizes, scheme: gl.constexpr,
    act: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: quantize its share of x, then multiply its share of the stages of all of the CTA's tiles."""
    full, empty = barriers
    M, N, num_k_blocks, num_tiles, num_ctas, num_quantizers, K, limit, units, parts, _n16, _groups = sizes
    cta = gl.program_id(0)
    token_scales = space[1]
    if cfg.resident:
        token_scales = quantize_resident(warpgroup, x_ptr, buffers, static, K, limit, act, cfg)
    elif warpgroup == 0:
        gdc_wait()
        for unit in range(cta, units, num_ctas):
            quantize_unit(unit, parts, x_ptr, space, static, K, limit, act)
        if cta < num_quantizers:
            publish(flags_ptr)
    steps = (num_k_blocks + cfg.k_blocks - 1) // cfg.k_blocks
    first = 0  # the tile's first stage, counted from the CTA's first one
    for tile in range(cta, num_tiles, num_ctas):
        acc = zero_accumulators(scheme, cfg)
        for step in range((first + warpgroup) % WARPGROUPS, steps, WARPGROUPS):
            count = first + step  # even or odd, as its stage is, since stages are even
            stage = count % cfg.stages
            mbarrier.wait(full.index(stage), (count // cfg.stages) & 1)
            acc = mma_stage(acc, buffers, stage, step, scheme, cfg)
            mbarrier.arrive(empty.index(stage), count=1)
        first += steps
        acc = reduce_warpgroups(warpgroup, acc, buffers, N, scheme, cfg)
        if warpgroup == 0:
            store_tile(acc, tile, y_ptr, token_scales, scales[0], scales[1], M, N, scheme, cfg)
    if warpgroup == 0 and not cfg.resident:
        leave(flags_ptr, num_ctas)


# ---- kernel -------------------------------------------------------------------------------------------------------------


@gluon.jit
def allocate_buffers(x_desc, w_desc, scale_desc, scheme: gl.constexpr, cfg: gl.constexpr):
    """Shared memory: `buffers`. MMAs read up to 64 rows past a tile's."""
    TILE_M: gl.constexpr = cfg.tile_m
    N16: gl.constexpr = cfg.n16
    PARTS: gl.constexpr = (N16 + 3) // 4
    BOXES: gl.constexpr = cfg.stages * N16 + PARTS * 4 - N16
    X_BLOCKS: gl.constexpr = cfg.x_chunks * (CHUNK // 128) if cfg.resident else cfg.stages * cfg.k_blocks
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x = gl.allocate_shared_memory(x_desc.dtype, [X_BLOCKS, TILE_M, 128], x_desc.layout)
    w = gl.allocate_shared_memory(gl.int32, [BOXES, cfg.k_blocks, 256], w_desc.layout)
    scales = w
    if scheme.scaled_in_groups:
        scales = gl.allocate_shared_memory(gl.float32, [BOXES, cfg.scale_entries, 16], scale_desc.layout)
    reduction = gl.allocate_shared_memory(gl.int32 if scheme.exact_int32 else gl.float32, [PARTS, 64, TILE_M], PLAIN)
    amax = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return x, w, scales, reduction, amax


@gluon.jit(
    do_not_specialize=[
        "M", "N", "k8", "k16", "num_k_blocks", "num_tiles", "num_ctas", "num_quantizers", "units", "parts", "limit",
        "scale_stride", "num_n16", "groups",
    ]
)  # fmt: skip
def w4a8_small_m(
    x_desc, w_desc, scale_desc, x_ptr, y_ptr, codes_ptr, x_scale_ptr, x_zero_ptr, flags_ptr, static_scale_ptr, static_zero_ptr,
    w_scale_ptr, bias_ptr, M, N, k8, k16, num_k_blocks, num_tiles, num_ctas, num_quantizers, units, parts, limit, scale_stride,
    num_n16, groups, scheme: gl.constexpr, act: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """y [M, N] = (codes of x [M, K] @ codes of W.T) scaled, plus bias.

    x_ptr: x [M, 8 * k8]. codes_ptr, x_scale_ptr, x_zero_ptr: see `quantize`. Tensor maps: x_desc of the codes [M, 16 * k16], box
    [tile_m, 128]; w_desc of packed int32 [num_n16 * num_k_blocks, 256], box [k_blocks, 256]; scale_desc of the scales float32
    [num_n16 * groups, 16], box [scale_entries, 16]. w_scale_ptr: the same scales. flags_ptr: two counters, zero before and after.
    """
    buffers = allocate_buffers(x_desc, w_desc, scale_desc, scheme, cfg)
    gdc_launch_dependents()
    barriers = pipeline_barriers(cfg.stages, 1)
    K = k8 * 8
    sizes = (M, N, num_k_blocks, num_tiles, num_ctas, num_quantizers, K, limit, units, parts, num_n16, groups)
    space, static = (codes_ptr, x_scale_ptr, x_zero_ptr, k16 * 16, scale_stride), (static_scale_ptr, static_zero_ptr)
    scales, descs = (w_scale_ptr, bias_ptr), (x_desc, w_desc, scale_desc)
    # fmt: off
    gl.warp_specialize([
        (consumer, (0, x_ptr, y_ptr, buffers, barriers, flags_ptr, space, static, scales, sizes, scheme, act, cfg)),
        (consumer, (1, x_ptr, y_ptr, buffers, barriers, flags_ptr, space, static, scales, sizes, scheme, act, cfg)),
        (producer, (descs, buffers, barriers, flags_ptr, sizes, scheme, cfg)),
    ], [4, 1], [232, 40])
    # fmt: on
