# mypy: ignore-errors
"""Device code that writes the tiles of `wide_device`: whole ones, and parts of cut ones once they are added up.

S is a `launch.Code`, G a `launch.Geometry`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from bitline.kernels.hopper.device.gemv_mma import barrier

async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # its name since, and before, Triton 3.8


@gluon.jit
def flat(acc, BM: gl.constexpr):
    """Accumulators [64, BM] as [128 threads, BM / 2], so that a thread's own lie side by side: only renames registers."""
    L: gl.constexpr = gl.BlockedLayout([1, BM // 2], [32, 1], [4, 1], [1, 0])
    v = gl.reshape(acc, [4, 2, 8, BM // 8, 4, 2])  # warp, half of its rows, row, columns / 8, lane, element
    return gl.convert_layout(gl.reshape(gl.permute(v, [0, 2, 4, 3, 1, 5]), [128, BM // 2]), L, assert_trivial=True)


@gluon.jit
def places(BM: gl.constexpr):
    """Offsets of `flat` in scratch: 16 bytes of each thread side by side."""
    L: gl.constexpr = gl.BlockedLayout([1, BM // 2], [32, 1], [4, 1], [1, 0])
    i = gl.arange(0, BM // 2, gl.SliceLayout(0, L))
    return ((i // 4) * 512 + i % 4)[None, :] + (gl.arange(0, 128, gl.SliceLayout(1, L)) * 4)[:, None]


@gluon.jit
def collect(v, at, q0, q1, STEP: gl.constexpr, BM: gl.constexpr, AHEAD: gl.constexpr):
    """v plus the parts of programs [q0, q1), in their order."""
    at += places(BM)
    if AHEAD:  # independent loads first: three parts are what even splits have
        l0 = gl.load(at + q0 * STEP, cache_modifier=".cg")
        two = (places(BM) >= 0) & (q1 - q0 > 1)
        three = (places(BM) >= 0) & (q1 - q0 > 2)
        l1 = gl.load(at + (q0 + 1) * STEP, mask=two, other=0.0, cache_modifier=".cg")
        l2 = gl.load(at + (q0 + 2) * STEP, mask=three, other=0.0, cache_modifier=".cg")
        v += l0
        v += l1
        v += l2
        q0 += 3
    for q in range(q0, q1):
        v += gl.load(at + q * STEP, cache_modifier=".cg")
    return v


@gluon.jit
def write(v, od, o, n, m, bias_ptr, alpha_ptr, N, BM: gl.constexpr, S: gl.constexpr):
    """Finished columns of y [64 of N, BM rows of x], as `flat` has them, through o [BM, 64]."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    v = gl.permute(gl.reshape(v, [4, 8, 4, BM // 8, 2, 2]), [0, 4, 1, 3, 2, 5])
    acc = gl.convert_layout(gl.reshape(v, [64, BM]), L, assert_trivial=True)
    if S.alpha:
        acc *= gl.load(alpha_ptr + (2 if S.folded else 0))
    if S.bias:
        rows = gl.arange(0, 64, gl.SliceLayout(1, L))
        acc += gl.load(bias_ptr + n + rows, mask=n + rows < N, other=0.0).to(gl.float32)[:, None]
    tma.store_wait(0)
    barrier()
    o.permute([1, 0]).store(acc.to(gl.float16 if S.half else gl.bfloat16))
    fence_async_shared()
    barrier()
    async_store(od, [m, n], o)


@gluon.jit
def await_parts(flag, n):
    """Until n parts are there; the flag is zero again."""
    f = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while f != n:
        f = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    barrier()
    gl.atomic_xchg(flag, 0, sem="relaxed", scope="gpu")


@gluon.jit
def halve(v, BM: gl.constexpr):
    """The halves of `flat`: the first and the other BM / 2 columns."""
    L: gl.constexpr = gl.BlockedLayout([1, BM // 4], [32, 1], [4, 1], [1, 0])
    v0, v1 = gl.split(gl.permute(gl.reshape(v, [128, 2, BM // 4]), [0, 2, 1]))
    return gl.convert_layout(v0, L, assert_trivial=True), gl.convert_layout(v1, L, assert_trivial=True)


@gluon.jit
def cut(v, BM: gl.constexpr, SPLIT: gl.constexpr):
    """The halves or quarters of `flat`."""
    v0, v1 = halve(v, BM)
    found = (v0, v1)
    if SPLIT == 4:
        a0, a1 = halve(v0, BM // 2)
        b0, b1 = halve(v1, BM // 2)
        found = (a0, a1, b0, b1)
    return found


@gluon.jit
def finish(
    c: gl.constexpr, acc, acb, od, oe, ob, ws, flags, bias_ptr, alpha_ptr, tile, k0, k1, pn, pm, p, N, KS, P, whole, R,
    S: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Write a warpgroup's part of a tile, or keep it for the program that holds the tile's start, or add up what others kept.

    acb: the sums of the second product, where there are two: further rows of W, or of x.
    """
    TWO: gl.constexpr = G.mr == 2 or G.bm2 > 0
    BM: gl.constexpr = G.bm
    BM2: gl.constexpr = G.bm if G.mr == 2 else G.bm2
    STEP: gl.constexpr = G.nb * G.mr * 64 * (G.bm + G.bm2)
    AHEAD: gl.constexpr = BM <= 32 or (BM == 64 and G.registers > 200)
    b0: gl.constexpr = c * G.mr
    b1: gl.constexpr = b0 + G.mr - 1
    flag = flags + ((tile - whole * P) * G.nb + c)
    at = ws + b0 * (64 * (G.bm + G.bm2))
    at2 = at + 64 * G.bm
    n = (pn * (G.nb * G.mr) + b0) * 64
    m = pm * (G.bm + G.bm2)
    v = flat(acc, BM)
    if TWO:
        v2 = flat(acb, BM2)
    if k0 > 0:
        gl.store(at + p * STEP + places(BM), v)
        if TWO:
            gl.store(at2 + p * STEP + places(BM2), v2)
        barrier()
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        if k1 < KS:
            end = ((tile - whole * P + 1) * KS * P + R - 1) // R
            await_parts(flag, end - 1 - p)
            v = collect(v, at, p + 1, end, STEP, BM, AHEAD)
            if TWO:
                v2 = collect(v2, at2, p + 1, end, STEP, BM2, AHEAD)
        write(v, od, ob.index(b0), n, m, bias_ptr, alpha_ptr, N, BM, S)
        if G.mr == 2:
            write(v2, od, ob.index(b1), n + 64, m, bias_ptr, alpha_ptr, N, BM, S)
        if G.bm2 > 0:
            write(v2, oe, ob.index(b0).slice(0, BM2, dim=0), n, m + BM, bias_ptr, alpha_ptr, N, BM2, S)


@gluon.jit
def finish_shared(
    c: gl.constexpr, acc, acb, od, oe, ob, ws, flags, bias_ptr, alpha_ptr, tile, k0, k1, pn, pm, p, N, KS, P, whole, R,
    S: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """The same where all cut tiles have as many programs: G.split of these add up and write as many parts of the rows of x."""
    TWO: gl.constexpr = G.mr == 2 or G.bm2 > 0
    SPLIT: gl.constexpr = G.split
    BM: gl.constexpr = G.bm // SPLIT
    BM2: gl.constexpr = (G.bm if G.mr == 2 else G.bm2) // SPLIT
    STEP: gl.constexpr = G.nb * G.mr * 64 * (G.bm + G.bm2)
    b0: gl.constexpr = c * G.mr
    b1: gl.constexpr = b0 + G.mr - 1
    flag = flags + ((tile - whole * P) * G.nb + c) * SPLIT
    at = ws + b0 * (64 * (G.bm + G.bm2))
    at2 = at + 64 * G.bm
    n = (pn * (G.nb * G.mr) + b0) * 64
    m = pm * (G.bm + G.bm2)
    v = cut(flat(acc, G.bm), G.bm, SPLIT)
    v2 = v
    if TWO:
        v2 = cut(flat(acb, BM2 * SPLIT), BM2 * SPLIT, SPLIT)
    uncut = k1 - k0 == KS
    programs = P * KS // R
    first = p // programs * programs
    mine = p - first  # part i belongs to program first + i * programs // SPLIT
    if not uncut:
        for i in gl.static_range(SPLIT):
            if mine != i * programs // SPLIT:
                gl.store(at + (p * STEP + i * (64 * BM)) + places(BM), v[i])
                if TWO:
                    gl.store(at2 + (p * STEP + i * (64 * BM2)) + places(BM2), v2[i])
        barrier()
        for i in gl.static_range(SPLIT):
            if mine != i * programs // SPLIT:
                gl.atomic_add(flag + i, 1, sem="release", scope="gpu")
    for i in gl.static_range(SPLIT):
        if uncut | (mine == i * programs // SPLIT):
            y = v[i]
            y2 = v2[i]
            if not uncut:
                await_parts(flag + i, programs - 1)
                y = collect(y, at + i * (64 * BM), first, p, STEP, BM, False)
                y = collect(y, at + i * (64 * BM), p + 1, first + programs, STEP, BM, False)
                if TWO:
                    y2 = collect(y2, at2 + i * (64 * BM2), first, p, STEP, BM2, False)
                    y2 = collect(y2, at2 + i * (64 * BM2), p + 1, first + programs, STEP, BM2, False)
            write(y, od, ob.index(b0).slice(i * BM, BM, dim=0), n, m + i * BM, bias_ptr, alpha_ptr, N, BM, S)
            if G.mr == 2:
                write(y2, od, ob.index(b1).slice(i * BM, BM, dim=0), n + 64, m + i * BM, bias_ptr, alpha_ptr, N, BM, S)
            if G.bm2 > 0:
                o = ob.index(b0).slice(i * BM2, BM2, dim=0)
                write(y2, oe, o, n, m + G.bm + i * BM2, bias_ptr, alpha_ptr, N, BM2, S)
