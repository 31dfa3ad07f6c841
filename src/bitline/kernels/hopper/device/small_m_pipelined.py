# mypy: ignore-errors
"""Device code for few rows of x, operands by cp.async through shared memory: by mma.sync m16n8k16 with W as operand A.

A program owns 16*R*groups rows of W and all of K. Its warps share K out, a unit of 64 or 128 columns per step; the warps of
one share have R tiles of W each, and x in common. They add up through shared memory at the end, in a fixed order.

Words, scales, zero points and x of a step go to a ring of slots in shared memory, some steps ahead: no registers hold what is
in flight, and the compiler cannot move its loads to where they are used. Copies take whole rows of 128 bytes, while a lane
reads 16 bytes of several; 16-byte pieces are placed so that no bank is met twice either way. Where `G.ring_x` is not set, x
comes from the cache instead, in 16-byte pieces each (`layout` says why no shuffle is needed). Rows of x past M repeat row
M - 1 and are not stored; columns past K are zero.

A slot holds x, then the words of all tiles, then their scales, then their zero points. Every tensor has one element for each
thread, so that the layout is only a numbering; R and the 8-row tiles of x may be any number.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bitline.kernels.hopper.device.gemv_mma import (
    LAUNCH,
    WAIT,
    barrier,
    do,
    load_scale,
    pairs,
    widen,
    write,
)

_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # its name since, and before, Triton 3.9

_BASE = gl.constexpr("mov.u32 $0, global_smem;")  # Triton's name of a program's shared memory; there is one allocation
_COMMIT = gl.constexpr("cp.async.commit_group; // $0")
_SYNC = gl.constexpr("bar.warp.sync -1; // $0")
_LOAD4 = gl.constexpr("ld.shared.b32 $0, [$1];")
_LOADF = gl.constexpr("ld.shared.f32 $0, [$1];")
_STOREF = gl.constexpr("st.shared.f32 [$1], $2; // $0")
_LOAD8 = gl.constexpr("ld.shared.v2.f32 {$0,$1}, [$2];")
_LOAD2 = gl.constexpr("{ .reg .b16 t; ld.shared.u16 t, [$1]; cvt.u32.u16 $0, t; }")


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
def copy_table(slot, p, offset, second, lane, bytes: gl.constexpr, S: gl.constexpr, G: gl.constexpr):
    """Copy `bytes` of each of the warp's R tiles, 16 a lane, to where they lie side by side.

    offset: of the first tile's row of the table; p: the address of the unit's entries there. The second half of a tile's is that
    of the unit's second block, where scales are finer than a block.
    """
    PIECES: gl.constexpr = bytes // 16  # of a tile
    ALL: gl.constexpr = G.r * PIECES
    for j in gl.static_range((ALL + 31) // 32):
        i = lane + 32 * j
        tile = i // PIECES
        at = i % PIECES
        if G.blocks == 2 and S.fine > 1 and not G.even:
            at = gl.where((second == 0) & (at >= PIECES // 2), at - PIECES // 2, at)
        gl.inline_asm_elementwise(
            S.few[0], S.few[1], [slot + i * 16, p + (tile * offset + at * 16), ALL - i],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def copy_unit(slot, u, o, wb, stride, sb, groups, blocks, lane, s_ptr, z_ptr, S: gl.constexpr, G: gl.constexpr):
    """Copy unit u to slot + o: words, scales and zero points. wb: the lane's words of the first tile and unit, and `stride` bytes
    from tile to tile; sb: entries of the tables before the first tile.

    The second block of the last unit may be missing: then the first is copied twice, and what x multiplies it with is zero.
    """
    B: gl.constexpr = G.blocks
    R: gl.constexpr = G.r
    WBYTES: gl.constexpr = 512 * B * S.planes
    ENTRIES: gl.constexpr = B * S.fine if S.fine > 1 else 1  # of a unit
    ENTRY: gl.constexpr = 64 if S.wide else 32
    at = u
    second = 1
    if not G.even:
        at = gl.minimum(u, (blocks + B - 1) // B - 1)
        second = gl.where(at * B + 1 < blocks, 1, 0)
    wp = wb + at * WBYTES
    for r in gl.static_range(R):
        a = (slot[0] + (o + r * WBYTES), wp)
        if B == 2:
            a = a + (wp + second * (512 * S.planes),)
        gl.inline_asm_elementwise(S.copy[0], S.copy[1], a, dtype=gl.int32, is_pure=False, pack=1)
        wp += stride
    if S.per > 0:
        first = sb + at // S.per * ENTRIES
        copy_table(slot[1] + o, s_ptr + first * ENTRY, groups * ENTRY, second, lane, ENTRIES * ENTRY, S, G)
        if S.zero:
            copy_table(slot[2] + o, z_ptr + first * 16, groups * 16, second, lane, ENTRIES * 16, S, G)


@gluon.jit
def copy_x(slot, xb, xo, left, S: gl.constexpr, G: gl.constexpr):
    """Copy a unit of x, each lane its pieces of some rows. slot, xo: of each piece; left: bytes from there to K."""
    J: gl.constexpr = (2 * G.mt + G.groups - 1) // G.groups
    B: gl.constexpr = G.blocks
    for b in gl.static_range(B):
        count = left * 0 + 16
        if not G.even:
            count = gl.where(left > b * 128, 16, 0)
        for j in gl.static_range(J):
            gl.inline_asm_elementwise(
                S.piece[0], S.piece[1], [slot[j] + b * 1024 * G.mt, xb + (xo[j] + b * 128), count],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@gluon.jit
def step(acc, slot, s, z, x, r: gl.constexpr, S: gl.constexpr, G: gl.constexpr):
    """One unit of 64 or 128 columns of tile r: decode, multiply and add to acc. slot: the lane's words, scales, zero points."""
    FINE: gl.constexpr = S.fine if S.fine > 1 else 1
    ENTRY: gl.constexpr = 64 if S.wide else 32
    NO: gl.constexpr = 4 * G.mt
    if S.per > 0:
        s = ring_scale(slot[1], S)
        if S.zero:
            z = (ring_zero(slot[2]),)
        if S.fine > 1 and G.blocks == 2:
            s = s + ring_scale(slot[1] + ENTRY * FINE, S)
            if S.zero:
                z = z + (ring_zero(slot[2] + 16 * FINE),)
    a = (slot[0],) + x
    if S.zero:
        a = a + z
    out = ()
    if S.fine > 1:  # scales of 16 or 32 columns: each lane scales its own
        a = a + pairs(s, 0, S)
        if G.blocks == 2:
            a = a + pairs(s, 2, S)
        for i in gl.static_range(NO):
            a = a + (acc[r * NO + i],)
        out = gl.inline_asm_elementwise(S.unit[0], S.unit[1], a, dtype=(gl.float32,) * NO, is_pure=False, pack=1)
    else:
        lo, hi = widen(s, S)
        zero = gl.zeros_like(lo)
        for _i in gl.static_range(NO):
            a = a + (zero,)
        p = gl.inline_asm_elementwise(S.unit[0], S.unit[1], a, dtype=(gl.float32,) * NO, is_pure=False, pack=1)
        for i in gl.static_range(NO):
            if i % 4 < 2:
                out = out + (acc[r * NO + i] + p[i] * lo,)
            else:
                out = out + (acc[r * NO + i] + p[i] * hi,)
    return out


@gluon.jit(do_not_specialize=["M", "N", "K", "blocks", "tiles", "groups", "steps"])
def ring(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, alpha_ptr, o_ptr, ws, flags, M, N, K, blocks, tiles, groups, steps,
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
    TILES: gl.constexpr = RG * R
    XBYTES: gl.constexpr = 128 * G.blocks
    ENTRIES: gl.constexpr = (G.blocks * S.fine if S.fine > 1 else 1) if S.per > 0 else 0
    WBYTES: gl.constexpr = 512 * G.blocks * S.planes
    SBYTES: gl.constexpr = ENTRIES * (64 if S.wide else 32)
    ZBYTES: gl.constexpr = ENTRIES * 16 if S.zero else 0
    XCOPY: gl.constexpr = 1024 * MT * G.blocks if G.ring_x else 0
    STEP: gl.constexpr = (TILES * (WBYTES + SBYTES + ZBYTES) + XCOPY + 127) // 128 * 128  # of a share
    NO: gl.constexpr = 4 * MT
    OUT: gl.constexpr = TILES * NO * 32  # results of a program
    SHARE: gl.constexpr = D * STEP if D * STEP > 4 * OUT else 4 * OUT
    J: gl.constexpr = (2 * MT + RG - 1) // RG  # pieces of x of a lane and block: of 4 rows each
    L: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    sm = gl.allocate_shared_memory(gl.float32, [(KS * SHARE + 511) // 512, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tid = gl.arange(0, T, L)
    lane = tid % 32
    g = lane // 4
    q = lane % 4
    u = tid // (32 * RG)
    row_group = tid // 32 % RG
    CUT: gl.constexpr = G.cut
    STRIDE: gl.constexpr = KS * CUT  # units from step to step
    pn = gl.program_id(0) // CUT
    part = gl.program_id(0) % CUT
    unit = part * KS + u  # the first
    first = gl.minimum(pn * TILES, tiles - TILES)  # the last program repeats rows of the one before it
    rt = first + row_group * R
    wb = w_ptr.to(gl.int64) + ((rt * blocks).to(gl.int64) * (512 * S.planes) + lane * 16)
    stride = blocks.to(gl.int64) * (512 * S.planes)
    sp = s_ptr.to(gl.int64)
    zp = z_ptr.to(gl.int64)
    xb = x_ptr.to(gl.int64)
    sb = rt * groups
    base = gl.inline_asm_elementwise(_BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    share = base + u * SHARE
    words = share + XCOPY + row_group * (R * WBYTES)
    scales = share + (XCOPY + TILES * WBYTES) + row_group * (R * SBYTES)
    zeros = share + (XCOPY + TILES * (WBYTES + SBYTES)) + row_group * (R * ZBYTES)
    into = (words + ((lane // 8) * 8 + ((lane % 8) ^ (lane // 8 * 2))) * 16, scales, zeros)
    f = q * S.fine // 4 * 8 + g
    slot = (words + q * 128 + ((g ^ (q * 2)) * 16), scales + f * (8 if S.wide else 4), zeros + f * 2)
    # x in the ring, as it is read, and as it is copied; or as it is read from the cache
    xs = share + g * 128 + ((q * 2) ^ (g % 2)) * 16
    xw = ()
    xo = ()
    if G.ring_x:
        for j in gl.static_range(J):
            row = (row_group + j * RG) % (2 * MT) * 4 + lane // 8
            xw = xw + (share + row * 128 + ((lane % 8) ^ (row % 2)) * 16,)
            xo = xo + (gl.minimum(row, M - 1) * (2 * K) + (lane % 8) * 16 + unit * XBYTES,)
        left = 2 * K - (lane % 8) * 16 - unit * XBYTES
    else:
        for m in gl.static_range(MT):
            xo = xo + (gl.minimum(g + 8 * m, M - 1) * (2 * K) + q * 32 + unit * XBYTES,)
        left = 2 * K - q * 32 - unit * XBYTES
    s = ()
    z = ()
    if S.per == 0:
        for r in gl.static_range(R):
            s = s + load_scale(s_ptr, (sb + r * groups) * 8 + g, S)
            if S.zero:
                z = z + (gl.load(z_ptr + ((sb + r * groups) * 8 + g)).to(gl.int32),)
    # the first D - 1 steps
    EARLY: gl.constexpr = 1 if G.early else D - 1
    for i in gl.static_range(EARLY):
        if i < steps:
            copy_unit(into, unit + i * STRIDE, i * STEP, wb, stride, sb, groups, blocks, lane, sp, zp, S, G)
        if not G.ring_x:
            do(_COMMIT)
    acc = ()
    for _i in gl.static_range(R * NO):
        acc = acc + (gl.zeros([T], gl.float32, L),)
    if G.pdl:  # the weights do not depend on the kernel before, x does
        do(WAIT)
        do(LAUNCH)
    at = 0
    for i in gl.static_range(D - 1):
        if i >= EARLY and i < steps:
            copy_unit(into, unit + i * STRIDE, i * STEP, wb, stride, sb, groups, blocks, lane, sp, zp, S, G)
        if G.ring_x:
            if i < steps:
                copy_x(shifted(xw, i * STEP), xb + at, xo, left - at, S, G)
            do(_COMMIT)
            at += STRIDE * XBYTES
        elif i >= EARLY:
            do(_COMMIT)
    bar = u + 1
    un = unit + (D - 1) * STRIDE
    into_at = (D - 1) * STEP
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
            copy_unit(into, un, into_at, wb, stride, sb, groups, blocks, lane, sp, zp, S, G)
            if G.ring_x:
                copy_x(shifted(xw, into_at), xb + at, xo, left - at, S, G)
        do(_COMMIT)
        x = ()
        for m in gl.static_range(MT):
            if G.ring_x:
                x = x + get_x(xb, xs + (out + m * 1024), left, S, G)
            else:
                x = x + get_x(xb + (xo[m] + at), xs, left - at, S, G)
        new = ()
        for r in gl.static_range(R):
            now = (slot[0] + (out + r * WBYTES), slot[1] + (out + r * SBYTES), slot[2] + (out + r * ZBYTES))
            mine = ()
            zero = ()
            if S.per == 0:
                mine = (s[2 * r], s[2 * r + 1])
                if S.zero:
                    zero = (z[r],)
            new = new + step(acc, now, mine, zero, x, r, S, G)
        acc = new
        un += STRIDE
        into_at = out
        out += STEP
        if out == D * STEP:
            out = 0
        at += STRIDE * XBYTES
    # sum over the shares of K
    barrier()  # the ring is free
    reinterpret(sm, gl.float32, [T], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(acc[0])  # its allocation needs a user
    for i in gl.static_range(1, R * NO):
        gl.inline_asm_elementwise(_STOREF, "=r,r,f", [base + (i * T + tid) * 4, acc[i]], dtype=gl.int32, is_pure=False, pack=1)
    barrier()
    mine = ws + (gl.program_id(0) * OUT).to(gl.int64)
    for j in gl.static_range((OUT + T - 1) // T):
        e = tid + j * T  # ((r*NO + i)*RG + row_group)*32 + lane
        y = gl.zeros([T], gl.float32, L)
        here = base + gl.minimum(e // (32 * RG), R * NO - 1) * (4 * T) + e % (32 * RG) * 4
        for k in gl.static_range(KS):
            y += gl.inline_asm_elementwise(_LOADF, "=f,r", [here + k * (128 * RG)], dtype=gl.float32, is_pure=False, pack=1)
        if CUT == 1:
            result(y, e, e < OUT, first, bias_ptr, alpha_ptr, o_ptr, M, N, S, G)
        else:
            gl.store(mine + e, y, mask=e < OUT)
    if CUT > 1:  # each program of these rows adds up its part of the results, in the order of the shares
        barrier()
        gl.atomic_add(flags + pn, 1, sem="release", scope="gpu")
        count = gl.atomic_add(flags + pn, 0, sem="acquire", scope="gpu")
        while count < CUT:
            count = gl.atomic_add(flags + pn, 0, sem="acquire", scope="gpu")
        barrier()
        PART: gl.constexpr = OUT // CUT
        theirs = ws + (pn * (CUT * OUT)).to(gl.int64)
        for j in gl.static_range((PART + T - 1) // T):
            e = part * PART + tid + j * T
            valid = tid + j * T < PART
            y = gl.load(theirs + e, mask=valid, other=0.0, cache_modifier=".cg")
            for k in gl.static_range(1, CUT):
                y += gl.load(theirs + (e + k * OUT), mask=valid, other=0.0, cache_modifier=".cg")
            result(y, e, valid, first, bias_ptr, alpha_ptr, o_ptr, M, N, S, G)
        left_by = gl.atomic_add(flags + pn, 1, sem="relaxed", scope="gpu")
        if left_by == 2 * CUT - 1:  # nobody looks at it any more
            gl.atomic_xchg(flags + pn, 0, sem="relaxed", scope="gpu")


@gluon.jit
def result(y, e, valid, first, bias_ptr, alpha_ptr, o_ptr, M, N, S: gl.constexpr, G: gl.constexpr):
    """Write the sums y, numbered e = ((r*4*mt + i)*groups + row_group)*32 + lane."""
    NO: gl.constexpr = 4 * G.mt
    at = e // (32 * G.groups)
    i = at % NO
    ln = e % 32
    row = (first + e // 32 % G.groups * G.r + at // NO) * 16 + ln // 4 + i % 4 // 2 * 8
    col = i // 4 * 8 + ln % 4 * 2 + i % 2
    write(y, gl.where(valid, row, N), col, bias_ptr, alpha_ptr, o_ptr, M, N, S)


@gluon.jit
def shifted(slots, o):
    """Each of a tuple of addresses, o further on."""
    out = ()
    N: gl.constexpr = len(slots)
    for j in gl.static_range(N):
        out = out + (slots[j] + o,)
    return out
