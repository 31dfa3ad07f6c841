# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM300  (compile-time names are upper case, which the rule takes for constants on the wrong side)
"""Device code of dequantization: packed int32 to numbers by arithmetic, or by lookup for LUT types. No inline assembly.

Each int32 holds, in field f of its low half (bits f * FMT.low_bits) and of its high half (16 bits further up), the codes of two
adjacent columns: one mask extracts the pair, and it lands in one register, as MMA operands need it.

Common arguments: `packed` uint32 [K_SLICES, BLOCK_SIZE_N, 16]; `aux` what accompanies it: block scales, the codes' high bits, or
a pointer to a LUT (`layout.pack`); `f` the field; DTYPE the result's dtype, x's; FMT a `launch.CodeFormat`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_high_bits(aux, FMT: tl.constexpr):
    """The high-bit plane as stored to high bits in both halves of an int32, field f's at bit f * FMT.high_bits of each."""
    WIDTH: tl.constexpr = 16 // FMT.low_bits * FMT.high_bits
    MASK: tl.constexpr = (1 << WIDTH) - 1
    return (aux & MASK) | (((aux >> WIDTH) & MASK) << 16)


@triton.jit
def _shift_left(packed, by: tl.constexpr):
    """Shift left, or right where `by` is negative."""
    if by >= 0:
        return packed << by
    else:
        return packed >> (0 - by)


@triton.jit
def _extract_codes(packed, aux, f: tl.constexpr, FMT: tl.constexpr):
    """Field f's codes in both halves of each int32."""
    pair = (packed >> (f * FMT.low_bits)) & (((1 << FMT.low_bits) - 1) * 0x10001)
    if FMT.high_bits > 0:
        pair |= _shift_left(aux, FMT.low_bits - f * FMT.high_bits) & ((((1 << FMT.high_bits) - 1) << FMT.low_bits) * 0x10001)
    return pair


@triton.jit
def _unpack_pairs(pair, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr):
    """The two 16-bit numbers in each int32 as adjacent columns, [K_SLICES, BLOCK_SIZE_N, 32]."""
    low = (pair & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return tl.reshape(tl.join(low, high), (K_SLICES, BLOCK_SIZE_N, 32))


@triton.jit
def _interleave_exact(low, high, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr):
    """Two float32 numbers per int32, both representable in DTYPE, as adjacent columns [K_SLICES, BLOCK_SIZE_N, 32].

    Truncation to bfloat16 is exact then, and one instruction for both; AMD GPUs before gfx950 take four to round each.
    """
    if DTYPE == tl.bfloat16:
        pair = (low.to(tl.uint32, bitcast=True) >> 16) | (high.to(tl.uint32, bitcast=True) & 0xFFFF0000)
        return _unpack_pairs(pair, K_SLICES, BLOCK_SIZE_N, DTYPE)
    else:
        return tl.reshape(tl.join(low, high), (K_SLICES, BLOCK_SIZE_N, 32)).to(DTYPE)


# ---- integers --------------------------------------------------------------------------------------------------------


@triton.jit
def _int_to_fp32(packed, shift: tl.constexpr, FMT: tl.constexpr):
    """The code at bit `shift` of each int32, minus the implicit zero point, as float32: mask, set an exponent, one exact FMA."""
    FROM_HIGH_HALF: tl.constexpr = shift + FMT.low_bits > 22
    BIT: tl.constexpr = shift - 16 if FROM_HIGH_HALF else shift
    code = (packed >> 16) if FROM_HIGH_HALF else packed
    code = (code & (((1 << FMT.low_bits) - 1) << BIT)) | 0x4B000000
    return code.to(tl.float32, bitcast=True) * (1.0 / (1 << BIT)) - (FMT.implicit_zero + 8388608.0 / (1 << BIT))


@triton.jit
def _dequantize_int(
    packed, aux, f: tl.constexpr, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr
):
    """Columns [32 f, 32 f + 32) of integers: code - FMT.implicit_zero, [K_SLICES, BLOCK_SIZE_N, 32].

    Without FMT.fp32_math both halves at once, by or-ing codes into the mantissa of a 16-bit number. That needs codes that fit
    the mantissa (up to 7 bits in bfloat16, 8 in float16) and packed 16-bit arithmetic.
    """
    if FMT.fp32_math and FMT.high_bits == 0:
        return _interleave_exact(
            _int_to_fp32(packed, f * FMT.low_bits, FMT), _int_to_fp32(packed, f * FMT.low_bits + 16, FMT),
            K_SLICES, BLOCK_SIZE_N, DTYPE,
        )  # fmt: skip
    elif FMT.fp32_math:
        pair = _extract_codes(packed, aux, f, FMT)
        low = ((pair & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - (FMT.implicit_zero + 8388608.0)
        high = ((pair >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - (FMT.implicit_zero + 8388608.0)
        return _interleave_exact(low, high, K_SLICES, BLOCK_SIZE_N, DTYPE)
    else:
        EXPONENTS: tl.constexpr = 0x64006400 if DTYPE == tl.float16 else 0x43004300
        BASE: tl.constexpr = 1024.0 if DTYPE == tl.float16 else 128.0
        pair = _extract_codes(packed, aux, f, FMT) | EXPONENTS
        return _unpack_pairs(pair, K_SLICES, BLOCK_SIZE_N, DTYPE) - (BASE + FMT.implicit_zero)


# ---- LUT types -------------------------------------------------------------------------------------------------------


@triton.jit
def _load_split_fp32(ptr):
    """The float32 whose low 16 bits are at `ptr` and whose high 16 bits are 16 elements further."""
    low = tl.load(ptr).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (low | (tl.load(ptr + 16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _dequantize_lut(
    packed, lut_ptr, f: tl.constexpr, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr
):
    """Columns [32 f, 32 f + 32) of LUT values, [K_SLICES, BLOCK_SIZE_N, 32]. One L1 cache line holds the table.

    It is read 16 bits at a time: Triton pipelines wider loads through shared memory, where each would be written and read again.
    """
    pair = _extract_codes(packed, lut_ptr, f, FMT)
    low = lut_ptr + (pair & 0xFFFF)
    high = lut_ptr + (pair >> 16)
    if DTYPE == tl.float32:
        w = tl.join(_load_split_fp32(low + 16), _load_split_fp32(high + 16))
    else:
        w = tl.join(tl.load(low).to(DTYPE, bitcast=True), tl.load(high).to(DTYPE, bitcast=True))
    return tl.reshape(w, (K_SLICES, BLOCK_SIZE_N, 32))


# ---- minifloats ------------------------------------------------------------------------------------------------------


@triton.jit
def _minifloat_bits(packed, at: tl.constexpr, BITS: tl.constexpr, MANTISSA_AT: tl.constexpr):
    """The minifloats at bit `at` of both halves as 16-bit floats: the sign in the top bit, the rest from bit MANTISSA_AT on."""
    MASK: tl.constexpr = (((1 << (BITS - 1)) - 1) << MANTISSA_AT) * 0x10001
    return (_shift_left(packed, MANTISSA_AT - at) & MASK) | (_shift_left(packed, 16 - at - BITS) & 0x80008000)


@triton.jit
def _block_scales(sf, f: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr):
    """Field f's block scales [K_SLICES, BLOCK_SIZE_N, 32 // FMT.sf_vec_size], float32 with FMT.fp32_math, else DTYPE.

    sf: one byte per field. E8M0 is used as an exponent field, float16's for float16 inputs. E4M3 is expanded as weights are.
    """
    if FMT.sf_e8m0:
        byte = (sf >> (8 * f)) & 0xFF
        if FMT.fp32_math:
            return (byte << 23).to(tl.float32, bitcast=True) * FMT.sf_rescale
        elif FMT.via_bf16:
            return (byte << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            return (byte << 10).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        pair = _minifloat_bits(sf, f % 2 * 8, 8, 4 if FMT.via_bf16 else 7)  # fields f and f + 2 at once
        bits = (pair >> 16) if f >= 2 else (pair & 0xFFFF)
        if not FMT.fp32_math:
            return bits.to(tl.uint16).to(DTYPE, bitcast=True) * FMT.sf_rescale
        elif FMT.via_bf16:
            return (bits << 16).to(tl.float32, bitcast=True) * FMT.sf_rescale
        else:
            return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * FMT.sf_rescale


@triton.jit
def _dequantize_minifloat_fp32(
    pair, sf, f: tl.constexpr, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr
):
    """`_dequantize_minifloat` with float32 arithmetic, from the 16-bit floats of `_minifloat_bits`."""
    if FMT.via_bf16:
        low = (pair << 16).to(tl.float32, bitcast=True)
        high = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    if FMT.sf_vec_size == 0:
        low *= FMT.rescale
        high *= FMT.rescale
    else:
        scale = _block_scales(sf, f, DTYPE, FMT)
        if FMT.via_bf16:  # applied to the weights, since rescale times a scale may leave float32's range
            low *= FMT.rescale
            high *= FMT.rescale
        else:
            scale *= FMT.rescale
        scale = tl.broadcast_to(scale[:, :, :, None], (K_SLICES, BLOCK_SIZE_N, 32 // FMT.sf_vec_size, FMT.sf_vec_size // 2))
        scale = tl.reshape(scale, (K_SLICES, BLOCK_SIZE_N, 16))
        low *= scale
        high *= scale
    return _interleave_exact(low, high, K_SLICES, BLOCK_SIZE_N, DTYPE)


@triton.jit
def _dequantize_minifloat(
    packed, sf, f: tl.constexpr, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr
):
    """Columns [32 f, 32 f + 32) of minifloats times their block scales, if any, [K_SLICES, BLOCK_SIZE_N, 32]; exact.

    A code's exponent and mantissa become the low bits of a bfloat16's (FMT.via_bf16) or a float16's: a number, subnormal ones
    included, that is smaller by the difference of the exponent biases, which FMT.rescale makes up for.
    """
    pair = _minifloat_bits(packed, f * FMT.low_bits, FMT.low_bits, (7 if FMT.via_bf16 else 10) - FMT.mantissa_bits)
    if FMT.fp32_math:
        return _dequantize_minifloat_fp32(pair, sf, f, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
    else:
        w = _unpack_pairs(pair, K_SLICES, BLOCK_SIZE_N, DTYPE)
        w = w * FMT.rescale  # not folded into the scale: ptxas would then move halves between registers to apply it
        if FMT.sf_vec_size == 32:
            w = w * _block_scales(sf, f, DTYPE, FMT)
        elif FMT.sf_vec_size == 16:
            w = tl.reshape(w, (K_SLICES, BLOCK_SIZE_N, 2, 16)) * _block_scales(sf, f, DTYPE, FMT)[:, :, :, None]
            w = tl.reshape(w, (K_SLICES, BLOCK_SIZE_N, 32))
        return w


# ---- all types -------------------------------------------------------------------------------------------------------


@triton.jit
def dequantize_field(
    packed, aux, f: tl.constexpr, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr
):
    """Columns [32 f, 32 f + 32) of a K block in DTYPE, [K_SLICES, BLOCK_SIZE_N, 32]."""
    if FMT.mantissa_bits > 0:
        return _dequantize_minifloat(packed, aux, f, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
    elif FMT.lut:
        return _dequantize_lut(packed, aux, f, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
    else:
        return _dequantize_int(packed, aux, f, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)


@triton.jit
def _join_fields(
    packed, aux, f: tl.constexpr, g: tl.constexpr,
    K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr,
):  # fmt: skip
    return tl.join(
        dequantize_field(packed, aux, f, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT),
        dequantize_field(packed, aux, g, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT),
    )


@triton.jit
def dequantize_block(packed, aux, K_SLICES: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr):
    """A whole K block in DTYPE, [K_SLICES, BLOCK_SIZE_N, 512 // FMT.low_bits]: all fields side by side, by register renaming."""
    if FMT.low_bits == 8:
        w = _join_fields(packed, aux, 0, 1, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
        return tl.reshape(tl.permute(w, (0, 1, 3, 2)), (K_SLICES, BLOCK_SIZE_N, 64))
    elif FMT.low_bits == 4:
        a = _join_fields(packed, aux, 0, 2, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
        b = _join_fields(packed, aux, 1, 3, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
        return tl.reshape(tl.permute(tl.join(a, b), (0, 1, 3, 4, 2)), (K_SLICES, BLOCK_SIZE_N, 128))
    else:
        a = _join_fields(packed, aux, 0, 4, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
        b = _join_fields(packed, aux, 1, 5, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
        c = _join_fields(packed, aux, 2, 6, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
        d = _join_fields(packed, aux, 3, 7, K_SLICES, BLOCK_SIZE_N, DTYPE, FMT)
        w = tl.join(tl.join(a, c), tl.join(b, d))  # the last three axes are the bits of the field number, highest first
        return tl.reshape(tl.permute(w, (0, 1, 3, 4, 5, 2)), (K_SLICES, BLOCK_SIZE_N, 256))
