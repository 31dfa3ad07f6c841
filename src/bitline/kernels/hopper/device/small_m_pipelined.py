# mypy: ignore-errors
"""GEMM of M <= 32 with a multi-stage cp.async pipeline, by mma.sync m16n8k16: W is operand A, x operand B.

A CTA owns 16 * n16_per_cta rows of W and all of K, or a 1/split_k of it. Its warps form K slices (intra-CTA split-K): those of a
slice work on the same K tile of 64 or 128 columns, each with n16_per_warp tiles of W of its own, and share x. At the end the
slices' accumulators are reduced through shared memory, and with split_k those of the CTAs through global memory, both in a fixed
order.

Each slice has a pipeline of `stages` shared-memory stages. A stage holds x of a K tile (with `cfg.stage_x`, else x comes from the
L2), then packed weights, scales and zero points of all tiles of W. Loads in flight occupy no registers, and the compiler cannot
move them to their uses. A warp copies whole lines of 128 bytes, while a lane reads 16 bytes of several lines: 16-byte vectors are
swizzled so that both are free of bank conflicts. Rows of x past M repeat row M - 1 and are not stored; columns past K are zero.

`scheme` is a `traits.SchemeTraits`, `cfg` a `traits.SmallMTraits`. All tensors have one element per thread, so that a layout only
numbers the threads; tuples hold a thread's elements, so that tile counts need not be powers of two. Other tuples:
smem: a lane's addresses in stage 0: where it copies weights, scales and zero points to, and x; where it reads these, and x.
source: see `weight_source`. x_source: address of x, offsets of the lane's vectors, bytes left to K.
output: bias_ptr, alpha_ptr, y_ptr, M, N.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bitline.kernels.hopper.device.common import (
    GRID_DEPENDENCY_WAIT,
    LAUNCH_DEPENDENTS,
    barrier,
    emit,
    load_scale,
    scale_pairs,
    scales_to_float32,
    store_output,
)

_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # renamed in Triton 3.9

SMEM_BASE = gl.constexpr("mov.u32 $0, global_smem;")  # Triton's symbol of a CTA's shared memory; there is one allocation
COMMIT_GROUP = gl.constexpr("cp.async.commit_group; // $0")
SYNC_WARP = gl.constexpr("bar.warp.sync -1; // $0")
LOAD_SHARED_B32 = gl.constexpr("ld.shared.b32 $0, [$1];")
LOAD_SHARED_F32 = gl.constexpr("ld.shared.f32 $0, [$1];")
STORE_SHARED_F32 = gl.constexpr("st.shared.f32 [$1], $2; // $0")
LOAD_SHARED_F32X2 = gl.constexpr("ld.shared.v2.f32 {$0,$1}, [$2];")
LOAD_SHARED_U16 = gl.constexpr("{ .reg .b16 t; ld.shared.u16 t, [$1]; cvt.u32.u16 $0, t; }")


# ---- reading a stage ----------------------------------------------------------------------------------------------------


@gluon.jit
def load_scale_shared(addr, scheme: gl.constexpr):
    """`load_scale` from shared memory."""
    if scheme.fp32_scales:
        lo, hi = gl.inline_asm_elementwise(
            LOAD_SHARED_F32X2, "=f,=f,r", [addr], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
        )
        return (lo, hi)
    else:
        packed = gl.inline_asm_elementwise(LOAD_SHARED_B32, "=r,r", [addr], dtype=gl.int32, is_pure=False, pack=1)
        return (packed, packed)


@gluon.jit
def load_zero_shared(addr):
    """Zero points of rows g and g + 8."""
    return gl.inline_asm_elementwise(LOAD_SHARED_U16, "=r,r", [addr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_x(global_addr, shared_addr, bytes_left, scheme: gl.constexpr, cfg: gl.constexpr):
    """The lane's elements of one row of x in a K tile. bytes_left: from global_addr to K."""
    PTX: gl.constexpr = scheme.load_x_ptx
    if cfg.stage_x:
        args = (shared_addr, shared_addr ^ 16)
    elif cfg.even:
        args = (global_addr,)
    else:
        args = (global_addr, bytes_left)
    return gl.inline_asm_elementwise(PTX[0], PTX[1], args, dtype=(gl.int32,) * (8 * cfg.k_blocks_per_tile), is_pure=False, pack=1)


# ---- filling a stage ----------------------------------------------------------------------------------------------------


@gluon.jit
def copy_table(
    smem_addr, global_addr, tile_stride, second, lane, tile_bytes: gl.constexpr, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """cp.async tile_bytes of scales or zero points for each of the warp's tiles of W, side by side, 16 bytes per lane.

    global_addr: the K tile's entries of the first tile of W; tile_stride: bytes from tile to tile. second: 0 where the K tile's
    second K block is missing; the first block's entries are then copied twice.
    """
    PTX: gl.constexpr = scheme.copy_table_ptx
    VECTORS: gl.constexpr = tile_bytes // 16
    ALL: gl.constexpr = cfg.n16_per_warp * VECTORS
    for j in gl.static_range((ALL + 31) // 32):
        i = lane + 32 * j
        tile = i // VECTORS
        vector = i % VECTORS
        if cfg.k_blocks_per_tile == 2 and scheme.scales_per_k_block > 1 and not cfg.even:
            vector = gl.where((second == 0) & (vector >= VECTORS // 2), vector - VECTORS // 2, vector)
        gl.inline_asm_elementwise(
            PTX[0], PTX[1], [smem_addr + i * 16, global_addr + (tile * tile_stride + vector * 16), ALL - i],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def copy_weights(smem, stage, k_tile, source, lane, scheme: gl.constexpr, cfg: gl.constexpr):
    """cp.async packed weights, scales and zero points of a K tile to the stage at byte offset `stage`.

    smem: shared-memory addresses of weights, scales, zero points in stage 0. source: see `weight_source`. The second K block of
    the last K tile may be missing: the first is then copied twice, and x is zero there.
    """
    w_addr, w_stride, scale_addr, zero_addr, scale_row, scales_per_row, num_k_blocks = source
    PTX: gl.constexpr = scheme.copy_weights_ptx
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_tile
    N16: gl.constexpr = cfg.n16_per_warp
    ENTRIES: gl.constexpr = K_BLOCKS * scheme.scales_per_k_block if scheme.scales_per_k_block > 1 else 1
    ENTRY_BYTES: gl.constexpr = 64 if scheme.fp32_scales else 32
    at = k_tile
    second = 1
    if not cfg.even:
        at = gl.minimum(k_tile, (num_k_blocks + K_BLOCKS - 1) // K_BLOCKS - 1)
        second = gl.where(at * K_BLOCKS + 1 < num_k_blocks, 1, 0)
    w = w_addr + at * cfg.tile_weight_bytes
    for n16 in gl.static_range(N16):
        args = (smem[0] + (stage + n16 * cfg.tile_weight_bytes), w)
        if K_BLOCKS == 2:
            args = args + (w + second * (512 * scheme.planes),)
        gl.inline_asm_elementwise(PTX[0], PTX[1], args, dtype=gl.int32, is_pure=False, pack=1)
        w += w_stride
    if scheme.k_tiles_per_scale > 0:
        entry = scale_row + at // scheme.k_tiles_per_scale * ENTRIES
        copy_table(
            smem[1] + stage, scale_addr + entry * ENTRY_BYTES, scales_per_row * ENTRY_BYTES, second, lane, ENTRIES * ENTRY_BYTES,
            scheme, cfg,
        )  # fmt: skip
        if scheme.zero_points:
            copy_table(smem[2] + stage, zero_addr + entry * 16, scales_per_row * 16, second, lane, ENTRIES * 16, scheme, cfg)


@gluon.jit
def copy_x(smem, stage, x_source, x_at, scheme: gl.constexpr, cfg: gl.constexpr):
    """cp.async x of a K tile, x_at bytes from the first one, to the stage at byte offset `stage`; zeros past K.

    smem: addresses of the lane's vectors in stage 0. x_source: address of x, offsets of these vectors, bytes from there to K.
    """
    x_addr, offsets, bytes_left = x_source
    PTX: gl.constexpr = scheme.copy_x_ptx
    K_BLOCKS: gl.constexpr = cfg.k_blocks_per_tile
    VECTORS: gl.constexpr = cfg.x_vectors_per_lane
    to = ()
    for j in gl.static_range(VECTORS):
        to = to + (smem[j] + stage,)
    x_addr += x_at
    bytes_left -= x_at
    for b in gl.static_range(K_BLOCKS):
        count = bytes_left * 0 + 16
        if not cfg.even:
            count = gl.where(bytes_left > b * 128, 16, 0)
        for j in gl.static_range(VECTORS):
            gl.inline_asm_elementwise(
                PTX[0], PTX[1], [to[j] + b * 1024 * cfg.m8_tiles, x_addr + (offsets[j] + b * 128), count],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip


# ---- the phases of the kernel -------------------------------------------------------------------------------------------


@gluon.jit
def mma_k_tile(acc, addr, s, z, x, n16: gl.constexpr, scheme: gl.constexpr, cfg: gl.constexpr):
    """Accumulators of one tile of W after a K tile: dequantize, MMA, scale. addr: the lane's weights, scales, zero points."""
    PTX: gl.constexpr = scheme.mma_ptx
    PER_BLOCK: gl.constexpr = scheme.scales_per_k_block
    ENTRY_BYTES: gl.constexpr = 64 if scheme.fp32_scales else 32
    NUM_ACC: gl.constexpr = 4 * cfg.m8_tiles
    if scheme.k_tiles_per_scale > 0:
        s = load_scale_shared(addr[1], scheme)
        if scheme.zero_points:
            z = (load_zero_shared(addr[2]),)
        if PER_BLOCK > 1 and cfg.k_blocks_per_tile == 2:
            s = s + load_scale_shared(addr[1] + ENTRY_BYTES * PER_BLOCK, scheme)
            if scheme.zero_points:
                z = z + (load_zero_shared(addr[2] + 16 * PER_BLOCK),)
    args = (addr[0],) + x
    if scheme.zero_points:
        args = args + z
    out = ()
    if PER_BLOCK > 1:  # scale blocks of 16 or 32 columns scale the weights, each lane its own
        args = args + scale_pairs(s, 0, scheme)
        if cfg.k_blocks_per_tile == 2:
            args = args + scale_pairs(s, 2, scheme)
        for i in gl.static_range(NUM_ACC):
            args = args + (acc[n16 * NUM_ACC + i],)
        out = gl.inline_asm_elementwise(PTX[0], PTX[1], args, dtype=(gl.float32,) * NUM_ACC, is_pure=False, pack=1)
    else:  # larger ones scale the K tile's accumulators
        lo, hi = scales_to_float32(s, scheme)
        zero = gl.zeros_like(lo)
        for _i in gl.static_range(NUM_ACC):
            args = args + (zero,)
        p = gl.inline_asm_elementwise(PTX[0], PTX[1], args, dtype=(gl.float32,) * NUM_ACC, is_pure=False, pack=1)
        for i in gl.static_range(NUM_ACC):
            if i % 4 < 2:
                out = out + (acc[n16 * NUM_ACC + i] + p[i] * lo,)
            else:
                out = out + (acc[n16 * NUM_ACC + i] + p[i] * hi,)
    return out


@gluon.jit
def allocate_stages(cfg: gl.constexpr, num_warps: gl.constexpr):
    """Shared memory of the K slices' stages; their accumulators take its place."""
    K_SLICES: gl.constexpr = num_warps // cfg.warps_per_k_slice
    SHAPE: gl.constexpr = [(K_SLICES * cfg.slice_bytes + 511) // 512, 128]
    return gl.allocate_shared_memory(gl.float32, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def thread_position(L: gl.constexpr, cfg: gl.constexpr, num_warps: gl.constexpr):
    """(thread, lane, lane's row and column g and q of a fragment, K slice, warp of the slice) of each thread."""
    tid = gl.arange(0, 32 * num_warps, L)
    lane = tid % 32
    return tid, lane, lane // 4, lane % 4, tid // (32 * cfg.warps_per_k_slice), tid // 32 % cfg.warps_per_k_slice


@gluon.jit
def weight_source(w_ptr, scale_ptr, zero_ptr, n16_tile, num_k_blocks, scales_per_row, lane, scheme: gl.constexpr):
    """Where a warp loads weights from: address, stride per tile, tables' addresses, first entry, entries per row, K blocks."""
    w_addr = w_ptr.to(gl.int64) + ((n16_tile * num_k_blocks).to(gl.int64) * (512 * scheme.planes) + lane * 16)
    w_stride = num_k_blocks.to(gl.int64) * (512 * scheme.planes)
    scale_addr = scale_ptr.to(gl.int64)
    zero_addr = zero_ptr.to(gl.int64)
    return w_addr, w_stride, scale_addr, zero_addr, n16_tile * scales_per_row, scales_per_row, num_k_blocks


@gluon.jit
def stage_addresses(smem_slice, slice_warp, lane, g, q, scheme: gl.constexpr, cfg: gl.constexpr):
    """(where a lane's copies of weights, scales and zero points go, where it reads its own) in stage 0, swizzled."""
    N16: gl.constexpr = cfg.n16_per_warp
    ALL: gl.constexpr = N16 * cfg.warps_per_k_slice
    W: gl.constexpr = cfg.tile_weight_bytes
    S: gl.constexpr = cfg.tile_scale_bytes
    Z: gl.constexpr = cfg.tile_zero_bytes
    weights = smem_slice + cfg.stage_x_bytes + slice_warp * (N16 * W)
    scales = smem_slice + (cfg.stage_x_bytes + ALL * W) + slice_warp * (N16 * S)
    zeros = smem_slice + (cfg.stage_x_bytes + ALL * (W + S)) + slice_warp * (N16 * Z)
    write = (weights + ((lane // 8) * 8 + ((lane % 8) ^ (lane // 8 * 2))) * 16, scales, zeros)
    entry = q * scheme.scales_per_k_block // 4 * 8 + g
    read = (weights + q * 128 + ((g ^ (q * 2)) * 16), scales + entry * (8 if scheme.fp32_scales else 4), zeros + entry * 2)
    return write, read


@gluon.jit
def x_addresses(smem_slice, slice_warp, first_k_tile, lane, g, q, M, K, scheme: gl.constexpr, cfg: gl.constexpr):
    """(where a lane's copies of x go in stage 0, their offsets from x, bytes from there to K), from the CTA's first K tile on.

    Without cfg.stage_x, no copies: offsets are those of the lane's own loads.
    """
    X: gl.constexpr = cfg.k_tile_x_bytes
    WARPS: gl.constexpr = cfg.warps_per_k_slice
    M8: gl.constexpr = cfg.m8_tiles
    VECTORS: gl.constexpr = cfg.x_vectors_per_lane
    write = ()
    offsets = ()
    if cfg.stage_x:
        for j in gl.static_range(VECTORS):
            row = (slice_warp + j * WARPS) % (2 * M8) * 4 + lane // 8
            write = write + (smem_slice + row * 128 + ((lane % 8) ^ (row % 2)) * 16,)
            offsets = offsets + (gl.minimum(row, M - 1) * (2 * K) + (lane % 8) * 16 + first_k_tile * X,)
        bytes_left = 2 * K - (lane % 8) * 16 - first_k_tile * X
    else:
        for m in gl.static_range(M8):
            offsets = offsets + (gl.minimum(g + 8 * m, M - 1) * (2 * K) + q * 32 + first_k_tile * X,)
        bytes_left = 2 * K - q * 32 - first_k_tile * X
    return write, offsets, bytes_left


@gluon.jit
def channel_scales(scale_ptr, zero_ptr, source, g, scheme: gl.constexpr, cfg: gl.constexpr):
    """Per-channel scales and zero points of the warp's tiles of W, kept in registers; empty where there are several per row."""
    scale_row, scales_per_row = source[4], source[5]
    N16: gl.constexpr = cfg.n16_per_warp
    s = ()
    z = ()
    if scheme.k_tiles_per_scale == 0:
        for n16 in gl.static_range(N16):
            s = s + load_scale(scale_ptr, (scale_row + n16 * scales_per_row) * 8 + g, scheme)
            if scheme.zero_points:
                z = z + (gl.load(zero_ptr + ((scale_row + n16 * scales_per_row) * 8 + g)).to(gl.int32),)
    return s, z


@gluon.jit
def fill_pipeline(smem, source, x_source, first_k_tile, num_iters, lane, scheme: gl.constexpr, cfg: gl.constexpr):
    """Copy the K tiles of the first stages - 1 iterations. Returns the offset of x in the next one.

    x, and with cfg.pdl_early the weights of all but the first stage, are copied once the previous kernel has ended.
    """
    FILL: gl.constexpr = cfg.stages - 1
    BEFORE_WAIT: gl.constexpr = 1 if cfg.pdl_early else FILL
    for i in gl.static_range(BEFORE_WAIT):
        if i < num_iters:
            copy_weights(smem[0], i * cfg.stage_bytes, first_k_tile + i * cfg.k_tiles_per_step, source, lane, scheme, cfg)
        if not cfg.stage_x:
            emit(COMMIT_GROUP)
    if cfg.pdl:  # only x depends on the previous kernel
        emit(GRID_DEPENDENCY_WAIT)
        emit(LAUNCH_DEPENDENTS)
    x_at = 0
    for i in gl.static_range(FILL):
        if i >= BEFORE_WAIT and i < num_iters:
            copy_weights(smem[0], i * cfg.stage_bytes, first_k_tile + i * cfg.k_tiles_per_step, source, lane, scheme, cfg)
        if cfg.stage_x:
            if i < num_iters:
                copy_x(smem[1], i * cfg.stage_bytes, x_source, x_at, scheme, cfg)
            emit(COMMIT_GROUP)
            x_at += cfg.k_tiles_per_step * cfg.k_tile_x_bytes
        elif i >= BEFORE_WAIT:
            emit(COMMIT_GROUP)
    return x_at


@gluon.jit
def wait_for_stage(named_barrier, cfg: gl.constexpr, num_warps: gl.constexpr):
    """Wait until the oldest stage is filled, by all warps of the K slice."""
    gl.inline_asm_elementwise(cfg.wait_stage_ptx, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    if cfg.warps_per_k_slice == 1:
        emit(SYNC_WARP)
    elif cfg.warps_per_k_slice == num_warps:
        barrier()
    else:
        gl.inline_asm_elementwise(cfg.sync_k_slice_ptx, "=r,r", [named_barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def mma_stage(acc, smem, stage, x_source, x_at, channel, scheme: gl.constexpr, cfg: gl.constexpr):
    """Accumulators after the K tile in the stage at byte offset `stage`, for all of the warp's tiles of W.

    channel: per-channel scales and zero points (`channel_scales`).
    """
    x_addr, x_offsets, bytes_left = x_source
    weights, x_read = smem[2], smem[3]
    N16: gl.constexpr = cfg.n16_per_warp
    M8: gl.constexpr = cfg.m8_tiles
    x = ()
    for m in gl.static_range(M8):
        if cfg.stage_x:
            x = x + load_x(x_addr, x_read + (stage + m * 1024), bytes_left, scheme, cfg)
        else:
            x = x + load_x(x_addr + (x_offsets[m] + x_at), x_read, bytes_left - x_at, scheme, cfg)
    out = ()
    for n16 in gl.static_range(N16):
        addr = (
            weights[0] + (stage + n16 * cfg.tile_weight_bytes), weights[1] + (stage + n16 * cfg.tile_scale_bytes),
            weights[2] + (stage + n16 * cfg.tile_zero_bytes),
        )  # fmt: skip
        s = ()
        z = ()
        if scheme.k_tiles_per_scale == 0:
            s = (channel[0][2 * n16], channel[0][2 * n16 + 1])
            if scheme.zero_points:
                z = (channel[1][n16],)
        out = out + mma_k_tile(acc, addr, s, z, x, n16, scheme, cfg)
    return out


@gluon.jit
def main_loop(
    acc, x_at, smem, source, x_source, channel, k_slice, first_k_tile, num_iters, lane, scheme: gl.constexpr, cfg: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Accumulators of the warp's K tiles. An iteration waits for a stage, refills the one before it, dequantizes, multiplies."""
    FILL: gl.constexpr = cfg.stages - 1
    named_barrier = k_slice + 1  # 0 is the CTA's
    next_k_tile = first_k_tile + FILL * cfg.k_tiles_per_step
    fill_stage = FILL * cfg.stage_bytes
    stage = 0
    for i in range(0, num_iters):
        wait_for_stage(named_barrier, cfg, num_warps)
        if i + FILL < num_iters:
            copy_weights(smem[0], fill_stage, next_k_tile, source, lane, scheme, cfg)
            if cfg.stage_x:
                copy_x(smem[1], fill_stage, x_source, x_at, scheme, cfg)
        emit(COMMIT_GROUP)
        acc = mma_stage(acc, smem, stage, x_source, x_at, channel, scheme, cfg)
        next_k_tile += cfg.k_tiles_per_step
        fill_stage = stage
        stage += cfg.stage_bytes
        if stage == cfg.stages * cfg.stage_bytes:
            stage = 0
        x_at += cfg.k_tiles_per_step * cfg.k_tile_x_bytes
    return acc


@gluon.jit
def store_elements(acc, e, valid, first_n16, output, scheme: gl.constexpr, cfg: gl.constexpr):
    """Epilogue of a CTA's elements e = ((n16 * 4*m8_tiles + i)*warps_per_k_slice + warp of the slice)*32 + lane of y."""
    NUM_ACC: gl.constexpr = 4 * cfg.m8_tiles
    WARPS: gl.constexpr = cfg.warps_per_k_slice
    at = e // (32 * WARPS)
    i = at % NUM_ACC
    lane = e % 32
    n = (first_n16 + e // 32 % WARPS * cfg.n16_per_warp + at // NUM_ACC) * 16 + lane // 4 + i % 4 // 2 * 8
    m = i // 4 * 8 + lane % 4 * 2 + i % 2
    bias_ptr, alpha_ptr, y_ptr, M, N = output
    store_output(acc, gl.where(valid, n, N), m, bias_ptr, alpha_ptr, y_ptr, M, N, scheme)


@gluon.jit
def share_accumulators(acc, allocation, smem_base, tid, COUNT: gl.constexpr, THREADS: gl.constexpr):
    """Put the COUNT accumulators of all THREADS into shared memory, accumulator by accumulator, once all stages are consumed."""
    barrier()
    # The allocation needs a user that the compiler sees, hence one store without inline PTX.
    reinterpret(allocation, gl.float32, [THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(acc[0])
    for i in gl.static_range(1, COUNT):
        addr = smem_base + (i * THREADS + tid) * 4
        gl.inline_asm_elementwise(STORE_SHARED_F32, "=r,r,f", [addr, acc[i]], dtype=gl.int32, is_pure=False, pack=1)
    barrier()


@gluon.jit
def sum_k_slices(e, smem_base, COUNT: gl.constexpr, L: gl.constexpr, cfg: gl.constexpr, num_warps: gl.constexpr):
    """Elements e of `share_accumulators`' COUNT accumulators (see `store_elements`), the K slices' added in their order."""
    WARPS: gl.constexpr = cfg.warps_per_k_slice
    THREADS: gl.constexpr = 32 * num_warps
    y = gl.zeros([THREADS], gl.float32, L)
    addr = smem_base + gl.minimum(e // (32 * WARPS), COUNT - 1) * (4 * THREADS) + e % (32 * WARPS) * 4
    for k in gl.static_range(num_warps // WARPS):
        y += gl.inline_asm_elementwise(
            LOAD_SHARED_F32, "=f,r", [addr + k * (128 * WARPS)], dtype=gl.float32, is_pure=False, pack=1
        )
    return y


@gluon.jit
def reduce_k_slices(
    acc, allocation, smem_base, tid, first_n16, partials_ptr, output, L: gl.constexpr, scheme: gl.constexpr, cfg: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Reduce the K slices' accumulators through shared memory, in slice order; store y, or with split_k the CTA's partials."""
    WARPS: gl.constexpr = cfg.warps_per_k_slice
    THREADS: gl.constexpr = 32 * num_warps
    NUM_ACC: gl.constexpr = cfg.n16_per_warp * 4 * cfg.m8_tiles  # of a thread
    ELEMENTS: gl.constexpr = NUM_ACC * WARPS * 32  # of y, per CTA
    share_accumulators(acc, allocation, smem_base, tid, NUM_ACC, THREADS)
    partials = partials_ptr + (gl.program_id(0) * ELEMENTS).to(gl.int64)
    for j in gl.static_range((ELEMENTS + THREADS - 1) // THREADS):
        e = tid + j * THREADS  # see `store_elements`
        y = sum_k_slices(e, smem_base, NUM_ACC, L, cfg, num_warps)
        if cfg.split_k == 1:
            store_elements(y, e, e < ELEMENTS, first_n16, output, scheme, cfg)
        else:
            gl.store(partials + e, y, mask=e < ELEMENTS)


@gluon.jit
def reduce_split_k(
    partials_ptr, flags_ptr, pid_n, pid_k, tid, first_n16, output, scheme: gl.constexpr, cfg: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Distributed split-K reduction: each of the tile's split_k CTAs waits for all of them, then reduces and stores 1/split_k of
    the elements, in CTA order. The tile's flag counts arrivals, then departures; the last CTA to leave resets it."""
    SPLIT_K: gl.constexpr = cfg.split_k
    THREADS: gl.constexpr = 32 * num_warps
    ELEMENTS: gl.constexpr = cfg.n16_per_warp * 4 * cfg.m8_tiles * cfg.warps_per_k_slice * 32
    OWN: gl.constexpr = ELEMENTS // SPLIT_K
    barrier()
    flag = flags_ptr + pid_n
    gl.atomic_add(flag, 1, sem="release", scope="gpu")
    arrived = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while arrived < SPLIT_K:
        arrived = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    barrier()
    partials = partials_ptr + (pid_n * (SPLIT_K * ELEMENTS)).to(gl.int64)
    for j in gl.static_range((OWN + THREADS - 1) // THREADS):
        e = pid_k * OWN + tid + j * THREADS
        valid = tid + j * THREADS < OWN
        y = gl.load(partials + e, mask=valid, other=0.0, cache_modifier=".cg")
        for k in gl.static_range(1, SPLIT_K):
            y += gl.load(partials + (e + k * ELEMENTS), mask=valid, other=0.0, cache_modifier=".cg")
        store_elements(y, e, valid, first_n16, output, scheme, cfg)
    count = gl.atomic_add(flag, 1, sem="relaxed", scope="gpu")
    if count == 2 * SPLIT_K - 1:
        gl.atomic_xchg(flag, 0, sem="relaxed", scope="gpu")


@gluon.jit(do_not_specialize=["M", "N", "K", "num_k_blocks", "num_n16_tiles", "scales_per_row", "num_iters"])
def small_m_pipelined(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, alpha_ptr, y_ptr, partials_ptr, flags_ptr, M, N, K, num_k_blocks, num_n16_tiles,
    scales_per_row, num_iters, scheme: gl.constexpr, cfg: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """y [M, N] = alpha * x [M, K] @ W.T + bias; rows of x are a multiple of 16 bytes.

    Weights, scales and zero points as in `gemv_mma`. partials_ptr, flags_ptr: workspace of split_k. num_k_blocks: ceil(K / 64).
    num_n16_tiles: ceil(N / 16), at least those of a CTA. num_iters: K iterations of a slice.
    """
    K_SLICES: gl.constexpr = num_warps // cfg.warps_per_k_slice
    SPLIT_K: gl.constexpr = cfg.split_k
    THREADS: gl.constexpr = 32 * num_warps
    N16_PER_CTA: gl.constexpr = cfg.n16_per_warp * cfg.warps_per_k_slice
    NUM_ACC: gl.constexpr = cfg.n16_per_warp * 4 * cfg.m8_tiles  # of a thread
    L: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    allocation = allocate_stages(cfg, num_warps)
    tid, lane, g, q, k_slice, slice_warp = thread_position(L, cfg, num_warps)
    pid_n = gl.program_id(0) // SPLIT_K
    pid_k = gl.program_id(0) % SPLIT_K
    first_k_tile = pid_k * K_SLICES + k_slice
    first_n16 = gl.minimum(pid_n * N16_PER_CTA, num_n16_tiles - N16_PER_CTA)  # the last CTA repeats rows of the one before it
    n16_tile = first_n16 + slice_warp * cfg.n16_per_warp
    source = weight_source(w_ptr, scale_ptr, zero_ptr, n16_tile, num_k_blocks, scales_per_row, lane, scheme)
    x_addr = x_ptr.to(gl.int64)
    smem_base = gl.inline_asm_elementwise(SMEM_BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    smem_slice = smem_base + k_slice * cfg.slice_bytes
    write, read = stage_addresses(smem_slice, slice_warp, lane, g, q, scheme, cfg)
    x_read = smem_slice + g * 128 + ((q * 2) ^ (g % 2)) * 16
    x_write, x_offsets, bytes_left = x_addresses(smem_slice, slice_warp, first_k_tile, lane, g, q, M, K, scheme, cfg)
    smem, x_source = (write, x_write, read, x_read), (x_addr, x_offsets, bytes_left)
    channel = channel_scales(scale_ptr, zero_ptr, source, g, scheme, cfg)
    x_at = fill_pipeline(smem, source, x_source, first_k_tile, num_iters, lane, scheme, cfg)
    acc = ()
    for _i in gl.static_range(NUM_ACC):
        acc = acc + (gl.zeros([THREADS], gl.float32, L),)
    acc = main_loop(
        acc, x_at, smem, source, x_source, channel, k_slice, first_k_tile, num_iters, lane, scheme, cfg, num_warps
    )  # fmt: skip
    output = (bias_ptr, alpha_ptr, y_ptr, M, N)
    reduce_k_slices(acc, allocation, smem_base, tid, first_n16, partials_ptr, output, L, scheme, cfg, num_warps)
    if SPLIT_K > 1:
        reduce_split_k(partials_ptr, flags_ptr, pid_n, pid_k, tid, first_n16, output, scheme, cfg, num_warps)
