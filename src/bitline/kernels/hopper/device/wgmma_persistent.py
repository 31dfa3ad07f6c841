# mypy: ignore-errors
"""GEMM of M > 16: persistent, warp-specialized, by wgmma with W as operand A, dequantized in registers.

A producer warp loads x, packed weights and scales by TMA into a multi-stage pipeline. Each consumer warpgroup owns
n64_per_warpgroup 64-row tiles of W against tile_m rows of x, or against tile_m + tile_m_extra as two MMAs, for tile sizes of
96, 160, 192 and 320 along M (shared-memory shapes must be powers of two). The next K block of W is dequantized and scaled, in the
input's dtype, while the asynchronous MMA of the one before runs; x is operand B, in shared memory. The epilogue stores through
shared memory and TMA, which clips to M and N.

Scheduling is stream-K, with tiles rasterized in groups along N: each CTA has `whole_tiles` tiles of its own (data-parallel); the
remaining ones are split evenly along K over all CTAs and reduced in CTA order, so that results are deterministic
(`epilogue`). `flags_ptr` counts arrivals of partials and is zero again at the end.

`scheme` is a `traits.SchemeTraits`, `cfg` a `traits.WgmmaTraits`. Tuples:
schedule: stages per tile, tiles along M, tiles along N, CTAs, whole tiles per CTA, stages of all stream-K tiles.
work: tile, its stages k0 and k1, its indices along N and M.
buffers: x, extra x, packed weights, scales, zero points; one buffer per stage and K block.
barriers: full, empty. pointers: partials, flags, bias, alpha.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bitline.kernels.hopper.device.common import pipeline_barriers
from bitline.kernels.hopper.device.epilogue import epilogue, epilogue_distributed

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.8
# Named barriers of two warpgroups, for the ping-pong schedule; Triton takes the first few for its own
PINGPONG_SYNC = gl.constexpr(tuple(f"bar.sync {8 + i},256; // $0 $1" for i in range(4)))
PINGPONG_ARRIVE = gl.constexpr(tuple(f"bar.arrive {8 + i},256; // $0 $1" for i in range(4)))


# ---- tile scheduler -----------------------------------------------------------------------------------------------------


@gluon.jit
def stream_k_range(cta, schedule):
    """Stages [u0, u1) of the stream-K tiles that a CTA has, and the number of tiles that they lie in."""
    stages_per_tile, _tiles_m, _tiles_n, num_ctas, _whole_tiles, stream_k_stages = schedule
    u0 = (cta * stream_k_stages) // num_ctas
    u1 = ((cta + 1) * stream_k_stages) // num_ctas
    return u0, u1, gl.where(u1 > u0, (u1 - 1) // stages_per_tile - u0 // stages_per_tile + 1, 0)


@gluon.jit
def get_work(s, cta, u0, u1, schedule, cfg: gl.constexpr):
    """The s-th work unit of a CTA: tile, stages [k0, k1) of it, and its indices along N and M, rasterized in groups along N."""
    stages_per_tile, tiles_m, tiles_n, num_ctas, whole_tiles, _stream_k_stages = schedule
    j = s - whole_tiles
    t0 = u0 // stages_per_tile
    whole = s < whole_tiles
    tile = gl.where(whole, cta + s * num_ctas, whole_tiles * num_ctas + t0 + j)
    k0 = gl.where(whole, 0, gl.where(j > 0, 0, u0 - t0 * stages_per_tile))
    k1 = gl.where(whole, stages_per_tile, gl.minimum(stages_per_tile, u1 - (t0 + j) * stages_per_tile))
    group_tiles = cfg.raster_group_n * tiles_m
    group = tile // group_tiles
    r = tile - group * group_tiles
    group_n = gl.minimum(tiles_n - group * cfg.raster_group_n, cfg.raster_group_n)
    pid_n = group * cfg.raster_group_n + r % group_n
    pid_m = r // group_n
    return tile, k0, k1, pid_n, pid_m


@gluon.jit
def advance(stage, phase, NUM_STAGES: gl.constexpr):
    """The next pipeline stage and its mbarrier phase."""
    last = stage + 1 == NUM_STAGES
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


# ---- ping-pong ----------------------------------------------------------------------------------------------------------


@gluon.jit
def give_first_turn(turn, warpgroup: gl.constexpr, cfg: gl.constexpr):
    """With the ping-pong schedule, the last warpgroup lets the first one issue its MMAs."""
    if cfg.pingpong and warpgroup == cfg.num_consumer_warpgroups - 1:
        gl.inline_asm_elementwise(PINGPONG_ARRIVE[0], "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(turn, warpgroup: gl.constexpr, cfg: gl.constexpr):
    """With the ping-pong schedule, wait until the other warpgroup has issued its MMAs.

    turn: any number, since inline PTX needs an operand.
    """
    if cfg.pingpong:
        gl.inline_asm_elementwise(PINGPONG_SYNC[warpgroup], "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(turn, more, warpgroup: gl.constexpr, cfg: gl.constexpr):
    """With the ping-pong schedule, let the other warpgroup issue its MMAs. more: whether any follow."""
    NEXT: gl.constexpr = (warpgroup + 1) % cfg.num_consumer_warpgroups
    if cfg.pingpong:  # noqa: SIM102  # a constant, unlike what follows
        if warpgroup < cfg.num_consumer_warpgroups - 1 or more:
            gl.inline_asm_elementwise(PINGPONG_ARRIVE[NEXT], "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)


# ---- producer -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_weights(descs, full, buffers, stage, k, pid_n, _stages_per_tile, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of packed weights, scales and zero points of one stage; expect its bytes, those of x included."""
    w_desc, scale_desc, zero_desc = descs
    _x, _x_extra, w, scales, zeros = buffers
    N64: gl.constexpr = cfg.num_consumer_warpgroups * cfg.n64_per_warpgroup
    INT32: gl.constexpr = 128 * scheme.planes  # packed int32 of a 16-row tile and K block
    ENTRY: gl.constexpr = 16 if scheme.fp32_scales else 8  # int32 or float32 of a 16-row tile's scales
    TABLE_BYTES: gl.constexpr = ENTRY * scheme.scales_per_k_block + (4 * scheme.scales_per_k_block if scheme.zero_points else 0)
    X_BYTES: gl.constexpr = (cfg.tile_m + cfg.tile_m_extra) * 128
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    mbarrier.expect(full.index(stage), K_BLOCKS * (X_BYTES + N64 * 16 * (INT32 + TABLE_BYTES)))
    for b in gl.static_range(K_BLOCKS):
        k_block = k * K_BLOCKS + b
        if scheme.k_tiles_per_scale > 0:
            entry = k_block * scheme.scales_per_k_block // scheme.k_tiles_per_scale
        else:
            entry = k_block * 0
        async_load(w_desc, [pid_n * (N64 * 4), k_block * INT32], full.index(stage), w.index(stage * K_BLOCKS + b))
        async_load(scale_desc, [pid_n * (N64 * 4), entry * ENTRY], full.index(stage), scales.index(stage * K_BLOCKS + b))
        if scheme.zero_points:
            async_load(zero_desc, [pid_n * (N64 * 4), entry * 8], full.index(stage), zeros.index(stage * K_BLOCKS + b))


@gluon.jit
def load_x(descs, full, buffers, stage, k, pid_m, scheme: gl.constexpr, cfg: gl.constexpr):
    """Issue the TMA loads of x of one stage."""
    x_desc, x_extra_desc = descs
    x, x_extra, _w, _scales, _zeros = buffers
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    for b in gl.static_range(K_BLOCKS):
        m = pid_m * (cfg.tile_m + cfg.tile_m_extra)
        column = (k * K_BLOCKS + b) * 64
        async_load(x_desc, [m, column], full.index(stage), x.index(stage * K_BLOCKS + b))
        if cfg.tile_m_extra > 0:
            async_load(x_extra_desc, [m + cfg.tile_m, column], full.index(stage), x_extra.index(stage * K_BLOCKS + b))


@gluon.jit
def produce(
    load_weights: gl.constexpr, load_x: gl.constexpr, x_descs, w_descs, buffers, barriers, schedule, PDL: gl.constexpr,
    scheme: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """The producer warp: load the stages of all of the CTA's work; with PDL weights of the first stages before x is there.

    load_weights(w_descs, full, buffers, stage, k, pid_n, stages_per_tile, scheme, cfg) and load_x(x_descs, full, buffers, stage,
    k, pid_m, scheme, cfg) issue the TMA loads of one stage; the first one expects the bytes of both.
    """
    full, empty = barriers
    stages_per_tile, _tiles_m, _tiles_n, _num_ctas, whole_tiles, _stream_k_stages = schedule
    cta = gl.program_id(0)
    u0, u1, stream_k_tiles = stream_k_range(cta, schedule)
    stage = 0
    phase = 1
    prefetched = 0
    if PDL:  # only x depends on the previous kernel
        _tile, k0, k1, pid_n, pid_m = get_work(0, cta, u0, u1, schedule, cfg)
        prefetched = gl.minimum(cfg.stages, k1 - k0)
        for i in range(0, prefetched):
            load_weights(w_descs, full, buffers, i, k0 + i, pid_n, stages_per_tile, scheme, cfg)
        gdc_wait()
        for i in range(0, prefetched):
            load_x(x_descs, full, buffers, i, k0 + i, pid_m, scheme, cfg)
        all_stages = prefetched == cfg.stages
        stage = gl.where(all_stages, 0, prefetched)
        phase = gl.where(all_stages, 0, 1)
    for s in range(whole_tiles + stream_k_tiles):
        _tile, k0, k1, pid_n, pid_m = get_work(s, cta, u0, u1, schedule, cfg)
        if PDL:
            k0 = gl.where(s == 0, k0 + prefetched, k0)
        for k in range(k0, k1):
            mbarrier.wait(empty.index(stage), phase)
            load_weights(w_descs, full, buffers, stage, k, pid_n, stages_per_tile, scheme, cfg)
            load_x(x_descs, full, buffers, stage, k, pid_m, scheme, cfg)
            stage, phase = advance(stage, phase, cfg.stages)


@gluon.jit
def producer(x_descs, w_descs, buffers, barriers, schedule, scheme: gl.constexpr, cfg: gl.constexpr):
    """The producer warp: see `produce`."""
    produce(load_weights, load_x, x_descs, w_descs, buffers, barriers, schedule, cfg.pdl, scheme, cfg)


# ---- consumer: dequantization -------------------------------------------------------------------------------------------


@gluon.jit
def broadcast_table(s, PER_BLOCK: gl.constexpr, W_LAYOUT: gl.constexpr):
    """[4, 8 * PER_BLOCK] entries to a shape that broadcasts against packed int32 [4 warps, 4 k16 steps, 8 rows, 4 lanes]."""
    s = gl.reshape(s, [4, PER_BLOCK, 8])
    if PER_BLOCK == 2:
        s = gl.reshape(gl.join(s, s), [4, 2, 8, 2])
        s = gl.reshape(gl.permute(s, [0, 1, 3, 2]), [4, 4, 8])
    return gl.expand_dims(gl.convert_layout(s, gl.SliceLayout(3, W_LAYOUT), assert_trivial=True), 3)


@gluon.jit
def load_table(smem, n64: gl.constexpr, PER_BLOCK: gl.constexpr):
    """Entries of a 64-row tile's four 16-row tiles, [4, 8 * PER_BLOCK]: lane 4*g + q gets those of row g."""
    if PER_BLOCK == 1:
        REG: gl.constexpr = []
    elif PER_BLOCK == 2:
        REG: gl.constexpr = [[0, 8]]
    else:
        REG: gl.constexpr = [[0, 8], [0, 16]]
    LANE: gl.constexpr = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    L: gl.constexpr = gl.DistributedLinearLayout(REG, LANE, [[1, 0], [2, 0]], [], [4, 8 * PER_BLOCK])
    return smem.slice(n64 * 4, 4, dim=0).load(L)


@gluon.jit
def load_scale_pairs(smem, n64: gl.constexpr, factors, scheme: gl.constexpr):
    """Scales of rows g and of rows g + 8 as pairs of the input's dtype.

    scheme.folds_exponent_bias: times `factors`, followed by the addends for the implicit zero point (`ptx.folded_scale_pairs`).
    """
    PTX: gl.constexpr = scheme.scale_pairs_ptx
    PAIRS: gl.constexpr = 4 if scheme.code_format == "u4" or scheme.code_format == "u8" else 2
    if scheme.fp32_scales:
        if scheme.scales_per_k_block == 1:
            REG: gl.constexpr = [[0, 1]]
        elif scheme.scales_per_k_block == 2:
            REG: gl.constexpr = [[0, 1], [0, 16]]
        else:
            REG: gl.constexpr = [[0, 1], [0, 16], [0, 32]]
        LANE: gl.constexpr = [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]]
        L: gl.constexpr = gl.DistributedLinearLayout(REG, LANE, [[1, 0], [2, 0]], [], [4, 16 * scheme.scales_per_k_block])
        lo, hi = gl.split(gl.reshape(smem.slice(n64 * 4, 4, dim=0).load(L), [4, 8 * scheme.scales_per_k_block, 2]))
        if scheme.folds_exponent_bias:
            pairs = gl.inline_asm_elementwise(
                PTX[0], PTX[1], [lo, hi, factors[0], factors[1]], dtype=(gl.int32,) * PAIRS, is_pure=True, pack=1
            )  # fmt: skip
        else:
            lo = gl.inline_asm_elementwise(PTX[0], PTX[1], [lo], dtype=gl.int32, is_pure=True, pack=1)
            hi = gl.inline_asm_elementwise(PTX[0], PTX[1], [hi], dtype=gl.int32, is_pure=True, pack=1)
            pairs = (lo, hi)
    else:
        both = load_table(smem, n64, scheme.scales_per_k_block)
        if scheme.folds_exponent_bias:
            pairs = gl.inline_asm_elementwise(
                PTX[0], PTX[1], [both, factors[0], factors[1]], dtype=(gl.int32,) * PAIRS, is_pure=True, pack=1
            )  # fmt: skip
        else:
            pairs = gl.inline_asm_elementwise(PTX[0], PTX[1], [both], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return pairs


@gluon.jit
def scale_factors(alpha_ptr, scheme: gl.constexpr):
    """2**F of `linear._fold_fragment_exponent` as bf16 pairs for rows g and g + 8, whose 4-bit codes lie four bits higher."""
    bits = gl.load(alpha_ptr + 1).to(gl.int32, bitcast=True)
    other = bits - (4 << 23 if scheme.code_format == "u4" or scheme.code_format == "z4" else 0)
    return bits | (bits >> 16), other | (other >> 16)


@gluon.jit
def load_scales(buffers, buffer, n64: gl.constexpr, factors, scheme: gl.constexpr):
    """Zero points, scale pairs and the addends of `load_scale_pairs` for a K block of a 64-row tile, shaped like its fragment."""
    W_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4, 1, 1], [1, 1, 8, 4], [4, 1, 1, 1], [3, 2, 1, 0])
    PER_BLOCK: gl.constexpr = scheme.scales_per_k_block
    _x, _x_extra, _w, scale_smem, zero_smem = buffers
    pairs = load_scale_pairs(scale_smem.index(buffer), n64, factors, scheme)
    out = (broadcast_table(pairs[0], PER_BLOCK, W_LAYOUT), broadcast_table(pairs[1], PER_BLOCK, W_LAYOUT))
    if scheme.folds_exponent_bias and (scheme.code_format == "u4" or scheme.code_format == "u8"):
        out = out + (broadcast_table(pairs[2], PER_BLOCK, W_LAYOUT), broadcast_table(pairs[3], PER_BLOCK, W_LAYOUT))
    if scheme.zero_points:
        zeros = load_table(zero_smem.index(buffer), n64, PER_BLOCK).to(gl.int32)
        out = (broadcast_table(zeros, PER_BLOCK, W_LAYOUT),) + out
    return out


@gluon.jit
def dequant_fragment(buffers, buffer, n64: gl.constexpr, scales, scheme: gl.constexpr, cfg: gl.constexpr):
    """A K block of a 64-row tile of W [64, 64], dequantized and scaled: the register fragment of operand A."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, cfg.tile_m, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    W_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4, 1, 1], [1, 1, 8, 4], [4, 1, 1, 1], [3, 2, 1, 0])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    PTX: gl.constexpr = scheme.fragment_ptx
    _x, _x_extra, w_smem, _scales, _zeros = buffers
    packed = w_smem.index(buffer).slice(n64 * 4, 4, dim=0)
    if scheme.planes == 1:
        args = (gl.convert_layout(gl.reshape(packed.load(LOAD), [4, 4, 8, 4]), W_LAYOUT, assert_trivial=True),)
    else:
        w0 = gl.reshape(packed.slice(0, 128, dim=1).load(LOAD), [4, 4, 8, 4])
        w1 = gl.reshape(packed.slice(128, 128, dim=1).load(LOAD), [4, 4, 8, 4])
        args = (
            gl.convert_layout(w0, W_LAYOUT, assert_trivial=True), gl.convert_layout(w1, W_LAYOUT, assert_trivial=True)
        )  # fmt: skip
    args = args + scales
    if scheme.fp16:
        f = gl.inline_asm_elementwise(PTX[0], PTX[1], args, dtype=(gl.float16,) * 8, is_pure=True, pack=1)
    else:
        f = gl.inline_asm_elementwise(PTX[0], PTX[1], args, dtype=(gl.bfloat16,) * 8, is_pure=True, pack=1)
    # f is [half][row][element]; each join adds the innermost axis. All that follows only renames registers.
    rows0 = gl.join(gl.join(f[0], f[4]), gl.join(f[1], f[5]))
    rows1 = gl.join(gl.join(f[2], f[6]), gl.join(f[3], f[7]))
    v = gl.reshape(gl.join(rows0, rows1), [4, 4, 8, 4, 2, 2, 2])  # warp, k16 step, g, lane, half, element, row
    return gl.convert_layout(gl.reshape(gl.permute(v, [0, 6, 2, 1, 4, 3, 5]), [64, 64]), A, assert_trivial=True)


# ---- consumer: MMA ------------------------------------------------------------------------------------------------------


@gluon.jit
def zero_accumulators(cfg: gl.constexpr):
    """A warpgroup's accumulators, see `epilogue`."""
    TILE_M: gl.constexpr = cfg.tile_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 16])
    acc = (gl.zeros([64, TILE_M], gl.float32, MMA),)
    if cfg.n64_per_warpgroup == 2:
        acc = acc + (gl.zeros([64, TILE_M], gl.float32, MMA),)
    if cfg.tile_m_extra > 0:
        EXTRA_M: gl.constexpr = cfg.tile_m_extra
        MMA2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EXTRA_M, 16])
        acc = acc + (gl.zeros([64, EXTRA_M], gl.float32, MMA2),)
    return acc


@gluon.jit
def start_mma(acc):
    """Accumulators as tokens of asynchronous MMAs."""
    if len(acc) == 2:
        return (warpgroup_mma_init(acc[0]), warpgroup_mma_init(acc[1]))
    else:
        return (warpgroup_mma_init(acc[0]),)


@gluon.jit
def finish_mma(tokens):
    """Wait for all MMAs in flight; accumulators."""
    if len(tokens) == 2:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[tokens[0], tokens[1]])
        return (acc0, acc1)
    else:
        return (warpgroup_mma_wait(0, deps=[tokens[0]]),)


@gluon.jit
def mma_first(tokens, w, buffers, buffer, cfg: gl.constexpr):
    """Issue the MMA of a fragment of W with x, and with extra x, as the first accumulators."""
    x, x_extra, _w, _scales, _zeros = buffers
    out = (warpgroup_mma(w, x.index(buffer).permute([1, 0]), tokens[0], is_async=True),)
    if cfg.tile_m_extra > 0:
        EXTRA_M: gl.constexpr = cfg.tile_m_extra
        MMA2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EXTRA_M, 16])
        A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA2, k_width=2)
        same = gl.convert_layout(w, A, assert_trivial=True)
        out = out + (warpgroup_mma(same, x_extra.index(buffer).permute([1, 0]), tokens[1], is_async=True),)
    elif cfg.n64_per_warpgroup == 2:
        out = out + (tokens[1],)
    return out


@gluon.jit
def mma_stage_pingpong(
    warpgroup: gl.constexpr, tokens, buffers, stage, factors, count, num_stages, N, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Dequantize a stage, the count-th of num_stages, while another warpgroup's MMAs run; then issue its MMAs.

    ptxas would move dequantization behind the MMA that it should overlap with; named barriers order the warpgroups instead. N:
    any number, see `take_turn`.
    """
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    SHARED_SCALES: gl.constexpr = scheme.scales_per_k_block == 1 and scheme.k_tiles_per_scale % K_BLOCKS == 0
    scales = load_scales(buffers, stage * K_BLOCKS, warpgroup, factors, scheme)
    w0 = dequant_fragment(buffers, stage * K_BLOCKS, warpgroup, scales, scheme, cfg)
    if K_BLOCKS == 2:
        if not SHARED_SCALES:
            scales = load_scales(buffers, stage * K_BLOCKS + 1, warpgroup, factors, scheme)
        w1 = dequant_fragment(buffers, stage * K_BLOCKS + 1, warpgroup, scales, scheme, cfg)
    take_turn(N, warpgroup, cfg)
    tokens = mma_first(tokens, w0, buffers, stage * K_BLOCKS, cfg)
    if K_BLOCKS == 2:
        tokens = mma_first(tokens, w1, buffers, stage * 2 + 1, cfg)
    pass_turn(N, count < num_stages, warpgroup, cfg)
    return tokens


@gluon.jit
def mma_stage(
    n64: gl.constexpr, second_n64: gl.constexpr, tokens, buffers, stage, factors, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Dequantize a stage and issue its MMAs, each K block's dequantization overlapping the MMA of the one before.

    n64: the warpgroup's 64-row tile of W, second_n64: its other one, if n64_per_warpgroup is 2.

    A fragment is dequantized in the iteration that multiplies it: were it carried into the next, ptxas would first wait for the
    MMA in flight and copy all registers.
    """
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_stage
    SHARED_SCALES: gl.constexpr = scheme.scales_per_k_block == 1 and scheme.k_tiles_per_scale % K_BLOCKS == 0
    for b in gl.static_range(K_BLOCKS):
        if b == 0 or not SHARED_SCALES:
            scales = load_scales(buffers, stage * K_BLOCKS + b, n64, factors, scheme)
        w = dequant_fragment(buffers, stage * K_BLOCKS + b, n64, scales, scheme, cfg)
        tokens = mma_first(tokens, w, buffers, stage * K_BLOCKS + b, cfg)
        if b > 0 and (b + 1 < K_BLOCKS or cfg.n64_per_warpgroup == 2):
            _w = warpgroup_mma_wait(2 if cfg.tile_m_extra > 0 else 1, deps=[w])
        if cfg.n64_per_warpgroup == 2:
            if b == 0 or not SHARED_SCALES:
                scales2 = load_scales(buffers, stage * K_BLOCKS + b, second_n64, factors, scheme)
            w2 = dequant_fragment(buffers, stage * K_BLOCKS + b, second_n64, scales2, scheme, cfg)
            x = buffers[0].index(stage * K_BLOCKS + b).permute([1, 0])
            tokens = (tokens[0], warpgroup_mma(w2, x, tokens[1], is_async=True))
            if b + 1 < K_BLOCKS:
                _w2 = warpgroup_mma_wait(1, deps=[w2])
    return tokens


@gluon.jit
def consumer(
    warpgroup: gl.constexpr, y_descs, buffers, y_smem, barriers, pointers, N, schedule, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """A consumer warpgroup: the MMAs and epilogues of all of the CTA's work, for its 64-row tiles of W."""
    full, empty = barriers
    stages_per_tile, _tiles_m, _tiles_n, _num_ctas, whole_tiles, _stream_k_stages = schedule
    _partials_ptr, _flags_ptr, _bias_ptr, alpha_ptr = pointers
    N64: gl.constexpr = warpgroup * cfg.n64_per_warpgroup
    cta = gl.program_id(0)
    u0, u1, stream_k_tiles = stream_k_range(cta, schedule)
    num_stages = whole_tiles * stages_per_tile + (u1 - u0)  # of all of the CTA's work
    factors = (0, 0)
    if scheme.folds_exponent_bias:
        factors = scale_factors(alpha_ptr, scheme)
    count = 0
    stage = 0
    phase = 0
    give_first_turn(N, warpgroup, cfg)
    for s in range(whole_tiles + stream_k_tiles):
        work = get_work(s, cta, u0, u1, schedule, cfg)
        acc = zero_accumulators(cfg)
        tokens = start_mma(acc)
        for _k in range(work[1], work[2]):
            count += 1
            mbarrier.wait(full.index(stage), phase)
            if cfg.pingpong:
                tokens = mma_stage_pingpong(warpgroup, tokens, buffers, stage, factors, count, num_stages, N, scheme, cfg)
            else:
                tokens = mma_stage(N64, N64 + 1, tokens, buffers, stage, factors, scheme, cfg)
            acc = finish_mma(tokens)
            tokens = start_mma(acc)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = advance(stage, phase, cfg.stages)
        acc = finish_mma(tokens)
        if cfg.pdl and s == 0:
            gdc_wait()
        if cfg.reduce_slices:
            epilogue_distributed(warpgroup, acc, y_descs, y_smem, pointers, work, cta, N, schedule, scheme, cfg)
        else:
            epilogue(warpgroup, acc, y_descs, y_smem, pointers, work, cta, N, schedule, scheme, cfg)
    tma.store_wait(0)


# ---- kernel -------------------------------------------------------------------------------------------------------------


@gluon.jit
def allocate_buffers(x_desc, w_desc, scale_desc, zero_desc, scheme: gl.constexpr, cfg: gl.constexpr):
    """Shared memory of the pipeline: `buffers`."""
    N64: gl.constexpr = cfg.num_consumer_warpgroups * cfg.n64_per_warpgroup
    COUNT: gl.constexpr = cfg.stages * cfg.k_blocks_per_stage
    PER_BLOCK: gl.constexpr = scheme.scales_per_k_block
    if scheme.fp16:
        T: gl.constexpr = gl.float16
    else:
        T: gl.constexpr = gl.bfloat16
    x = gl.allocate_shared_memory(T, [COUNT, cfg.tile_m, 64], x_desc.layout)
    x_extra = x
    if cfg.tile_m_extra > 0:
        x_extra = gl.allocate_shared_memory(T, [COUNT, cfg.tile_m_extra, 64], x_desc.layout)
    w = gl.allocate_shared_memory(gl.int32, [COUNT, N64 * 4, 128 * scheme.planes], w_desc.layout)
    if scheme.fp32_scales:
        scales = gl.allocate_shared_memory(gl.float32, [COUNT, N64 * 4, 16 * PER_BLOCK], scale_desc.layout)
    else:
        scales = gl.allocate_shared_memory(gl.int32, [COUNT, N64 * 4, 8 * PER_BLOCK], scale_desc.layout)
    zeros = scales
    if scheme.zero_points:
        zeros = gl.allocate_shared_memory(gl.int16, [COUNT, N64 * 4, 8 * PER_BLOCK], zero_desc.layout)
    return x, x_extra, w, scales, zeros


@gluon.jit(do_not_specialize=["N", "stages_per_tile", "tiles_m", "tiles_n", "num_ctas", "whole_tiles", "stream_k_stages"])
def wgmma_persistent(
    x_desc, x_extra_desc, w_desc, scale_desc, zero_desc, y_desc, y_extra_desc, partials_ptr, flags_ptr, bias_ptr, alpha_ptr, N,
    stages_per_tile, tiles_m, tiles_n, num_ctas, whole_tiles, stream_k_stages, scheme: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """y [M, N] = alpha * x [M, K] @ W.T + bias.

    Tensor maps: x_desc and y_desc have boxes [tile_m, 64], the extra ones [tile_m_extra, 64]; w_desc is of packed int32
    [N / 16, K / 64 * 128 * planes], scale_desc and zero_desc of [N / 16, scales per row * …]. partials_ptr, flags_ptr: the
    workspace of stream-K. The other numbers are `schedule`.
    """
    N64: gl.constexpr = cfg.num_consumer_warpgroups * cfg.n64_per_warpgroup
    CONSUMER: gl.constexpr = cfg.consumer_registers
    PRODUCER: gl.constexpr = cfg.producer_registers
    buffers = allocate_buffers(x_desc, w_desc, scale_desc, zero_desc, scheme, cfg)
    y_smem = gl.allocate_shared_memory(gl.float16 if scheme.fp16 else gl.bfloat16, [N64, cfg.tile_m, 64], y_desc.layout)
    if cfg.pdl:
        gdc_launch_dependents()
    barriers = pipeline_barriers(cfg.stages, cfg.num_consumer_warpgroups)
    schedule = (stages_per_tile, tiles_m, tiles_n, num_ctas, whole_tiles, stream_k_stages)
    x_descs, w_descs, y_descs = (x_desc, x_extra_desc), (w_desc, scale_desc, zero_desc), (y_desc, y_extra_desc)
    pointers = (partials_ptr, flags_ptr, bias_ptr, alpha_ptr)
    # fmt: off
    if cfg.num_consumer_warpgroups == 2:
        gl.warp_specialize([
            (consumer, (0, y_descs, buffers, y_smem, barriers, pointers, N, schedule, scheme, cfg)),
            (consumer, (1, y_descs, buffers, y_smem, barriers, pointers, N, schedule, scheme, cfg)),
            (producer, (x_descs, w_descs, buffers, barriers, schedule, scheme, cfg)),
        ], [4, 1], [CONSUMER, PRODUCER])
    else:
        gl.warp_specialize([
            (consumer, (0, y_descs, buffers, y_smem, barriers, pointers, N, schedule, scheme, cfg)),
            (consumer, (1, y_descs, buffers, y_smem, barriers, pointers, N, schedule, scheme, cfg)),
            (consumer, (2, y_descs, buffers, y_smem, barriers, pointers, N, schedule, scheme, cfg)),
            (consumer, (3, y_descs, buffers, y_smem, barriers, pointers, N, schedule, scheme, cfg)),
            (producer, (x_descs, w_descs, buffers, barriers, schedule, scheme, cfg)),
        ], [4, 4, 4, 1], [CONSUMER, CONSUMER, CONSUMER, PRODUCER])
    # fmt: on
