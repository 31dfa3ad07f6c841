# mypy: ignore-errors
"""Quantization of x on the GPU, what `bitline.act_quant` computes, and its hand-over to the copy engine within a launch.

x is quantized by units, `parts` of a row: act.columns columns, or where the scale is a token's any number of times as many. Every
unit works with four warps. `act` is a `scaled_scheme.ActTraits`; `space` is what units write: codes int8 or E4M3 as bytes
[M, k_padded], scales float32 [groups, scale_stride] (one row of them where x is not scaled in groups) and zero points int32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bitline.kernels.hopper.device.common import barrier

# Four float32 to four E4M3 codes, saturating; NaN stays NaN
TO_E4M3 = gl.constexpr(
    "{ .reg .b16 a,b; cvt.rn.satfinite.e4m3x2.f32 a,$2,$1; cvt.rn.satfinite.e4m3x2.f32 b,$4,$3; mov.b32 $0,{a,b}; }"
)
# Four float32 in -128..127 to four int8, halves to even: adding 1.5 * 2**23 leaves the integer in the lowest bits
TO_INT8 = gl.constexpr(
    "{ .reg .f32 f<4>; .reg .b32 r<6>; add.rn.f32 f0,$1,0f4B400000; add.rn.f32 f1,$2,0f4B400000; add.rn.f32 f2,$3,0f4B400000; "
    "add.rn.f32 f3,$4,0f4B400000; mov.b32 r0,f0; mov.b32 r1,f1; mov.b32 r2,f2; mov.b32 r3,f3; prmt.b32 r4,r0,r1,0x0040; "
    "prmt.b32 r5,r2,r3,0x0040; prmt.b32 $0,r4,r5,0x5410; }"
)
# Writes of this thread are ordered before reads by the copy engine, once they are released
FENCE_PROXY = gl.constexpr("fence.proxy.async; // $0")
# Wait until a counter in global memory has the second operand's value
WAIT_FOR_COUNT = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; again: ld.acquire.gpu.global.b32 t,[$1]; setp.ne.s32 p,t,$2; @p bra again; "
    "fence.proxy.async; mov.b32 $0,0; }"
)


@gluon.jit
def round_half_even(v):
    """The nearest integer, halves to even, for |v| < 2**22: adding 1.5 * 2**23 pushes the fraction out of the mantissa."""
    return (v + 12582912.0) - 12582912.0


@gluon.jit
def encode(v, scale, inverse, zero, act: gl.constexpr):
    """Codes of v / scale + zero as bytes. inverse: 1 / scale, rounded to nearest.

    The quotient is v * inverse, corrected once by its remainder, and so rounded to nearest. The bounds keep it finite.
    """
    q = gl.minimum(gl.maximum(v * inverse, -1048576.0), 1048576.0)
    v = gl.fma(gl.fma(-q, scale, v), inverse, q)
    if act.fp8:
        return gl.inline_asm_elementwise(TO_E4M3, "=r,f,f,f,f", [v], dtype=gl.int8, is_pure=True, pack=4)
    else:
        if act.asymmetric:
            v += zero
        v = gl.minimum(gl.maximum(v, -128.0), 127.0)
        return gl.inline_asm_elementwise(TO_INT8, "=r,f,f,f,f", [v], dtype=gl.int8, is_pure=True, pack=4)


@gluon.jit
def token_scale(high, low, limit, act: gl.constexpr):
    """Scale and zero point of a row from its largest value and, where asymmetric, its smallest; else `high` is amax."""
    zero = 0.0
    if act.asymmetric:
        high, low = gl.minimum(high, limit), -gl.minimum(-low, limit)
        scale = gl.maximum(gl.div_rn(high - low, 255.0), act.min_scale)
        zero = round_half_even(gl.minimum(gl.maximum(-128.0 - gl.div_rn(low, scale), -128.0), 127.0))
    else:
        scale = gl.maximum(gl.div_rn(gl.minimum(high, limit), act.max_code), act.min_scale)
    return scale, zero


@gluon.jit
def quantize_token(x_ptr, space, row, part, parts, K, limit, act: gl.constexpr):
    """The part-th of `parts` ranges of a row's columns, by the row's scale, which every part works out from the whole row."""
    codes_ptr, scale_ptr, zero_ptr, k_padded, _scale_stride = space
    COLUMNS: gl.constexpr = act.columns
    AT_ONCE: gl.constexpr = act.at_once
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    x_ptr += row.to(gl.int64) * K
    codes_ptr += row.to(gl.int64) * k_padded
    wide = gl.arange(0, AT_ONCE, L)
    high = gl.zeros([AT_ONCE], gl.float32, L)
    low = gl.zeros([AT_ONCE], gl.float32, L)
    for k in range(0, K, AT_ONCE):
        v = gl.load(x_ptr + k + wide, mask=k + wide < K, other=0.0).to(gl.float32)
        if act.asymmetric:
            high = gl.maximum(high, v)
            low = gl.minimum(low, v)
        else:
            high = gl.maximum(high, gl.abs(v))
    smallest = 0.0
    if act.asymmetric:
        smallest = gl.min(low, 0)
    scale, zero = token_scale(gl.max(high, 0), smallest, limit, act)
    if part == 0:
        gl.store(scale_ptr + row, scale)
        if act.asymmetric:
            gl.store(zero_ptr + row, zero.to(gl.int32))
    divisor = gl.zeros([COLUMNS], gl.float32, L) + scale
    inverse = gl.zeros([COLUMNS], gl.float32, L) + gl.div_rn(1.0, scale)
    offs = gl.arange(0, COLUMNS, L)
    chunks = (k_padded + COLUMNS - 1) // COLUMNS
    for k in range(part * chunks // parts * COLUMNS, (part + 1) * chunks // parts * COLUMNS, COLUMNS):
        v = gl.load(x_ptr + k + offs, mask=k + offs < K, other=0.0).to(gl.float32)
        gl.store(codes_ptr + k + offs, encode(v, divisor, inverse, zero, act), mask=k + offs < k_padded)


@gluon.jit
def quantize_static(x_ptr, space, row, chunk, K, static, act: gl.constexpr):
    """The chunk-th act.columns columns of a row by a static scale and zero point, which are copied for each row."""
    codes_ptr, scale_ptr, zero_ptr, k_padded, _scale_stride = space
    static_scale_ptr, static_zero_ptr = static
    COLUMNS: gl.constexpr = act.columns
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    offs = chunk * COLUMNS + gl.arange(0, COLUMNS, L)
    scale = gl.load(static_scale_ptr)
    gl.store(scale_ptr + row, scale)
    zero = 0.0
    if act.asymmetric:
        code = gl.load(static_zero_ptr)
        gl.store(zero_ptr + row, code)
        zero = code.to(gl.float32)
    v = gl.load(x_ptr + row.to(gl.int64) * K + offs, mask=offs < K, other=0.0).to(gl.float32)
    divisor = gl.zeros([COLUMNS], gl.float32, L) + scale
    codes = encode(v, divisor, gl.zeros([COLUMNS], gl.float32, L) + gl.div_rn(1.0, scale), zero, act)
    gl.store(codes_ptr + row.to(gl.int64) * k_padded + offs, codes, mask=offs < k_padded)


@gluon.jit
def scale_position(row, act: gl.constexpr):
    """Where a row's scale lies in its group. With act.fragment_order each 16 rows are sorted so that a thread's four of a wgmma
    accumulator's columns, 2*q and 2*q + 1 of two neighbouring 8, are 16 bytes."""
    if act.fragment_order:
        return (row & -16) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1)
    else:
        return row


@gluon.jit
def quantize_groups(x_ptr, space, row, chunk, K, limit, act: gl.constexpr):
    """The chunk-th act.columns columns of a row in groups of 128 columns or a multiple."""
    codes_ptr, scale_ptr, _zero_ptr, k_padded, scale_stride = space
    GROUP: gl.constexpr = act.group_size
    GROUPS: gl.constexpr = act.columns // GROUP
    LANES: gl.constexpr = GROUP // 8 if GROUP < 256 else 32
    WARPS: gl.constexpr = 4 if GROUPS * LANES >= 128 else GROUPS * LANES // 32
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 4 // WARPS], [1, 0])
    group = chunk * GROUPS + gl.arange(0, GROUPS, gl.SliceLayout(1, L))
    offs = gl.expand_dims(group, 1) * GROUP + gl.expand_dims(gl.arange(0, GROUP, gl.SliceLayout(0, L)), 0)
    v = gl.load(x_ptr + row.to(gl.int64) * K + offs, mask=offs < K, other=0.0).to(gl.float32)
    amax = gl.max(gl.abs(v), 1)
    if act.e8m0_scale:
        bits = amax.to(gl.int32, bitcast=True)
        exponent = (bits >> 23) - 126 - 9 + ((bits & 0x7FFFFF) >= 0x600000).to(gl.int32)
        exponent = gl.minimum(gl.maximum(exponent, -127), 127)
        normal = ((gl.maximum(exponent, -126) + 127) << 23).to(gl.float32, bitcast=True)
        scale = gl.where(amax > 0, gl.where(exponent == -127, normal * 0.5, normal), 1.0)  # 2**-127 is subnormal
    else:
        scale = gl.maximum(gl.div_rn(gl.minimum(amax, limit), act.max_code), act.min_scale)
    gl.store(scale_ptr + scale_position(row, act) + group * scale_stride, scale, mask=group * GROUP < k_padded)
    divisor = gl.zeros_like(v) + gl.expand_dims(scale, 1)
    codes = encode(v, divisor, gl.zeros_like(v) + gl.expand_dims(gl.div_rn(gl.full_like(scale, 1.0), scale), 1), 0.0, act)
    gl.store(codes_ptr + row.to(gl.int64) * k_padded + offs, codes, mask=offs < k_padded)


@gluon.jit
def quantize_unit(unit, parts, x_ptr, space, static, K, limit, act: gl.constexpr):
    """Quantize one unit of x."""
    row = unit // parts
    part = unit - row * parts
    if act.granularity == "token":
        quantize_token(x_ptr, space, row, part, parts, K, limit, act)
    elif act.granularity == "tensor":
        quantize_static(x_ptr, space, row, part, K, static, act)
    else:
        quantize_groups(x_ptr, space, row, part, K, limit, act)


@gluon.jit
def publish(flag):
    """Count this CTA's units in, once all of its threads have written theirs."""
    fence_writes()
    gl.atomic_add(flag, 1, sem="release", scope="gpu")


@gluon.jit
def fence_writes():
    """All threads' writes are ordered before reads by the copy engine that their barrier precedes."""
    gl.inline_asm_elementwise(FENCE_PROXY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    barrier()


@gluon.jit
def wait_for_count(flag, count):
    """Wait until `count` CTAs have published; the copy engine then reads what they wrote."""
    gl.inline_asm_elementwise(WAIT_FOR_COUNT, "=r,l,r", [flag.to(gl.int64), count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def leave(flag, num_ctas):
    """Count this CTA out; the last of the launch resets both counters."""
    count = gl.atomic_add(flag + 1, 1, sem="relaxed", scope="gpu")
    if count == num_ctas - 1:
        gl.atomic_xchg(flag, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(flag + 1, 0, sem="relaxed", scope="gpu")


@gluon.jit(do_not_specialize=["parts", "k8", "k16", "scale_stride", "limit"])
def quantize_x(
    x_ptr, codes_ptr, x_scale_ptr, x_zero_ptr, static_scale_ptr, static_zero_ptr, parts, k8, k16, scale_stride, limit,
    act: gl.constexpr,
):  # fmt: skip
    """Quantize x [M, 8 * k8] to codes [M, 16 * k16], one unit per program. The other arguments are `space` and `static`."""
    gdc_launch_dependents()
    gdc_wait()
    space = (codes_ptr, x_scale_ptr, x_zero_ptr, k16 * 16, scale_stride)
    quantize_unit(gl.program_id(0), parts, x_ptr, space, (static_scale_ptr, static_zero_ptr), k8 * 8, limit, act)
