# mypy: ignore-errors
"""Device code for up to 16 rows of x, operands by cp.async through shared memory: by mma.sync m16n8k16 with W as operand A.

A program owns 16*R*groups rows of W and all of K. Its warps share K out, a unit of 64 or 128 columns per step; the warps of
one share have R tiles of W each, and x in common. They add up through shared memory at the end, in a fixed order.

Words, scales, zero points and x of a step go to a ring of slots in shared memory, some steps ahead: no registers hold what is
in flight, and the compiler cannot move its loads to where they are used. Copies take whole rows of 128 bytes, while a lane
reads 16 bytes of several; 16-byte pieces are placed so that no bank is met twice either way. Where `G.ring_x` is not set, x
comes from the cache instead, in 16-byte pieces each (`layout` says why no shuffle is needed). Rows of x past M repeat row
M - 1 and are not stored; columns past K are zero.

Tensors are [threads, R, 1] with one element for each thread at each R, so that a layout is only a numbering.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bitline.kernels.hopper.decode_device import LAUNCH, WAIT, barrier, do, load_scale, pairs, quad, repeat, widen, write

_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # its name since, and before, Triton 3.9

_BASE = gl.constexpr("mov.u32 $0, global_smem;")  # Triton's name of a program's shared memory; there is one allocation
_COMMIT = gl.constexpr("cp.async.commit_group; // $0")
_SYNC = gl.constexpr("bar.warp.sync -1; // $0")
_LOAD4 = gl.constexpr("ld.shared.b32 $0, [$1];")
_LOAD8 = gl.constexpr("ld.shared.v2.f32 {$0,$1}, [$2];")
_LOAD2 = gl.constexpr("{ .reg .b16 t; ld.shared.u16 t, [$1]; cvt.u32.u16 $0, t; }")


@gluon.jit
def copy_few(slot, p, lane, S: gl.constexpr, bytes: gl.constexpr):
    """The warp copies so many bytes, at most 512, 16 a lane; slot and p are the lane's."""
    gl.inline_asm_elementwise(S.few[0], S.few[1], [slot, p, bytes // 16 - lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ring_scale(slot, S: gl.constexpr):
    """What `load_scale` gives, from a slot."""
    if S.wide:
        a, b = gl.inline_asm_elementwise(_LOAD8, "=f,=f,r", [slot], dtype=(gl.float32, gl.float32), is_pure=False, pack=1)
        return (a, b)
    else:
        word = gl.inline_asm_elementwise(_LOAD4, "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1)
        return (word, word)


@gluon.jit
def ring_zero(slot):
    """Two zero points from a slot."""
    return gl.inline_asm_elementwise(_LOAD2, "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def get_x(p, slot, left, S: gl.constexpr, G: gl.constexpr):
    """The lane's part of one row of x for a unit. p: its address, or slot: that of its copy; left: bytes from p to K."""
    if G.ring_x:
        a = (slot, slot ^ 16)
    elif G.even:
        a = (p,)
    else:
        a = (p, left)
    return gl.inline_asm_elementwise(S.x[0], S.x[1], a, dtype=(gl.int32,) * (8 * G.blocks), is_pure=False, pack=1)


@gluon.jit
def copy_unit(slot, u, o, wb, sb, blocks, lane, s_ptr, z_ptr, S: gl.constexpr, G: gl.constexpr):
    """Copy unit u to slot + o: words, scales and zero points. wb: the lane's words of the first unit; sb: its scales' entry.

    The second block of the last unit may be missing: then the first is copied twice, and what x multiplies it with is zero.
    """
    B: gl.constexpr = G.blocks
    FINE: gl.constexpr = S.fine if S.fine > 1 else 1
    TABLES: gl.constexpr = B if S.fine > 1 else 1  # of 8 * FINE scales
    SBYTES: gl.constexpr = (64 if S.wide else 32) * FINE
    ZBYTES: gl.constexpr = 16 * FINE
    at = u
    second = 1
    if not G.even:
        at = gl.minimum(u, (blocks + B - 1) // B - 1)
        second = gl.where(at * B + 1 < blocks, 1, 0)
    wp = wb + at * (512 * B * S.planes)
    a = (slot[0] + o, wp)
    if B == 2:
        a = a + (wp + second * (512 * S.planes),)
    gl.inline_asm_elementwise(S.copy[0], S.copy[1], a, dtype=gl.int32, is_pure=False, pack=1)
    if S.per > 0:
        table = sb + at // S.per * TABLES
        so = table * SBYTES + lane * 16
        zo = table * ZBYTES + lane * 16
        copy_few(slot[1] + o, s_ptr + so, lane, S, SBYTES)
        if S.zero:
            copy_few(slot[2] + o, z_ptr + zo, lane, S, ZBYTES)
        if TABLES == 2:
            copy_few(slot[1] + o + SBYTES, s_ptr + so + second * SBYTES, lane, S, SBYTES)
            if S.zero:
                copy_few(slot[2] + o + ZBYTES, z_ptr + zo + second * ZBYTES, lane, S, ZBYTES)


@gluon.jit
def copy_x(slot, p, left, S: gl.constexpr, G: gl.constexpr):
    """Copy a unit of x, each lane its pieces of some rows: slot, p [threads, 1, pieces]; left: bytes from p to K."""
    NB: gl.constexpr = G.blocks
    for b in gl.static_range(NB):
        count = slot * 0 + 16
        if not G.even:
            count = slot * 0 + gl.where(left > b * 128, 16, 0)
        gl.inline_asm_elementwise(
            S.piece[0], S.piece[1], [slot + b * 1024 * G.mt, p + b * 128, count], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def step(acc, slot, s, z, x, S: gl.constexpr, G: gl.constexpr):
    """One unit of 64 or 128 columns: decode, multiply and add to acc. slot: the lane's words, scales and zero points."""
    FINE: gl.constexpr = S.fine if S.fine > 1 else 1
    SBYTES: gl.constexpr = (64 if S.wide else 32) * FINE
    if S.per > 0:
        s = ring_scale(slot[1], S)
        if S.zero:
            z = (ring_zero(slot[2]),)
        if S.fine > 1 and G.blocks == 2:
            s = s + ring_scale(slot[1] + SBYTES, S)
            if S.zero:
                z = z + (ring_zero(slot[2] + 16 * FINE),)
    a = (slot[0],) + x
    if S.zero:
        a = a + z
    if S.fine > 1:  # scales of 16 or 32 columns: each lane scales its own
        a = a + pairs(s, 0, S)
        if G.blocks == 2:
            a = a + pairs(s, 2, S)
        r = gl.inline_asm_elementwise(S.unit[0], S.unit[1], a + acc, dtype=(gl.float32,) * (4 * G.mt), is_pure=False, pack=1)
    else:
        lo, hi = widen(s, S)
        zeros = repeat(gl.zeros_like(lo), G.mt)
        p = gl.inline_asm_elementwise(S.unit[0], S.unit[1], a + zeros, dtype=(gl.float32,) * (4 * G.mt), is_pure=False, pack=1)
        r = (acc[0] + p[0] * lo, acc[1] + p[1] * lo, acc[2] + p[2] * hi, acc[3] + p[3] * hi)
        if G.mt == 2:
            r = r + (acc[4] + p[4] * lo, acc[5] + p[5] * lo, acc[6] + p[6] * hi, acc[7] + p[7] * hi)
    return r


@gluon.jit(do_not_specialize=["M", "N", "K", "blocks", "tiles", "groups", "steps"])
def ring(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, alpha_ptr, o_ptr, M, N, K, blocks, tiles, groups, steps,
    S: gl.constexpr, G: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """y [M, N] = alpha * x [M, K] @ W.T + bias. S is a `launch.Code`, G a `launch.Lanes`.

    blocks: K / 64, rounded up. tiles: N / 16, rounded up, and at least R*groups of a program. groups: scales of a row. steps:
    units of a share of K. Here S.per counts units. Scales are float32 [tiles, groups, 8, 2] (S.wide) or pairs of the input's
    dtype; z_ptr: bytes. Rows of x are a multiple of 16 bytes.
    """
    NW: gl.constexpr = num_warps
    RG: gl.constexpr = G.groups
    KS: gl.constexpr = NW // RG  # shares of K
    R: gl.constexpr = G.r
    D: gl.constexpr = G.depth
    MT: gl.constexpr = G.mt
    T: gl.constexpr = 32 * NW
    XBYTES: gl.constexpr = 128 * G.blocks
    TABLES: gl.constexpr = (G.blocks * S.fine if S.fine > 1 else 1) if S.per > 0 else 0
    WBYTES: gl.constexpr = 512 * G.blocks * S.planes
    SBYTES: gl.constexpr = TABLES * (64 if S.wide else 32)
    TILE: gl.constexpr = WBYTES + SBYTES + (TABLES * 16 if S.zero else 0)  # of a step
    XCOPY: gl.constexpr = 1024 * MT * G.blocks if G.ring_x else 0
    STEP: gl.constexpr = (RG * R * TILE + XCOPY + 127) // 128 * 128  # of a share
    E: gl.constexpr = 128 * R * MT  # sums of a warp
    SHARE: gl.constexpr = D * STEP if D * STEP > 4 * RG * E else 4 * RG * E
    J: gl.constexpr = 2 * MT // RG if 2 * MT > RG else 1  # pieces of x of a lane and block: of 4 rows each
    L: gl.constexpr = gl.BlockedLayout([1, R, 1], [32, 1, 1], [NW, 1, 1], [2, 1, 0])
    L2: gl.constexpr = gl.SliceLayout(2, L)
    LX: gl.constexpr = gl.BlockedLayout([1, 1, J], [32, 1, 1], [NW, 1, 1], [2, 1, 0])
    sm = gl.allocate_shared_memory(gl.float32, [(KS * SHARE + 511) // 512, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tid = gl.arange(0, T, gl.SliceLayout(1, L2))[:, None, None]
    r = gl.arange(0, R, gl.SliceLayout(0, L2))[None, :, None]
    lane = tid % 32
    g = lane // 4
    q = lane % 4
    u = tid // (32 * RG)
    row_group = tid // 32 % RG
    pn = gl.program_id(0)
    first = gl.minimum(pn * (RG * R), tiles - RG * R)  # the last program repeats rows of the one before it
    rt = first + row_group * R + r
    wb = w_ptr.to(gl.int64) + ((rt * blocks).to(gl.int64) * (512 * S.planes) + lane * 16)
    sp = s_ptr.to(gl.int64)
    zp = z_ptr.to(gl.int64)
    xb = x_ptr.to(gl.int64)  # x as it is read from the cache
    x0 = xb + (gl.minimum(g, M - 1) * (2 * K) + q * 32 + u * XBYTES)
    x1 = xb + (gl.minimum(g + 8, M - 1) * (2 * K) + q * 32 + u * XBYTES)
    left = 2 * K - q * 32 - u * XBYTES
    sb = rt * groups // (S.fine if S.fine > 1 else 1)
    base = gl.inline_asm_elementwise(_BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    share = base + u * SHARE
    mine = share + XCOPY + (row_group * R + r) * TILE
    f = q * S.fine // 4 * 8 + g
    into = (
        mine + ((lane // 8) * 8 + ((lane % 8) ^ (lane // 8 * 2))) * 16,
        mine + WBYTES + lane * 16,
        mine + WBYTES + SBYTES + lane * 16,
    )  # fmt: skip
    slot = (mine + q * 128 + ((g ^ (q * 2)) * 16), mine + WBYTES + f * (8 if S.wide else 4), mine + WBYTES + SBYTES + f * 2)
    # x in the ring, as it is read, and as it is copied: rows 4*j + lane // 8
    xs = share + g * 128 + ((q * 2) ^ (g % 2)) * 16
    j = gl.arange(0, J, gl.SliceLayout(0, gl.SliceLayout(1, LX)))[None, None, :]
    tx = gl.arange(0, T, gl.SliceLayout(1, gl.SliceLayout(2, LX)))[:, None, None]
    lx = tx % 32
    ux = tx // (32 * RG)
    xrow = (j + tx // 32 % RG * J) % (2 * MT) * 4 + lx // 8
    xw = base + ux * SHARE + xrow * 128 + ((lx % 8) ^ (lx // 8 % 2)) * 16
    xg = xb + gl.minimum(xrow, M - 1) * (2 * K) + (lx % 8) * 16 + ux * XBYTES
    leftx = 2 * K - (lx % 8) * 16 - ux * XBYTES
    s = (lane, lane)
    z = (lane,)
    if S.per == 0:
        s = load_scale(s_ptr, sb * 8 + g, S)
        if S.zero:
            z = (gl.load(z_ptr + sb * 8 + g).to(gl.int32),)
    # the first D - 1 steps
    for i in gl.static_range(D - 1):
        if i < steps:
            copy_unit(into, u + i * KS, i * STEP, wb, sb, blocks, lane, sp, zp, S, G)
        if not G.ring_x:
            do(_COMMIT)
    z0 = gl.zeros((T, R, 1), gl.float32, L)
    acc = repeat(z0, MT)
    if G.pdl:  # the weights do not depend on the kernel before, x does
        do(WAIT)
        do(LAUNCH)
    if G.ring_x:
        for i in gl.static_range(D - 1):
            if i < steps:
                copy_x(xw + i * STEP, xg, leftx, S, G)
            do(_COMMIT)
            xg += KS * XBYTES
            leftx -= KS * XBYTES
    bar = u + 1
    un = u + (D - 1) * KS
    at = (D - 1) * STEP
    out = 0
    for i in range(0, steps):
        gl.inline_asm_elementwise(G.wait, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        if RG == 1:
            do(_SYNC)
        elif KS == 1:
            barrier()
        else:  # the warps of a share
            gl.inline_asm_elementwise(G.sync, "=r,r", [bar], dtype=gl.int32, is_pure=False, pack=1)
        if i + (D - 1) < steps:
            copy_unit(into, un, at, wb, sb, blocks, lane, sp, zp, S, G)
            if G.ring_x:
                copy_x(xw + at, xg, leftx, S, G)
        do(_COMMIT)
        now = (slot[0] + out, slot[1] + out, slot[2] + out)
        x = get_x(x0, xs + out, left, S, G)
        if MT == 2:
            x = x + get_x(x1, xs + (out + 1024), left, S, G)
        acc = step(acc, now, s, z, x, S, G)
        un += KS
        at = out
        out += STEP
        if out == D * STEP:
            out = 0
        x0 += KS * XBYTES
        x1 += KS * XBYTES
        left -= KS * XBYTES
        xg += KS * XBYTES
        leftx -= KS * XBYTES
    # sum over the shares of K
    v = quad(acc[0], acc[1], acc[2], acc[3])
    if MT == 2:
        v = gl.permute(gl.join(v, quad(acc[4], acc[5], acc[6], acc[7])), [0, 1, 2, 5, 3, 4])
    v = gl.reshape(v, [KS, RG * E])
    SPT: gl.constexpr = RG * E // T if RG * E >= T else 1
    RL: gl.constexpr = gl.BlockedLayout([KS, SPT if SPT < 4 else 4], [1, 32], [1, NW], [1, 0])
    barrier()  # the ring is free
    sums = reinterpret(sm, gl.float32, [KS, RG * E], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums.store(v)
    y = gl.sum(sums.load(RL), 0)
    e = gl.arange(0, RG * E, gl.SliceLayout(0, RL))  # e = (((group*32 + lane)*R + r)*MT + mt)*4 + 2*(col%2) + row8
    ln = e // (4 * MT * R) % 32
    row = (first + e // E * R + (e // (4 * MT)) % R) * 16 + ln // 4 + 8 * (e % 2)
    col = ((e // 4) % MT) * 8 + (ln % 4) * 2 + (e // 2) % 2
    write(y, row, col, bias_ptr, alpha_ptr, o_ptr, M, N, S)
