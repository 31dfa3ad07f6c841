# mypy: ignore-errors
"""Device code for more than 16 rows of x: persistent, warp-specialised, by wgmma with the weights as operand A in registers.

One producer warp brings tiles of x, words and scales by TMA into a ring of stages of h*64 columns; nb warpgroups each own mr
blocks of 64 rows of W against bm rows of x, or against bm + bm2 as two products, so that there are tiles of 96, 160, 192 and
320 rows, which shared memory's powers of two do not allow. The weights of the next 64 columns are decoded and scaled, in the
input's dtype, while the asynchronous product of the last ones runs; x is operand B, in shared memory. Output leaves through
shared memory and TMA, which clips it to M and N.

P programs take T // P whole tiles each (T tiles in all); the other T % P are cut along K in equal parts. The program that
holds the start of such a tile adds the parts of the others in their order, or two or four of its programs a half or a quarter
each (`wide_epilogue`), so that results are the same in every run.
`flags` counts finished parts and is zero again at the end.

S is a `launch.Code`, G a `launch.Geometry`.
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

from bitline.kernels.hopper.device.epilogue import finish, finish_shared

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name since, and before, Triton 3.8
# Barriers of two warpgroups; Triton takes the first few for its own
WAIT = gl.constexpr(tuple(f"bar.sync {8 + i},256; // $0 $1" for i in range(4)))
SAY = gl.constexpr(tuple(f"bar.arrive {8 + i},256; // $0 $1" for i in range(4)))


@gluon.jit
def share(p, P, R, KS):
    """Stages [u0, u1) of the cut tiles that program p has, and the number of tiles that they lie in."""
    u0 = (p * R) // P
    u1 = ((p + 1) * R) // P
    return u0, u1, gl.where(u1 > u0, (u1 - 1) // KS - u0 // KS + 1, 0)


@gluon.jit
def segment(s, p, P, whole, u0, u1, KS, TM, TN, GN: gl.constexpr):
    """The s-th piece of work of program p: its tile, [pn, pm] along N and M, and its stages [k0, k1)."""
    j = s - whole
    t0 = u0 // KS
    uncut = s < whole
    tile = gl.where(uncut, p + s * P, whole * P + t0 + j)
    k0 = gl.where(uncut, 0, gl.where(j > 0, 0, u0 - t0 * KS))
    k1 = gl.where(uncut, KS, gl.minimum(KS, u1 - (t0 + j) * KS))
    width = GN * TM
    g = tile // width
    r = tile - g * width
    size = gl.minimum(TN - g * GN, GN)
    pn = g * GN + r % size
    pm = r // size
    return tile, k0, k1, pn, pm


@gluon.jit
def bring_weights(wd, sd, zd, full, wb, sb, zb, st, k, pn, S: gl.constexpr, G: gl.constexpr):
    """Request the words, scales and zero points of one stage, and announce its bytes, those of x included."""
    NT: gl.constexpr = G.nb * G.mr
    WORDS: gl.constexpr = 128 * S.planes
    ENTRY: gl.constexpr = 16 if S.wide else 8
    BYTES: gl.constexpr = G.h * ((G.bm + G.bm2) * 128 + NT * 16 * (WORDS + ENTRY * S.fine + (4 * S.fine if S.zero else 0)))
    mbarrier.expect(full.index(st), BYTES)
    H: gl.constexpr = G.h
    for h in gl.static_range(H):
        b = k * G.h + h
        if S.per > 0:
            entry = b * S.fine // S.per
        else:
            entry = b * 0
        async_load(wd, [pn * (NT * 4), b * WORDS], full.index(st), wb.index(st * G.h + h))
        async_load(sd, [pn * (NT * 4), entry * ENTRY], full.index(st), sb.index(st * G.h + h))
        if S.zero:
            async_load(zd, [pn * (NT * 4), entry * 8], full.index(st), zb.index(st * G.h + h))


@gluon.jit
def bring_x(xd, xe, full, xb, xc, st, k, pm, G: gl.constexpr):
    """Request x for one stage."""
    H: gl.constexpr = G.h
    for h in gl.static_range(H):
        m = pm * (G.bm + G.bm2)
        async_load(xd, [m, (k * G.h + h) * 64], full.index(st), xb.index(st * G.h + h))
        if G.bm2 > 0:
            async_load(xe, [m + G.bm, (k * G.h + h) * 64], full.index(st), xc.index(st * G.h + h))


@gluon.jit
def producer(
    xd, xe, wd, sd, zd, xb, xc, wb, sb, zb, full, empty, KS, TM, TN, P, whole, R, S: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """Fill the ring."""
    p = gl.program_id(0)
    u0, u1, parts = share(p, P, R, KS)
    st = 0
    ph = 1
    pre = 0
    if G.pdl:  # the weights of the first stages do not depend on the kernel before, x does
        _tile, k0, k1, pn, pm = segment(0, p, P, whole, u0, u1, KS, TM, TN, G.gn)
        pre = gl.minimum(G.stages, k1 - k0)
        for i in range(0, pre):
            bring_weights(wd, sd, zd, full, wb, sb, zb, i, k0 + i, pn, S, G)
        gdc_wait()
        for i in range(0, pre):
            bring_x(xd, xe, full, xb, xc, i, k0 + i, pm, G)
        wrapped = pre == G.stages
        st = gl.where(wrapped, 0, pre)
        ph = gl.where(wrapped, 0, 1)
    for s in range(whole + parts):
        _tile, k0, k1, pn, pm = segment(s, p, P, whole, u0, u1, KS, TM, TN, G.gn)
        if G.pdl:
            k0 = gl.where(s == 0, k0 + pre, k0)
        for k in range(k0, k1):
            mbarrier.wait(empty.index(st), ph)
            bring_weights(wd, sd, zd, full, wb, sb, zb, st, k, pn, S, G)
            bring_x(xd, xe, full, xb, xc, st, k, pm, G)
            last = st + 1 == G.stages
            st = gl.where(last, 0, st + 1)
            ph = gl.where(last, ph ^ 1, ph)


@gluon.jit
def spread(s, FINE: gl.constexpr, LW: gl.constexpr):
    """[4, 8*FINE] to what broadcasts against [4 warps, 4 steps, 8 rows, 4 lanes]."""
    s = gl.reshape(s, [4, FINE, 8])
    if FINE == 2:
        s = gl.reshape(gl.join(s, s), [4, 2, 8, 2])
        s = gl.reshape(gl.permute(s, [0, 1, 3, 2]), [4, 4, 8])
    return gl.expand_dims(gl.convert_layout(s, gl.SliceLayout(3, LW), assert_trivial=True), 3)


@gluon.jit
def table(buf, b: gl.constexpr, FINE: gl.constexpr):
    """Entries of block b's four row tiles, [4, 8*FINE]: lane 4*g + q gets those of row g."""
    if FINE == 1:
        REG: gl.constexpr = []
    elif FINE == 2:
        REG: gl.constexpr = [[0, 8]]
    else:
        REG: gl.constexpr = [[0, 8], [0, 16]]
    LANE: gl.constexpr = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    L: gl.constexpr = gl.DistributedLinearLayout(REG, LANE, [[1, 0], [2, 0]], [], [4, 8 * FINE])
    return buf.slice(b * 4, 4, dim=0).load(L)


@gluon.jit
def scale_pairs(buf, b: gl.constexpr, f, S: gl.constexpr):
    """Scales of rows g and of rows g + 8, each twice in a word, in the input's dtype.

    S.folded: times the factors f, and after them what is added for the middle of the codes (`ptx.scaled`).
    """
    PAIRS: gl.constexpr = 4 if S.format == "u4" or S.format == "u8" else 2
    if S.wide:
        if S.fine == 1:
            REG: gl.constexpr = [[0, 1]]
        elif S.fine == 2:
            REG: gl.constexpr = [[0, 1], [0, 16]]
        else:
            REG: gl.constexpr = [[0, 1], [0, 16], [0, 32]]
        LANE: gl.constexpr = [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]]
        L: gl.constexpr = gl.DistributedLinearLayout(REG, LANE, [[1, 0], [2, 0]], [], [4, 16 * S.fine])
        lo, hi = gl.split(gl.reshape(buf.slice(b * 4, 4, dim=0).load(L), [4, 8 * S.fine, 2]))
        if S.folded:
            found = gl.inline_asm_elementwise(
                S.duplicate[0], S.duplicate[1], [lo, hi, f[0], f[1]], dtype=(gl.int32,) * PAIRS, is_pure=True, pack=1
            )  # fmt: skip
        else:
            lo = gl.inline_asm_elementwise(S.duplicate[0], S.duplicate[1], [lo], dtype=gl.int32, is_pure=True, pack=1)
            hi = gl.inline_asm_elementwise(S.duplicate[0], S.duplicate[1], [hi], dtype=gl.int32, is_pure=True, pack=1)
            found = (lo, hi)
    else:
        both = table(buf, b, S.fine)
        if S.folded:
            found = gl.inline_asm_elementwise(
                S.duplicate[0], S.duplicate[1], [both, f[0], f[1]], dtype=(gl.int32,) * PAIRS, is_pure=True, pack=1
            )  # fmt: skip
        else:
            found = gl.inline_asm_elementwise(
                S.duplicate[0], S.duplicate[1], [both], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
            )  # fmt: skip
    return found


@gluon.jit
def factors(alpha_ptr, S: gl.constexpr):
    """2**F as pairs of bfloat16 for rows g and for rows g + 8, whose 4-bit codes lie four bits higher."""
    bits = gl.load(alpha_ptr + 1).to(gl.int32, bitcast=True)
    other = bits - (4 << 23 if S.format == "u4" or S.format == "z4" else 0)
    return bits | (bits >> 16), other | (other >> 16)


@gluon.jit
def entries(sb, zb, i, b: gl.constexpr, f, S: gl.constexpr):
    """Zero points, scale pairs and what `scale_pairs` gives beside them: buffer i, row block b, as a fragment takes them."""
    LW: gl.constexpr = gl.BlockedLayout([1, 4, 1, 1], [1, 1, 8, 4], [4, 1, 1, 1], [3, 2, 1, 0])
    found = scale_pairs(sb.index(i), b, f, S)
    pairs = (spread(found[0], S.fine, LW), spread(found[1], S.fine, LW))
    if S.folded and (S.format == "u4" or S.format == "u8"):
        pairs = pairs + (spread(found[2], S.fine, LW), spread(found[3], S.fine, LW))
    if S.zero:
        pairs = (spread(table(zb.index(i), b, S.fine).to(gl.int32), S.fine, LW),) + pairs
    return pairs


@gluon.jit
def weights(wb, i, b: gl.constexpr, pairs, A: gl.constexpr, S: gl.constexpr):
    """64 x 64 weights of buffer i and row block b, decoded and scaled: the fragment of operand A."""
    LW: gl.constexpr = gl.BlockedLayout([1, 4, 1, 1], [1, 1, 8, 4], [4, 1, 1, 1], [3, 2, 1, 0])
    WL: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    words = wb.index(i).slice(b * 4, 4, dim=0)
    if S.planes == 1:
        args = (gl.convert_layout(gl.reshape(words.load(WL), [4, 4, 8, 4]), LW, assert_trivial=True),)
    else:
        w0 = gl.reshape(words.slice(0, 128, dim=1).load(WL), [4, 4, 8, 4])
        w1 = gl.reshape(words.slice(128, 128, dim=1).load(WL), [4, 4, 8, 4])
        args = (gl.convert_layout(w0, LW, assert_trivial=True), gl.convert_layout(w1, LW, assert_trivial=True))
    args = args + pairs
    if S.half:
        f = gl.inline_asm_elementwise(S.fragment[0], S.fragment[1], args, dtype=(gl.float16,) * 8, is_pure=True, pack=1)
    else:
        f = gl.inline_asm_elementwise(S.fragment[0], S.fragment[1], args, dtype=(gl.bfloat16,) * 8, is_pure=True, pack=1)
    # f is [half][row][element]; each join adds the innermost axis. All that follows only renames registers.
    rows0 = gl.join(gl.join(f[0], f[4]), gl.join(f[1], f[5]))
    rows1 = gl.join(gl.join(f[2], f[6]), gl.join(f[3], f[7]))
    v = gl.reshape(gl.join(rows0, rows1), [4, 4, 8, 4, 2, 2, 2])  # warp, step, g, lane, half, element, row
    return gl.convert_layout(gl.reshape(gl.permute(v, [0, 6, 2, 1, 4, 3, 5]), [64, 64]), A, assert_trivial=True)


@gluon.jit
def await_turn(c: gl.constexpr, n):
    """Wait until it is the turn of warpgroup c to multiply; n: any number."""
    gl.inline_asm_elementwise(WAIT[c], "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def give_turn(c: gl.constexpr, n):
    """Say that it is the turn of warpgroup c."""
    gl.inline_asm_elementwise(SAY[c], "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def consumer(
    c: gl.constexpr, od, oe, xb, xc, wb, sb, zb, ob, full, empty, ws, flags, bias_ptr, alpha_ptr, N, KS, TM, TN, P, whole, R,
    S: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its mr blocks of 64 rows.

    A fragment is decoded in the iteration that multiplies it: were it carried into the next, ptxas would wait for the product
    before it first and decode then, and copy every register.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, G.bm, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    BM: gl.constexpr = G.bm
    BM2: gl.constexpr = G.bm2 if G.bm2 > 0 else 32
    mma2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM2, 16])
    A2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma2, k_width=2)
    TWO: gl.constexpr = G.mr == 2 or G.bm2 > 0
    H: gl.constexpr = G.h
    SAME: gl.constexpr = S.fine == 1 and S.per % G.h == 0  # the blocks of a stage share their scales
    b0: gl.constexpr = c * G.mr
    b1: gl.constexpr = c * G.mr + G.mr - 1
    p = gl.program_id(0)
    u0, u1, parts = share(p, P, R, KS)
    total = whole * KS + (u1 - u0)
    f = (0, 0)
    if S.folded:
        f = factors(alpha_ptr, S)
    it = 0
    st = 0
    ph = 0
    if G.turns and c == G.nb - 1:
        give_turn(0, N)
    for s in range(whole + parts):
        tile, k0, k1, pn, pm = segment(s, p, P, whole, u0, u1, KS, TM, TN, G.gn)
        acc = gl.zeros([64, BM], gl.float32, mma)
        tok = warpgroup_mma_init(acc)
        if G.mr == 2:
            acb = gl.zeros([64, BM], gl.float32, mma)
        if G.bm2 > 0:
            acb = gl.zeros([64, BM2], gl.float32, mma2)
        if TWO:
            tob = warpgroup_mma_init(acb)
        for _k in range(k0, k1):
            it += 1
            mbarrier.wait(full.index(st), ph)
            if G.turns:
                e = entries(sb, zb, st * H, b0, f, S)
                X = weights(wb, st * H, b0, e, A, S)
                if H == 2:
                    if not SAME:
                        e = entries(sb, zb, st * H + 1, b0, f, S)
                    Z = weights(wb, st * H + 1, b0, e, A, S)
                await_turn(c, N)
                tok = warpgroup_mma(X, xb.index(st * H).permute([1, 0]), tok, is_async=True)
                if G.bm2 > 0:
                    same = gl.convert_layout(X, A2, assert_trivial=True)
                    tob = warpgroup_mma(same, xc.index(st * H).permute([1, 0]), tob, is_async=True)
                if H == 2:
                    tok = warpgroup_mma(Z, xb.index(st * 2 + 1).permute([1, 0]), tok, is_async=True)
                    if G.bm2 > 0:
                        same = gl.convert_layout(Z, A2, assert_trivial=True)
                        tob = warpgroup_mma(same, xc.index(st * 2 + 1).permute([1, 0]), tob, is_async=True)
                if c < G.nb - 1 or it < total:
                    give_turn((c + 1) % G.nb, N)
            else:
                for h in gl.static_range(H):
                    if h == 0 or not SAME:
                        e = entries(sb, zb, st * H + h, b0, f, S)
                    X = weights(wb, st * H + h, b0, e, A, S)
                    tok = warpgroup_mma(X, xb.index(st * H + h).permute([1, 0]), tok, is_async=True)
                    if G.bm2 > 0:
                        same = gl.convert_layout(X, A2, assert_trivial=True)
                        tob = warpgroup_mma(same, xc.index(st * H + h).permute([1, 0]), tob, is_async=True)
                    if h > 0 and (h + 1 < H or G.mr == 2):
                        _x = warpgroup_mma_wait(2 if G.bm2 > 0 else 1, deps=[X])
                    if G.mr == 2:
                        if h == 0 or not SAME:
                            e1 = entries(sb, zb, st * H + h, b1, f, S)
                        Y = weights(wb, st * H + h, b1, e1, A, S)
                        tob = warpgroup_mma(Y, xb.index(st * H + h).permute([1, 0]), tob, is_async=True)
                        if h + 1 < H:
                            _y = warpgroup_mma_wait(1, deps=[Y])
            if TWO:
                acc, acb = warpgroup_mma_wait(0, deps=[tok, tob])
                tob = warpgroup_mma_init(acb)
            else:
                acc = warpgroup_mma_wait(0, deps=[tok])
            tok = warpgroup_mma_init(acc)
            mbarrier.arrive(empty.index(st), count=1)
            last = st + 1 == G.stages
            st = gl.where(last, 0, st + 1)
            ph = gl.where(last, ph ^ 1, ph)
        if TWO:
            acc, acb = warpgroup_mma_wait(0, deps=[tok, tob])
        else:
            acc = warpgroup_mma_wait(0, deps=[tok])
            acb = acc
        if G.pdl and s == 0:
            gdc_wait()
        if G.split:
            finish_shared(
                c, acc, acb, od, oe, ob, ws, flags, bias_ptr, alpha_ptr, tile, k0, k1, pn, pm, p, N, KS, P, whole, R, S, G
            )  # fmt: skip
        else:
            finish(c, acc, acb, od, oe, ob, ws, flags, bias_ptr, alpha_ptr, tile, k0, k1, pn, pm, p, N, KS, P, whole, R, S, G)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "KS", "TM", "TN", "P", "whole", "R"])
def wide(
    xd, xe, wd, sd, zd, od, oe, ws, flags, bias_ptr, alpha_ptr, N, KS, TM, TN, P, whole, R, S: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """y [M, N] = alpha * x [M, K] @ W.T + bias.

    xd, od: x and y, tiles [bm, 64]; xe, oe: the same in tiles [bm2, 64].
    wd: words [N/16, K/64 * 128*planes]. sd, zd: scales and zero points [N/16, groups * …].
    KS: stages in K. TM, TN: tiles along M and N. P programs, `whole` tiles for each; R: stages of the tiles that are cut.
    """
    NT: gl.constexpr = G.nb * G.mr
    RING: gl.constexpr = G.stages * G.h
    if S.half:
        T: gl.constexpr = gl.float16
    else:
        T: gl.constexpr = gl.bfloat16
    xb = gl.allocate_shared_memory(T, [RING, G.bm, 64], xd.layout)
    xc = xb
    if G.bm2 > 0:
        xc = gl.allocate_shared_memory(T, [RING, G.bm2, 64], xd.layout)
    wb = gl.allocate_shared_memory(gl.int32, [RING, NT * 4, 128 * S.planes], wd.layout)
    if S.wide:
        sb = gl.allocate_shared_memory(gl.float32, [RING, NT * 4, 16 * S.fine], sd.layout)
    else:
        sb = gl.allocate_shared_memory(gl.int32, [RING, NT * 4, 8 * S.fine], sd.layout)
    zb = sb
    if S.zero:
        zb = gl.allocate_shared_memory(gl.int16, [RING, NT * 4, 8 * S.fine], zd.layout)
    ob = gl.allocate_shared_memory(T, [NT, G.bm, 64], od.layout)
    full = gl.allocate_shared_memory(gl.int64, [G.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [G.stages, 1], mbarrier.MBarrierLayout())
    if G.pdl:
        gdc_launch_dependents()
    STAGES: gl.constexpr = G.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=G.nb)
    REGS: gl.constexpr = G.registers
    LEFT: gl.constexpr = G.left
    # fmt: off
    if G.nb == 1:
        gl.warp_specialize([
            (consumer, (0, od, oe, xb, xc, wb, sb, zb, ob, full, empty, ws, flags, bias_ptr, alpha_ptr, N, KS, TM, TN, P, whole, R, S, G)),  # noqa: E501
            (producer, (xd, xe, wd, sd, zd, xb, xc, wb, sb, zb, full, empty, KS, TM, TN, P, whole, R, S, G)),
        ], [1], [LEFT])
    elif G.nb == 2:
        gl.warp_specialize([
            (consumer, (0, od, oe, xb, xc, wb, sb, zb, ob, full, empty, ws, flags, bias_ptr, alpha_ptr, N, KS, TM, TN, P, whole, R, S, G)),  # noqa: E501
            (consumer, (1, od, oe, xb, xc, wb, sb, zb, ob, full, empty, ws, flags, bias_ptr, alpha_ptr, N, KS, TM, TN, P, whole, R, S, G)),  # noqa: E501
            (producer, (xd, xe, wd, sd, zd, xb, xc, wb, sb, zb, full, empty, KS, TM, TN, P, whole, R, S, G)),
        ], [4, 1], [REGS, LEFT])
    else:
        gl.warp_specialize([
            (consumer, (0, od, oe, xb, xc, wb, sb, zb, ob, full, empty, ws, flags, bias_ptr, alpha_ptr, N, KS, TM, TN, P, whole, R, S, G)),  # noqa: E501
            (consumer, (1, od, oe, xb, xc, wb, sb, zb, ob, full, empty, ws, flags, bias_ptr, alpha_ptr, N, KS, TM, TN, P, whole, R, S, G)),  # noqa: E501
            (consumer, (2, od, oe, xb, xc, wb, sb, zb, ob, full, empty, ws, flags, bias_ptr, alpha_ptr, N, KS, TM, TN, P, whole, R, S, G)),  # noqa: E501
            (consumer, (3, od, oe, xb, xc, wb, sb, zb, ob, full, empty, ws, flags, bias_ptr, alpha_ptr, N, KS, TM, TN, P, whole, R, S, G)),  # noqa: E501
            (producer, (xd, xe, wd, sd, zd, xb, xc, wb, sb, zb, full, empty, KS, TM, TN, P, whole, R, S, G)),
        ], [4, 4, 4, 1], [REGS, REGS, REGS, LEFT])
    # fmt: on
