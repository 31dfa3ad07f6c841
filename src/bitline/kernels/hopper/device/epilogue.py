# mypy: ignore-errors
"""Epilogue of `wgmma_persistent`: store whole tiles, and reduce the partials of stream-K tiles.

A consumer warpgroup's accumulators are a tuple: one MMA, or two where it has a second 64-row tile of W (n64_per_warpgroup = 2) or
a second tile of x (tile_m_extra). Partials are kept in thread-major order: [128 threads, tile_m / 2], so that a thread stores and
loads vectors of 16 bytes that are its own accumulators.

`scheme` is a `traits.SchemeTraits`, `cfg` a `traits.WgmmaTraits`; `work`, `schedule` and `pointers` as in `wgmma_persistent`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from bitline.kernels.hopper.device.common import barrier

async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # renamed in Triton 3.8


@gluon.jit
def thread_major(acc, TILE_M: gl.constexpr):
    """Accumulators [64, TILE_M] as [128 threads, TILE_M / 2]; renames registers only."""
    L: gl.constexpr = gl.BlockedLayout([1, TILE_M // 2], [32, 1], [4, 1], [1, 0])
    v = gl.reshape(acc, [4, 2, 8, TILE_M // 8, 4, 2])  # warp, half of its rows, row, columns / 8, lane, element
    return gl.convert_layout(gl.reshape(gl.permute(v, [0, 2, 4, 3, 1, 5]), [128, TILE_M // 2]), L, assert_trivial=True)


@gluon.jit
def partial_offsets(TILE_M: gl.constexpr):
    """Offsets of `thread_major` accumulators in the workspace: 16 bytes of each thread side by side."""
    L: gl.constexpr = gl.BlockedLayout([1, TILE_M // 2], [32, 1], [4, 1], [1, 0])
    i = gl.arange(0, TILE_M // 2, gl.SliceLayout(0, L))
    return ((i // 4) * 512 + i % 4)[None, :] + (gl.arange(0, 128, gl.SliceLayout(1, L)) * 4)[:, None]


@gluon.jit
def add_partials(v, ptr, first_cta, end_cta, CTA_STRIDE: gl.constexpr, TILE_M: gl.constexpr, PREFETCH: gl.constexpr):
    """v plus the partials of CTAs [first_cta, end_cta), in order. PREFETCH: load those of the first three independently."""
    ptr += partial_offsets(TILE_M)
    if PREFETCH:
        p0 = gl.load(ptr + first_cta * CTA_STRIDE, cache_modifier=".cg")
        has_second = (partial_offsets(TILE_M) >= 0) & (end_cta - first_cta > 1)
        has_third = (partial_offsets(TILE_M) >= 0) & (end_cta - first_cta > 2)
        p1 = gl.load(ptr + (first_cta + 1) * CTA_STRIDE, mask=has_second, other=0.0, cache_modifier=".cg")
        p2 = gl.load(ptr + (first_cta + 2) * CTA_STRIDE, mask=has_third, other=0.0, cache_modifier=".cg")
        v += p0
        v += p1
        v += p2
        first_cta += 3
    for cta in range(first_cta, end_cta):
        v += gl.load(ptr + cta * CTA_STRIDE, cache_modifier=".cg")
    return v


@gluon.jit
def scale_and_add_bias(acc, n, bias_ptr, alpha_ptr, N, TILE_M: gl.constexpr, scheme: gl.constexpr):
    """Accumulators [64, TILE_M] of rows n and on of W, in the MMA's layout, times the global scale plus bias."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 16])
    if scheme.has_global_scale:
        acc *= gl.load(alpha_ptr + (2 if scheme.folds_exponent_bias else 0))
    if scheme.has_bias:
        rows = gl.arange(0, 64, gl.SliceLayout(1, L))
        acc += gl.load(bias_ptr + n + rows, mask=n + rows < N, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def store_through_shared(acc, y_desc, smem, n, m, scheme: gl.constexpr):
    """y[m : m + TILE_M, n : n + 64] from results [64, TILE_M], by TMA through smem [TILE_M, 64]."""
    tma.store_wait(0)
    barrier()
    smem.permute([1, 0]).store(acc.to(gl.float16 if scheme.fp16 else gl.bfloat16))
    fence_async_shared()
    barrier()
    async_store(y_desc, [m, n], smem)


@gluon.jit
def store_tile(v, y_desc, smem, n, m, pointers, N, TILE_M: gl.constexpr, scheme: gl.constexpr):
    """y[m : m + TILE_M, n : n + 64] from `thread_major` accumulators: global scale, bias, then TMA through smem [TILE_M, 64]."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 16])
    v = gl.permute(gl.reshape(v, [4, 8, 4, TILE_M // 8, 2, 2]), [0, 4, 1, 3, 2, 5])
    acc = gl.convert_layout(gl.reshape(v, [64, TILE_M]), L, assert_trivial=True)
    _partials_ptr, _flags_ptr, bias_ptr, alpha_ptr = pointers
    acc = scale_and_add_bias(acc, n, bias_ptr, alpha_ptr, N, TILE_M, scheme)
    store_through_shared(acc, y_desc, smem, n, m, scheme)


@gluon.jit
def end_cta(tile, schedule):
    """The CTA after the last one that has stages of a stream-K tile."""
    stages_per_tile, _tiles_m, _tiles_n, num_ctas, whole_tiles, stream_k_stages = schedule
    return ((tile - whole_tiles * num_ctas + 1) * stages_per_tile * num_ctas + stream_k_stages - 1) // stream_k_stages


@gluon.jit
def wait_for_partials(flag, count):
    """Wait until `count` CTAs have stored their partials, and reset the flag."""
    arrived = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while arrived != count:
        arrived = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    barrier()
    gl.atomic_xchg(flag, 0, sem="relaxed", scope="gpu")


@gluon.jit
def split_half(v, TILE_M: gl.constexpr):
    """`thread_major` accumulators of the first and of the other TILE_M / 2 rows of x."""
    L: gl.constexpr = gl.BlockedLayout([1, TILE_M // 4], [32, 1], [4, 1], [1, 0])
    v0, v1 = gl.split(gl.permute(gl.reshape(v, [128, 2, TILE_M // 4]), [0, 2, 1]))
    return gl.convert_layout(v0, L, assert_trivial=True), gl.convert_layout(v1, L, assert_trivial=True)


@gluon.jit
def split_slices(v, TILE_M: gl.constexpr, SLICES: gl.constexpr):
    """`thread_major` accumulators as 2 or 4 slices along M."""
    v0, v1 = split_half(v, TILE_M)
    slices = (v0, v1)
    if SLICES == 4:
        a0, a1 = split_half(v0, TILE_M // 2)
        b0, b1 = split_half(v1, TILE_M // 2)
        slices = (a0, a1, b0, b1)
    return slices


@gluon.jit
def store_tiles(
    v, y_descs, y_smem, n, m, slice: gl.constexpr, pointers, N, warpgroup: gl.constexpr, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Store a warpgroup's accumulators of a tile at y[m, n]; of the slice-th slice along M where it is sliced."""
    SLICES: gl.constexpr = cfg.reduce_slices if cfg.reduce_slices > 0 else 1
    BUFFER: gl.constexpr = warpgroup * cfg.n64_per_warpgroup
    ROWS: gl.constexpr = cfg.tile_m // SLICES
    at: gl.constexpr = slice * ROWS
    store_tile(v[0], y_descs[0], y_smem.index(BUFFER).slice(at, ROWS, dim=0), n, m + at, pointers, N, ROWS, scheme)
    if cfg.n64_per_warpgroup == 2:
        smem = y_smem.index(BUFFER + 1).slice(at, ROWS, dim=0)
        store_tile(v[1], y_descs[0], smem, n + 64, m + at, pointers, N, ROWS, scheme)
    if cfg.tile_m_extra > 0:
        EXTRA: gl.constexpr = cfg.tile_m_extra // SLICES
        at2: gl.constexpr = slice * EXTRA
        smem = y_smem.index(BUFFER).slice(at2, EXTRA, dim=0)
        store_tile(v[1], y_descs[1], smem, n, m + cfg.tile_m + at2, pointers, N, EXTRA, scheme)


@gluon.jit
def thread_major_tile(acc, cfg: gl.constexpr):
    """A warpgroup's accumulators, `thread_major`."""
    SECOND_M: gl.constexpr = cfg.tile_m if cfg.n64_per_warpgroup == 2 else cfg.tile_m_extra
    v = (thread_major(acc[0], cfg.tile_m),)
    if SECOND_M > 0:
        v = v + (thread_major(acc[1], SECOND_M),)
    return v


@gluon.jit
def epilogue(
    warpgroup: gl.constexpr, acc, y_descs, y_smem, pointers, work, cta, N, schedule, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Store a whole tile. Of a stream-K tile store partials; the CTA with the tile's first stage waits for those of the others,
    reduces them in CTA order and stores the tile."""
    tile, k0, k1, pid_n, pid_m = work
    partials_ptr, flags_ptr, _bias_ptr, _alpha_ptr = pointers
    stages_per_tile, _tiles_m, _tiles_n, num_ctas, whole_tiles, _stream_k_stages = schedule
    CTA_M: gl.constexpr = cfg.tile_m + cfg.tile_m_extra
    N64: gl.constexpr = cfg.num_consumer_warpgroups * cfg.n64_per_warpgroup
    SECOND_M: gl.constexpr = cfg.tile_m if cfg.n64_per_warpgroup == 2 else cfg.tile_m_extra
    CTA_STRIDE: gl.constexpr = N64 * 64 * CTA_M
    PREFETCH: gl.constexpr = cfg.tile_m <= 32 or (cfg.tile_m == 64 and cfg.consumer_registers > 200)
    FIRST_N64: gl.constexpr = warpgroup * cfg.n64_per_warpgroup
    flag = flags_ptr + ((tile - whole_tiles * num_ctas) * cfg.num_consumer_warpgroups + warpgroup)
    partials = partials_ptr + FIRST_N64 * (64 * CTA_M)
    second = partials + 64 * cfg.tile_m
    n = (pid_n * N64 + FIRST_N64) * 64
    m = pid_m * CTA_M
    v = thread_major_tile(acc, cfg)
    if k0 > 0:
        gl.store(partials + cta * CTA_STRIDE + partial_offsets(cfg.tile_m), v[0])
        if SECOND_M > 0:
            gl.store(second + cta * CTA_STRIDE + partial_offsets(SECOND_M), v[1])
        barrier()
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        if k1 < stages_per_tile:
            end = end_cta(tile, schedule)
            wait_for_partials(flag, end - 1 - cta)
            total = (add_partials(v[0], partials, cta + 1, end, CTA_STRIDE, cfg.tile_m, PREFETCH),)
            if SECOND_M > 0:
                total = total + (add_partials(v[1], second, cta + 1, end, CTA_STRIDE, SECOND_M, PREFETCH),)
            v = total
        store_tiles(v, y_descs, y_smem, n, m, 0, pointers, N, warpgroup, scheme, cfg)


@gluon.jit
def store_foreign_slices(
    v, partials, second, flag, cta, rank, ctas_per_tile, CTA_STRIDE: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """Store the partials of the slices that other CTAs reduce, and count them in. rank: of the CTA among those of the tile."""
    SLICES: gl.constexpr = cfg.reduce_slices
    SECOND_M: gl.constexpr = cfg.tile_m if cfg.n64_per_warpgroup == 2 else cfg.tile_m_extra
    ROWS: gl.constexpr = cfg.tile_m // SLICES
    for i in gl.static_range(SLICES):
        if rank != i * ctas_per_tile // SLICES:
            gl.store(partials + (cta * CTA_STRIDE + i * (64 * ROWS)) + partial_offsets(ROWS), v[0][i])
            if SECOND_M > 0:
                EXTRA: gl.constexpr = SECOND_M // SLICES
                gl.store(second + (cta * CTA_STRIDE + i * (64 * EXTRA)) + partial_offsets(EXTRA), v[1][i])
    barrier()
    for i in gl.static_range(SLICES):
        if rank != i * ctas_per_tile // SLICES:
            gl.atomic_add(flag + i, 1, sem="release", scope="gpu")


@gluon.jit
def reduce_slice(
    v, partials, second, first_cta, cta, ctas_per_tile, i: gl.constexpr, CTA_STRIDE: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """The i-th slices v plus the partials of all other CTAs of the tile, in their order."""
    SECOND_M: gl.constexpr = cfg.tile_m if cfg.n64_per_warpgroup == 2 else cfg.tile_m_extra
    ROWS: gl.constexpr = cfg.tile_m // cfg.reduce_slices
    y = add_partials(v[0], partials + i * (64 * ROWS), first_cta, cta, CTA_STRIDE, ROWS, False)
    y = add_partials(y, partials + i * (64 * ROWS), cta + 1, first_cta + ctas_per_tile, CTA_STRIDE, ROWS, False)
    total = (y,)
    if SECOND_M > 0:
        EXTRA: gl.constexpr = SECOND_M // cfg.reduce_slices
        y2 = add_partials(v[1], second + i * (64 * EXTRA), first_cta, cta, CTA_STRIDE, EXTRA, False)
        y2 = add_partials(y2, second + i * (64 * EXTRA), cta + 1, first_cta + ctas_per_tile, CTA_STRIDE, EXTRA, False)
        total = total + (y2,)
    return total


@gluon.jit
def epilogue_distributed(
    warpgroup: gl.constexpr, acc, y_descs, y_smem, pointers, work, cta, N, schedule, scheme: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """`epilogue` where all stream-K tiles have equally many CTAs: cfg.reduce_slices of these reduce and store a slice along M
    each. Slice i belongs to CTA i * ctas_per_tile // reduce_slices of the tile."""
    tile, k0, k1, pid_n, pid_m = work
    partials_ptr, flags_ptr, _bias_ptr, _alpha_ptr = pointers
    stages_per_tile, _tiles_m, _tiles_n, num_ctas, whole_tiles, stream_k_stages = schedule
    SLICES: gl.constexpr = cfg.reduce_slices
    CTA_M: gl.constexpr = cfg.tile_m + cfg.tile_m_extra
    N64: gl.constexpr = cfg.num_consumer_warpgroups * cfg.n64_per_warpgroup
    SECOND_M: gl.constexpr = cfg.tile_m if cfg.n64_per_warpgroup == 2 else cfg.tile_m_extra
    CTA_STRIDE: gl.constexpr = N64 * 64 * CTA_M
    FIRST_N64: gl.constexpr = warpgroup * cfg.n64_per_warpgroup
    flag = flags_ptr + ((tile - whole_tiles * num_ctas) * cfg.num_consumer_warpgroups + warpgroup) * SLICES
    partials = partials_ptr + FIRST_N64 * (64 * CTA_M)
    second = partials + 64 * cfg.tile_m
    n = (pid_n * N64 + FIRST_N64) * 64
    m = pid_m * CTA_M
    v = thread_major_tile(acc, cfg)
    slices = (split_slices(v[0], cfg.tile_m, SLICES),)
    if SECOND_M > 0:
        slices = slices + (split_slices(v[1], SECOND_M, SLICES),)
    whole = k1 - k0 == stages_per_tile
    ctas_per_tile = num_ctas * stages_per_tile // stream_k_stages
    first_cta = cta // ctas_per_tile * ctas_per_tile
    rank = cta - first_cta
    if not whole:
        store_foreign_slices(slices, partials, second, flag, cta, rank, ctas_per_tile, CTA_STRIDE, cfg)
    for i in gl.static_range(SLICES):
        if whole | (rank == i * ctas_per_tile // SLICES):
            y = (slices[0][i],)
            if SECOND_M > 0:
                y = y + (slices[1][i],)
            if not whole:
                wait_for_partials(flag + i, ctas_per_tile - 1)
                y = reduce_slice(y, partials, second, first_cta, cta, ctas_per_tile, i, CTA_STRIDE, cfg)
            store_tiles(y, y_descs, y_smem, n, m, i, pointers, N, warpgroup, scheme, cfg)
