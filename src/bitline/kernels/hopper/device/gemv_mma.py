# mypy: ignore-errors
"""Device code for up to 16 rows of x: bandwidth-bound, by mma.sync m16n8k16 with the weights as operand A.

A program owns 16*R rows of W and all of K; its warps share K out, C units of 128 columns each per step, and add up through
shared memory at the end, in a fixed order. Words come straight from memory into the registers that decode them, a step
ahead of their use; x comes in 16-byte pieces from the cache (`layout` says why no shuffle is needed). A load of a warp reads
half of eight rows' 128 bytes; where `G.swap` is set, every other row's other half, so that they do not meet in the cache's
banks. Columns of x past M repeat row M - 1 and are not stored. The grid should be one wave of resident programs.

Every tensor here is [threads, R, C] with one element for each thread at each (R, C), so that a layout is only a numbering.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name since, and before, Triton 3.7
WAIT = gl.constexpr("griddepcontrol.wait; // $0")
LAUNCH = gl.constexpr("griddepcontrol.launch_dependents; // $0")


@gluon.jit
def do(text: gl.constexpr):
    """One instruction without operands."""
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_words(p, S: gl.constexpr, G: gl.constexpr):
    """The lane's words of a unit: 16 bytes of each plane and block."""
    return gl.inline_asm_elementwise(
        S.words[0], S.words[1], [p], dtype=(gl.int32,) * (4 * G.blocks * S.planes), is_pure=False, pack=1
    )


@gluon.jit
def load_x(p, odd, S: gl.constexpr, G: gl.constexpr):
    """The lane's part of one row of x for a unit. odd: 16 in rows whose second halves are read first, else 0."""
    a = (p,)
    if G.swap:
        a = (p + odd, p + (16 - odd), odd)
    return gl.inline_asm_elementwise(S.x[0], S.x[1], a, dtype=(gl.int32,) * (8 * G.blocks), is_pure=False, pack=1)


@gluon.jit
def load_scale(s_ptr, at, S: gl.constexpr):
    """Scales of rows g and g + 8."""
    if S.wide:
        return (gl.load(s_ptr + at * 2), gl.load(s_ptr + at * 2 + 1))
    else:
        word = gl.load(s_ptr + at)
        return (word, word)


@gluon.jit
def load_scales(s_ptr, z_ptr, so, fo, S: gl.constexpr, G: gl.constexpr):
    """What a unit needs: a tuple of scales, and one of zero points. so: the unit's first entry; fo: the lane's step's."""
    s = load_scale(s_ptr, so + fo, S)
    z = ()
    if S.zero:
        z = (gl.load(z_ptr + so + fo).to(gl.int32),)
    if S.fine > 1 and G.blocks == 2:
        s = s + load_scale(s_ptr, so + fo + 8 * S.fine, S)
        if S.zero:
            z = z + (gl.load(z_ptr + so + fo + 8 * S.fine).to(gl.int32),)
    return s, z


@gluon.jit
def widen(s, S: gl.constexpr):
    """Scales as float32."""
    if S.wide:
        return s[0], s[1]
    elif S.half:
        a = (s[0] & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        b = (s[0] >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        return a, b
    else:
        return (s[0] << 16).to(gl.float32, bitcast=True), (s[0] & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def pairs(s, i: gl.constexpr, S: gl.constexpr):
    """The i-th scales, each twice in a word, in the input's dtype."""
    if S.wide:
        lo = gl.inline_asm_elementwise(S.duplicate[0], S.duplicate[1], [s[i]], dtype=gl.int32, is_pure=True, pack=1)
        hi = gl.inline_asm_elementwise(S.duplicate[0], S.duplicate[1], [s[i + 1]], dtype=gl.int32, is_pure=True, pack=1)
        return (lo, hi)
    else:
        lo, hi = gl.inline_asm_elementwise(
            S.duplicate[0], S.duplicate[1], [s[i]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        return (lo, hi)


@gluon.jit
def pick4(valid, p, other, o: gl.constexpr):
    """Four of p where valid, else of other."""
    return (
        gl.where(valid, p[o], other[o]), gl.where(valid, p[o + 1], other[o + 1]),
        gl.where(valid, p[o + 2], other[o + 2]), gl.where(valid, p[o + 3], other[o + 3]),
    )  # fmt: skip


@gluon.jit
def madd4(a, p, o: gl.constexpr, lo, hi):
    """Four of a plus p times its row's scale, the units of a step added up."""
    return (
        a[o] + gl.sum(p[o] * lo, 2), a[o + 1] + gl.sum(p[o + 1] * lo, 2),
        a[o + 2] + gl.sum(p[o + 2] * hi, 2), a[o + 3] + gl.sum(p[o + 3] * hi, 2),
    )  # fmt: skip


@gluon.jit
def quad(a0, a1, a2, a3):
    """Four tensors as one with two more axes."""
    return gl.join(gl.join(a0, a1), gl.join(a2, a3))


@gluon.jit
def repeat(z, MT: gl.constexpr):
    """z for each of the sums of MT 8-row tiles of x."""
    if MT == 2:
        return (z, z, z, z, z, z, z, z)
    else:
        return (z, z, z, z)


@gluon.jit
def write(y, row, col, bias_ptr, alpha_ptr, o_ptr, M, N, S: gl.constexpr):
    """Factor and bias to the sums y of rows `row` of W and rows `col` of x, and the results to memory."""
    if S.alpha:
        y *= gl.load(alpha_ptr)
    if S.bias:
        y += gl.load(bias_ptr + row, mask=row < N, other=0.0).to(gl.float32)
    gl.store(o_ptr + col * N + row, y.to(gl.float16 if S.half else gl.bfloat16), mask=(col < M) & (row < N))


@gluon.jit
def collapse(a, MT: gl.constexpr):
    """The sums of the C units of a step."""
    r = (gl.sum(a[0], 2), gl.sum(a[1], 2), gl.sum(a[2], 2), gl.sum(a[3], 2))
    if MT == 2:
        r = r + (gl.sum(a[4], 2), gl.sum(a[5], 2), gl.sum(a[6], 2), gl.sum(a[7], 2))
    return r


@gluon.jit
def step(acc, w, s, zw, valid, xa, S: gl.constexpr, G: gl.constexpr):
    """One unit of 64 or 128 columns: decode, multiply and add to acc."""
    x = load_x(xa[0], xa[2], S, G)
    if G.mt == 2:
        x = x + load_x(xa[1], xa[2], S, G)
    a = w + x
    if S.zero:
        a = a + zw
    if S.fine > 1:  # scales of 16 or 32 columns: each lane scales its own
        a = a + pairs(s, 0, S)
        if G.blocks == 2:
            a = a + pairs(s, 2, S)
        p = gl.inline_asm_elementwise(S.unit[0], S.unit[1], a + acc, dtype=(gl.float32,) * (4 * G.mt), is_pure=True, pack=1)
        if G.even:
            r = p
        else:
            r = pick4(valid, p, acc, 0)
            if G.mt == 2:
                r = r + pick4(valid, p, acc, 4)
    else:
        lo, hi = widen(s, S)
        z8 = repeat(gl.zeros_like(lo), G.mt)
        p = gl.inline_asm_elementwise(S.unit[0], S.unit[1], a + z8, dtype=(gl.float32,) * (4 * G.mt), is_pure=True, pack=1)
        if not G.even:
            if G.mt == 2:
                p = pick4(valid, p, z8, 0) + pick4(valid, p, z8, 4)
            else:
                p = pick4(valid, p, z8, 0)
        r = madd4(acc, p, 0, lo, hi)
        if G.mt == 2:
            r = r + madd4(acc, p, 4, lo, hi)
    return r


@gluon.jit(do_not_specialize=["M", "N", "K", "units", "tiles", "groups", "steps"])
def decode(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, alpha_ptr, o_ptr, M, N, K, units, tiles, groups, steps,
    S: gl.constexpr, G: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """y [M, N] = alpha * x [M, K] @ W.T + bias. S is a `launch.Code`, G a `launch.Lanes`.

    units: K / (64*blocks). tiles: N/16, rounded up. groups: scales of a row. steps: units / (num_warps*c), rounded up.
    Here S.per counts units. Scales are float32 [tiles, groups, 8, 2] (S.wide) or pairs of the input's dtype; z_ptr: bytes.
    """
    NW: gl.constexpr = num_warps
    R: gl.constexpr = G.r
    C: gl.constexpr = G.c
    T: gl.constexpr = 32 * NW
    ST: gl.constexpr = NW * C
    WBYTES: gl.constexpr = 512 * G.blocks * S.planes
    XBYTES: gl.constexpr = 128 * G.blocks
    ENTRIES: gl.constexpr = 8 * (G.blocks * S.fine if S.fine > 1 else 1)  # of the scales of a unit
    L: gl.constexpr = gl.BlockedLayout([1, R, C], [32, 1, 1], [NW, 1, 1], [2, 1, 0])
    L2: gl.constexpr = gl.SliceLayout(2, L)
    tid = gl.arange(0, T, gl.SliceLayout(1, L2))[:, None, None]
    r = gl.arange(0, R, gl.SliceLayout(0, L2))[None, :, None]
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    lane = tid % 32
    g = lane // 4
    q = lane % 4
    u = (tid // 32) * C + c
    odd = (g % 2) * 16
    pn = gl.program_id(0)
    rt = pn * R + r
    at = u
    if not G.even:
        rt = gl.minimum(rt, tiles - 1)
        at = gl.minimum(u, units - 1)
    wb = w_ptr.to(gl.int64) + ((rt * units).to(gl.int64) * WBYTES + (q * 128 + g * 16))
    xb = x_ptr.to(gl.int64)
    x0 = xb + (gl.minimum(g, M - 1) * (2 * K) + q * 32)
    x1 = xb + (gl.minimum(g + 8, M - 1) * (2 * K) + q * 32)
    sb = rt * groups * 8 + g
    fo = q * S.fine // 4 * 8
    wp = wb + at * WBYTES
    xp0 = x0 + at * XBYTES
    xp1 = x1 + at * XBYTES
    w = load_words(wp, S, G)
    so = sb + at * 0
    if S.per > 0:
        so = sb + (at // S.per) * ENTRIES
    s, z = load_scales(s_ptr, z_ptr, so, fo, S, G)
    if S.fine > 1:
        z0 = gl.zeros((T, R, C), gl.float32, L)
    else:
        z0 = gl.zeros((T, R), gl.float32, L2)
    acc = repeat(z0, G.mt)
    if G.pdl:  # the weights do not depend on the kernel before, x does
        do(WAIT)
        do(LAUNCH)
    for _i in range(0, steps - 1):
        u += ST
        if G.even:
            wp += ST * WBYTES
            n0 = xp0 + ST * XBYTES
            n1 = xp1 + ST * XBYTES
        else:
            at = gl.minimum(u, units - 1)
            wp = wb + at * WBYTES
            n0 = x0 + at * XBYTES
            n1 = x1 + at * XBYTES
        wn = load_words(wp, S, G)
        if S.per > 0:
            if G.even and ST % S.per == 0:
                so += ST // S.per * ENTRIES
            elif G.even:
                so = sb + (u // S.per) * ENTRIES
            else:
                so = sb + (at // S.per) * ENTRIES
            sn, zn = load_scales(s_ptr, z_ptr, so, fo, S, G)
        else:
            sn = s
            zn = z
        acc = step(acc, w, s, z, u < units + ST, (xp0, xp1, odd), S, G)
        w = wn
        s = sn
        z = zn
        xp0 = n0
        xp1 = n1
    acc = step(acc, w, s, z, u < units, (xp0, xp1, odd), S, G)
    if S.fine > 1:
        acc = collapse(acc, G.mt)
    # sum over the warps
    MT: gl.constexpr = G.mt
    E: gl.constexpr = 128 * R * MT
    v = quad(acc[0], acc[1], acc[2], acc[3])
    if G.mt == 2:
        v = gl.permute(gl.join(v, quad(acc[4], acc[5], acc[6], acc[7])), [0, 1, 4, 2, 3])
    v = gl.reshape(v, [NW, E])
    SPT: gl.constexpr = E // T if E >= T else 1
    RL: gl.constexpr = gl.BlockedLayout([NW, SPT if SPT < 4 else 4], [1, 32], [1, NW], [1, 0])
    sm = gl.allocate_shared_memory(gl.float32, [NW, E], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sm.store(v)
    y = gl.sum(sm.load(RL), 0)
    e = gl.arange(0, E, gl.SliceLayout(0, RL))  # e = ((lane*R + r)*MT + mt)*4 + 2*(col%2) + row8
    ln = e // (4 * MT * R)
    row = (pn * R + (e // (4 * MT)) % R) * 16 + ln // 4 + 8 * (e % 2)
    col = ((e // 4) % MT) * 8 + (ln % 4) * 2 + (e // 2) % 2
    write(y, row, col, bias_ptr, alpha_ptr, o_ptr, M, N, S)
