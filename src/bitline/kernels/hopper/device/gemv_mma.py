# mypy: ignore-errors
"""GEMV and GEMMs of M <= 16 by mma.sync m16n8k16, bandwidth-bound: W is operand A, from global memory straight to registers.

A CTA owns 16 * n16_per_warp rows of W and all of K. Its warps split K (intra-CTA split-K): each takes k_tiles_per_iter K tiles
per iteration, and their accumulators are reduced through shared memory at the end, in a fixed order. Packed weights are loaded
one iteration ahead of their use; x comes from the L2 in 16-byte vectors, which are a lane's own columns (see `layout`), without a
shuffle. A warp's load of x touches one half of the 128 bytes of each of eight rows; with `cfg.stagger_x_loads` odd rows load the
other half first, which avoids L1 bank conflicts. Rows of x past M repeat row M - 1 and are not stored. The grid
should be one wave.

`scheme` is a `traits.SchemeTraits`, `cfg` a `traits.SmallMTraits`. All tensors are [threads, n16_per_warp, k_tiles_per_iter], one
element per thread at each (n16 tile, K tile), so that a layout only numbers them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bitline.kernels.hopper.device.common import (
    GRID_DEPENDENCY_WAIT,
    LAUNCH_DEPENDENTS,
    emit,
    load_scale,
    scale_pairs,
    scales_to_float32,
    store_output,
)


@gluon.jit
def load_weights(ptr, scheme: gl.constexpr, cfg: gl.constexpr):
    """The lane's packed int32 of a K tile: 16 bytes per plane and K block."""
    PTX: gl.constexpr = scheme.load_weights_ptx
    COUNT: gl.constexpr = 4 * cfg.k_blocks_per_tile * scheme.planes
    return gl.inline_asm_elementwise(PTX[0], PTX[1], [ptr], dtype=(gl.int32,) * COUNT, is_pure=False, pack=1)


@gluon.jit
def load_x(ptr, stagger, scheme: gl.constexpr, cfg: gl.constexpr):
    """The lane's elements of one row of x in a K tile. stagger: 16 in rows that load the second half first, else 0."""
    PTX: gl.constexpr = scheme.load_x_ptx
    addresses = (ptr,)
    if cfg.stagger_x_loads:
        addresses = (ptr + stagger, ptr + (16 - stagger), stagger)
    return gl.inline_asm_elementwise(
        PTX[0], PTX[1], addresses, dtype=(gl.int32,) * (8 * cfg.k_blocks_per_tile), is_pure=False, pack=1
    )


@gluon.jit
def load_scales(scale_ptr, zero_ptr, tile_entry, lane_entry, scheme: gl.constexpr, cfg: gl.constexpr):
    """Scales and zero points of a K tile, a tuple of each. tile_entry: its first entry; lane_entry: the lane's within."""
    s = load_scale(scale_ptr, tile_entry + lane_entry, scheme)
    z = ()
    if scheme.zero_points:
        z = (gl.load(zero_ptr + tile_entry + lane_entry).to(gl.int32),)
    if scheme.scales_per_k_block > 1 and cfg.k_blocks_per_tile == 2:
        s = s + load_scale(scale_ptr, tile_entry + lane_entry + 8 * scheme.scales_per_k_block, scheme)
        if scheme.zero_points:
            z = z + (gl.load(zero_ptr + tile_entry + lane_entry + 8 * scheme.scales_per_k_block).to(gl.int32),)
    return s, z


@gluon.jit
def select4(valid, a, b, i: gl.constexpr):
    """Elements i to i + 3 of a where valid, else of b."""
    return (
        gl.where(valid, a[i], b[i]), gl.where(valid, a[i + 1], b[i + 1]),
        gl.where(valid, a[i + 2], b[i + 2]), gl.where(valid, a[i + 3], b[i + 3]),
    )  # fmt: skip


@gluon.jit
def scale_and_accumulate4(acc, p, i: gl.constexpr, lo, hi):
    """Elements i to i + 3 of acc plus those of p times the scales of rows g (lo) and g + 8 (hi), reduced over the K tiles."""
    return (
        acc[i] + gl.sum(p[i] * lo, 2), acc[i + 1] + gl.sum(p[i + 1] * lo, 2),
        acc[i + 2] + gl.sum(p[i + 2] * hi, 2), acc[i + 3] + gl.sum(p[i + 3] * hi, 2),
    )  # fmt: skip


@gluon.jit
def join4(a, b, c, d):
    """Four tensors as one with two more axes."""
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def accumulators(z, M8_TILES: gl.constexpr):
    """z for each accumulator of an n16 tile: four per 8 rows of x."""
    if M8_TILES == 2:
        return (z, z, z, z, z, z, z, z)
    else:
        return (z, z, z, z)


@gluon.jit
def reduce_k_tiles(acc, M8_TILES: gl.constexpr):
    """Reduce over the K tiles of an iteration."""
    r = (gl.sum(acc[0], 2), gl.sum(acc[1], 2), gl.sum(acc[2], 2), gl.sum(acc[3], 2))
    if M8_TILES == 2:
        r = r + (gl.sum(acc[4], 2), gl.sum(acc[5], 2), gl.sum(acc[6], 2), gl.sum(acc[7], 2))
    return r


@gluon.jit
def mma_k_tile(acc, w, s, z, valid, x_addr, scheme: gl.constexpr, cfg: gl.constexpr):
    """acc plus a K tile's product: load x, dequantize, MMA, scale. valid: the K tile exists."""
    PTX: gl.constexpr = scheme.mma_ptx
    NUM_ACC: gl.constexpr = 4 * cfg.m8_tiles
    x = load_x(x_addr[0], x_addr[2], scheme, cfg)
    if cfg.m8_tiles == 2:
        x = x + load_x(x_addr[1], x_addr[2], scheme, cfg)
    args = w + x
    if scheme.zero_points:
        args = args + z
    if scheme.scales_per_k_block > 1:  # scale blocks of 16 or 32 columns scale the weights, each lane its own
        args = args + scale_pairs(s, 0, scheme)
        if cfg.k_blocks_per_tile == 2:
            args = args + scale_pairs(s, 2, scheme)
        p = gl.inline_asm_elementwise(PTX[0], PTX[1], args + acc, dtype=(gl.float32,) * NUM_ACC, is_pure=True, pack=1)
        if cfg.even:
            out = p
        else:
            out = select4(valid, p, acc, 0)
            if cfg.m8_tiles == 2:
                out = out + select4(valid, p, acc, 4)
    else:  # larger ones scale the K tile's accumulators
        lo, hi = scales_to_float32(s, scheme)
        zeros = accumulators(gl.zeros_like(lo), cfg.m8_tiles)
        p = gl.inline_asm_elementwise(PTX[0], PTX[1], args + zeros, dtype=(gl.float32,) * NUM_ACC, is_pure=True, pack=1)
        if not cfg.even:
            if cfg.m8_tiles == 2:
                p = select4(valid, p, zeros, 0) + select4(valid, p, zeros, 4)
            else:
                p = select4(valid, p, zeros, 0)
        out = scale_and_accumulate4(acc, p, 0, lo, hi)
        if cfg.m8_tiles == 2:
            out = out + scale_and_accumulate4(acc, p, 4, lo, hi)
    return out


@gluon.jit
def reduce_warps_and_store(
    acc, pid_n, bias_ptr, alpha_ptr, y_ptr, M, N, scheme: gl.constexpr, cfg: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """Reduce the accumulators of all warps through shared memory, in their order, and store y."""
    M8: gl.constexpr = cfg.m8_tiles
    N16: gl.constexpr = cfg.n16_per_warp
    ELEMENTS: gl.constexpr = 128 * N16 * M8  # of y, per CTA
    v = join4(acc[0], acc[1], acc[2], acc[3])
    if cfg.m8_tiles == 2:
        v = gl.permute(gl.join(v, join4(acc[4], acc[5], acc[6], acc[7])), [0, 1, 4, 2, 3])
    v = gl.reshape(v, [num_warps, ELEMENTS])
    THREADS: gl.constexpr = 32 * num_warps
    PER_THREAD: gl.constexpr = ELEMENTS // THREADS if THREADS <= ELEMENTS else 1
    L: gl.constexpr = gl.BlockedLayout([num_warps, PER_THREAD if PER_THREAD < 4 else 4], [1, 32], [1, num_warps], [1, 0])
    smem = gl.allocate_shared_memory(gl.float32, [num_warps, ELEMENTS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    smem.store(v)
    y = gl.sum(smem.load(L), 0)
    e = gl.arange(0, ELEMENTS, gl.SliceLayout(0, L))  # ((lane*N16 + n16 tile)*M8 + m8 tile)*4 + 2*(m%2) + n//8%2
    lane = e // (4 * M8 * N16)
    n = (pid_n * N16 + (e // (4 * M8)) % N16) * 16 + lane // 4 + 8 * (e % 2)
    m = ((e // 4) % M8) * 8 + (lane % 4) * 2 + (e // 2) % 2
    store_output(y, n, m, bias_ptr, alpha_ptr, y_ptr, M, N, scheme)


@gluon.jit
def first_entry(scale_row, k_tile, scheme: gl.constexpr, cfg: gl.constexpr):
    """The first entry of a K tile's scales."""
    if scheme.k_tiles_per_scale > 0:
        ENTRIES: gl.constexpr = cfg.k_blocks_per_tile * scheme.scales_per_k_block if scheme.scales_per_k_block > 1 else 1
        return scale_row + (k_tile // scheme.k_tiles_per_scale) * (8 * ENTRIES)
    else:
        return scale_row + k_tile * 0


@gluon.jit
def next_entry(entry, scale_row, k_tile, clamped, scheme: gl.constexpr, cfg: gl.constexpr, K_TILES: gl.constexpr):
    """`first_entry` K_TILES further on; clamped: the K tile, or the last one."""
    ENTRIES: gl.constexpr = cfg.k_blocks_per_tile * scheme.scales_per_k_block if scheme.scales_per_k_block > 1 else 1
    if cfg.even and K_TILES % scheme.k_tiles_per_scale == 0:
        return entry + K_TILES // scheme.k_tiles_per_scale * (8 * ENTRIES)
    elif cfg.even:
        return first_entry(scale_row, k_tile, scheme, cfg)
    else:
        return first_entry(scale_row, clamped, scheme, cfg)


@gluon.jit
def main_loop(
    k_tile, clamped, w_row, x_row0, x_row1, scale_row, lane_entry, stagger, scale_ptr, zero_ptr, num_k_tiles, num_iters,
    L: gl.constexpr, scheme: gl.constexpr, cfg: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Accumulators of the warp's K tiles; weights and scales are loaded an iteration ahead.

    clamped: k_tile, or the last K tile. w_row, x_row0, x_row1: the lane's addresses at K = 0, of weights and of two rows of x.
    """
    N16: gl.constexpr = cfg.n16_per_warp
    K_TILES: gl.constexpr = cfg.k_tiles_per_iter
    STEP: gl.constexpr = num_warps * K_TILES  # K tiles of the CTA's iteration
    W_BYTES: gl.constexpr = 512 * cfg.k_blocks_per_tile * scheme.planes  # of a K tile
    X_BYTES: gl.constexpr = 128 * cfg.k_blocks_per_tile
    w_addr = w_row + clamped * W_BYTES
    x_addr0 = x_row0 + clamped * X_BYTES
    x_addr1 = x_row1 + clamped * X_BYTES
    w = load_weights(w_addr, scheme, cfg)
    entry = first_entry(scale_row, clamped, scheme, cfg)
    s, z = load_scales(scale_ptr, zero_ptr, entry, lane_entry, scheme, cfg)
    if scheme.scales_per_k_block > 1:
        acc = accumulators(gl.zeros((32 * num_warps, N16, K_TILES), gl.float32, L), cfg.m8_tiles)
    else:
        acc = accumulators(gl.zeros((32 * num_warps, N16), gl.float32, gl.SliceLayout(2, L)), cfg.m8_tiles)
    if cfg.pdl:  # only x depends on the previous kernel
        emit(GRID_DEPENDENCY_WAIT)
        emit(LAUNCH_DEPENDENTS)
    for _i in range(0, num_iters - 1):
        k_tile += STEP
        if cfg.even:
            w_addr += STEP * W_BYTES
            next_x_addr0 = x_addr0 + STEP * X_BYTES
            next_x_addr1 = x_addr1 + STEP * X_BYTES
        else:
            clamped = gl.minimum(k_tile, num_k_tiles - 1)
            w_addr = w_row + clamped * W_BYTES
            next_x_addr0 = x_row0 + clamped * X_BYTES
            next_x_addr1 = x_row1 + clamped * X_BYTES
        next_w = load_weights(w_addr, scheme, cfg)
        next_s = s
        next_z = z
        if scheme.k_tiles_per_scale > 0:
            entry = next_entry(entry, scale_row, k_tile, clamped, scheme, cfg, STEP)
            next_s, next_z = load_scales(scale_ptr, zero_ptr, entry, lane_entry, scheme, cfg)
        acc = mma_k_tile(acc, w, s, z, k_tile < num_k_tiles + STEP, (x_addr0, x_addr1, stagger), scheme, cfg)
        w = next_w
        s = next_s
        z = next_z
        x_addr0 = next_x_addr0
        x_addr1 = next_x_addr1
    acc = mma_k_tile(acc, w, s, z, k_tile < num_k_tiles, (x_addr0, x_addr1, stagger), scheme, cfg)
    if scheme.scales_per_k_block > 1:
        acc = reduce_k_tiles(acc, cfg.m8_tiles)
    return acc


@gluon.jit(do_not_specialize=["M", "N", "K", "num_k_tiles", "num_n16_tiles", "scales_per_row", "num_iters"])
def gemv_mma(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, alpha_ptr, y_ptr, M, N, K, num_k_tiles, num_n16_tiles, scales_per_row, num_iters,
    scheme: gl.constexpr, cfg: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """y [M, N] = alpha * x [M, K] @ W.T + bias.

    w_ptr: packed int32 (see `layout`). scale_ptr: float32 [n16 tiles, scales_per_row, 8, 2] (scheme.fp32_scales), else as many
    pairs of the input's dtype in an int32; zero_ptr: as many bytes, in pairs. num_k_tiles: K tiles, rounded up. num_n16_tiles:
    ceil(N / 16). num_iters: K iterations of a warp.
    """
    N16: gl.constexpr = cfg.n16_per_warp
    K_TILES: gl.constexpr = cfg.k_tiles_per_iter
    W_BYTES: gl.constexpr = 512 * cfg.k_blocks_per_tile * scheme.planes  # of a K tile
    L: gl.constexpr = gl.BlockedLayout([1, N16, K_TILES], [32, 1, 1], [num_warps, 1, 1], [2, 1, 0])
    L2: gl.constexpr = gl.SliceLayout(2, L)
    tid = gl.arange(0, 32 * num_warps, gl.SliceLayout(1, L2))[:, None, None]
    n16 = gl.arange(0, N16, gl.SliceLayout(0, L2))[None, :, None]
    k_tile = gl.arange(0, K_TILES, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    lane = tid % 32
    g = lane // 4
    q = lane % 4
    k_tile = (tid // 32) * K_TILES + k_tile
    stagger = (g % 2) * 16
    pid_n = gl.program_id(0)
    n16_tile = pid_n * N16 + n16
    clamped = k_tile
    if not cfg.even:
        n16_tile = gl.minimum(n16_tile, num_n16_tiles - 1)
        clamped = gl.minimum(k_tile, num_k_tiles - 1)
    w_row = w_ptr.to(gl.int64) + ((n16_tile * num_k_tiles).to(gl.int64) * W_BYTES + (q * 128 + g * 16))
    x_base = x_ptr.to(gl.int64)
    x_row0 = x_base + (gl.minimum(g, M - 1) * (2 * K) + q * 32)
    x_row1 = x_base + (gl.minimum(g + 8, M - 1) * (2 * K) + q * 32)
    scale_row = n16_tile * scales_per_row * 8 + g
    lane_entry = q * scheme.scales_per_k_block // 4 * 8
    acc = main_loop(
        k_tile, clamped, w_row, x_row0, x_row1, scale_row, lane_entry, stagger, scale_ptr, zero_ptr, num_k_tiles, num_iters, L,
        scheme, cfg, num_warps,
    )  # fmt: skip
    reduce_warps_and_store(acc, pid_n, bias_ptr, alpha_ptr, y_ptr, M, N, scheme, cfg, num_warps)
