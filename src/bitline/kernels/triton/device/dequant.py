# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM300  (compile-time names are upper case, which the rule takes for constants on the wrong side)
"""Device code: packed words to numbers, by arithmetic but for types that are tables. One source for NVIDIA, AMD and Intel, no
inline assembly.

`F` is a `launch.Format`, `side` what comes with the words: fine scales, codes' high bits, or a pointer to a table. A word holds,
in field f of its low half (bits f*F.bits) and of its high half (16 bits further up), the codes of two neighbouring columns: one
mask takes the pair out, and it lands in one register, as matrix instructions want it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def high_bits(side, F: tl.constexpr):
    """The high bits of a word's codes, as stored, in the halves of a word: field f's at bit f * F.high of each."""
    WIDTH: tl.constexpr = 16 // F.bits * F.high
    MASK: tl.constexpr = (1 << WIDTH) - 1
    return (side & MASK) | (((side >> WIDTH) & MASK) << 16)


@triton.jit
def _codes(words, side, f: tl.constexpr, F: tl.constexpr):
    """Field f's codes in both halves of each word."""
    pair = (words >> (f * F.bits)) & (((1 << F.bits) - 1) * 0x10001)
    if F.high > 0:
        pair |= _moved(side, F.bits - f * F.high) & ((((1 << F.high) - 1) << F.bits) * 0x10001)
    return pair


@triton.jit
def _integer(words, shift: tl.constexpr, F: tl.constexpr):
    """The code at bit `shift` of each word, minus F.middle, as float32: mask, set an exponent, one exact multiply-add."""
    HIGH: tl.constexpr = shift + F.bits > 22
    AT: tl.constexpr = shift - 16 if HIGH else shift
    code = (words >> 16) if HIGH else words
    code = (code & (((1 << F.bits) - 1) << AT)) | 0x4B000000
    return code.to(tl.float32, bitcast=True) * (1.0 / (1 << AT)) - (F.middle + 8388608.0 / (1 << AT))


@triton.jit
def _integers(words, side, f: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, F: tl.constexpr):
    """Columns [32f, 32f + 32) of integers: code - F.middle in DTYPE, [S, BN, 32].

    Unless F.wide, both halves at once, by or-ing codes into the mantissa of a 16-bit number; needs codes below that mantissa's
    range (up to 7 bits in bfloat16, 8 in float16) and a device with packed 16-bit arithmetic.
    """
    if F.wide and F.high == 0:
        return _narrowed(_integer(words, f * F.bits, F), _integer(words, f * F.bits + 16, F), S, BN, DTYPE)
    elif F.wide:
        pair = _codes(words, side, f, F)
        low = ((pair & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - (F.middle + 8388608.0)
        high = ((pair >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - (F.middle + 8388608.0)
        return _narrowed(low, high, S, BN, DTYPE)
    else:
        ONES: tl.constexpr = 0x64006400 if DTYPE == tl.float16 else 0x43004300
        BASE: tl.constexpr = 1024.0 if DTYPE == tl.float16 else 128.0
        return _neighbours(_codes(words, side, f, F) | ONES, S, BN, DTYPE) - (BASE + F.middle)


@triton.jit
def _entries(words, table, f: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, F: tl.constexpr):
    """Columns [32f, 32f + 32) of a table's values in DTYPE, [S, BN, 32]. One line of the nearest cache holds it.

    It is read 16 bits at a time: Triton copies wider loads ahead to shared memory, where each would be written and read again.
    """
    pair = _codes(words, table, f, F)
    low = table + (pair & 0xFFFF)
    high = table + (pair >> 16)
    if DTYPE == tl.float32:
        w = tl.join(_halves(low + 16), _halves(high + 16))
    else:
        w = tl.join(tl.load(low).to(DTYPE, bitcast=True), tl.load(high).to(DTYPE, bitcast=True))
    return tl.reshape(w, (S, BN, 32))


@triton.jit
def _halves(at):
    """The float32 whose low 16 bits lie there and whose high 16 bits 16 places on."""
    low = tl.load(at).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (low | (tl.load(at + 16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _neighbours(pair, S: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr):
    """The two 16-bit numbers in each word as neighbouring columns, [S, BN, 32]."""
    low = (pair & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return tl.reshape(tl.join(low, high), (S, BN, 32))


@triton.jit
def _narrowed(low, high, S: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr):
    """Two float32 numbers of each word, which DTYPE has too, as neighbouring columns. Cutting a bfloat16 out is exact then, and
    one instruction for both, where AMD's GPUs before gfx950 take four to round each."""
    if DTYPE == tl.bfloat16:
        pair = (low.to(tl.uint32, bitcast=True) >> 16) | (high.to(tl.uint32, bitcast=True) & 0xFFFF0000)
        return _neighbours(pair, S, BN, DTYPE)
    else:
        return tl.reshape(tl.join(low, high), (S, BN, 32)).to(DTYPE)


@triton.jit
def _moved(words, by: tl.constexpr):
    """Words shifted up by that many bits, down where it is negative."""
    if by >= 0:
        return words << by
    else:
        return words >> (0 - by)


@triton.jit
def _embedded(words, at: tl.constexpr, BITS: tl.constexpr, LOW: tl.constexpr):
    """The minifloats at bit `at` of both halves of each word as 16-bit floats: their sign on top, the rest from bit LOW."""
    MASK: tl.constexpr = (((1 << (BITS - 1)) - 1) << LOW) * 0x10001
    return (_moved(words, LOW - at) & MASK) | (_moved(words, 16 - at - BITS) & 0x80008000)


@triton.jit
def _minifloats(words, fine, f: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, F: tl.constexpr):
    """Columns [32f, 32f + 32) of minifloats in DTYPE, times their fine scales where there are such, [S, BN, 32]; exact.

    A code's exponent and mantissa become the low ones of a bfloat16 (F.brain) or a float16: a number, subnormal ones too, that
    is smaller by the difference of the two biases, which F.unit makes up for. F.wide: with float32 arithmetic.
    """
    pair = _embedded(words, f * F.bits, F.bits, (7 if F.brain else 10) - F.mantissa)
    if F.wide:
        if F.brain:
            low = (pair << 16).to(tl.float32, bitcast=True)
            high = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        if F.fine == 0:
            low *= F.unit
            high *= F.unit
        else:
            scale = _fine_scales(fine, f, DTYPE, F)
            if F.brain:  # in float32, both would leave its range
                low *= F.unit
                high *= F.unit
            else:
                scale *= F.unit
            scale = tl.broadcast_to(scale[:, :, :, None], (S, BN, 32 // F.fine, F.fine // 2))
            scale = tl.reshape(scale, (S, BN, 16))
            low *= scale
            high *= scale
        return _narrowed(low, high, S, BN, DTYPE)
    else:
        w = _neighbours(pair, S, BN, DTYPE)
        w = w * F.unit  # also where the scale could do it: without it, ptxas moves halves about for the scale's sake
        if F.fine == 32:
            w = w * _fine_scales(fine, f, DTYPE, F)
        elif F.fine == 16:
            w = tl.reshape(w, (S, BN, 2, 16)) * _fine_scales(fine, f, DTYPE, F)[:, :, :, None]
            w = tl.reshape(w, (S, BN, 32))
        return w


@triton.jit
def _fine_scales(fine, f: tl.constexpr, DTYPE: tl.constexpr, F: tl.constexpr):
    """Field f's one-byte scales in float32 or (unless F.wide) in DTYPE, [S, BN, 32 // F.fine]; `fine` has a byte for each field.

    E8M0 is an exponent field as it is, of float16 where the inputs are. E4M3 is decoded as weights are.
    """
    if F.power:
        byte = (fine >> (8 * f)) & 0xFF
        if F.wide:
            return (byte << 23).to(tl.float32, bitcast=True) * F.scale_unit
        elif F.brain:
            return (byte << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            return (byte << 10).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        pair = _embedded(fine, f % 2 * 8, 8, 4 if F.brain else 7)  # fields f and f + 2 at once
        bits = (pair >> 16) if f >= 2 else (pair & 0xFFFF)
        if not F.wide:
            return bits.to(tl.uint16).to(DTYPE, bitcast=True) * F.scale_unit
        elif F.brain:
            return (bits << 16).to(tl.float32, bitcast=True) * F.scale_unit
        else:
            return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * F.scale_unit


@triton.jit
def columns(words, side, f: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, F: tl.constexpr):
    """Columns [32f, 32f + 32) of S tiles of words uint32 [S, BN, 16] as numbers in DTYPE, [S, BN, 32]."""
    if F.mantissa > 0:
        return _minifloats(words, side, f, S, BN, DTYPE, F)
    elif F.table:
        return _entries(words, side, f, S, BN, DTYPE, F)
    else:
        return _integers(words, side, f, S, BN, DTYPE, F)


@triton.jit
def chunk(words, side, S: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, F: tl.constexpr):
    """All fields of words side by side, [S, BN, 512 // F.bits]. Only register renaming, no data moves."""
    if F.bits == 8:
        w = tl.join(columns(words, side, 0, S, BN, DTYPE, F), columns(words, side, 1, S, BN, DTYPE, F))
        return tl.reshape(tl.permute(w, (0, 1, 3, 2)), (S, BN, 64))
    elif F.bits == 4:
        a = tl.join(columns(words, side, 0, S, BN, DTYPE, F), columns(words, side, 2, S, BN, DTYPE, F))
        b = tl.join(columns(words, side, 1, S, BN, DTYPE, F), columns(words, side, 3, S, BN, DTYPE, F))
        return tl.reshape(tl.permute(tl.join(a, b), (0, 1, 3, 4, 2)), (S, BN, 128))
    else:
        a = tl.join(columns(words, side, 0, S, BN, DTYPE, F), columns(words, side, 4, S, BN, DTYPE, F))
        b = tl.join(columns(words, side, 1, S, BN, DTYPE, F), columns(words, side, 5, S, BN, DTYPE, F))
        c = tl.join(columns(words, side, 2, S, BN, DTYPE, F), columns(words, side, 6, S, BN, DTYPE, F))
        d = tl.join(columns(words, side, 3, S, BN, DTYPE, F), columns(words, side, 7, S, BN, DTYPE, F))
        w = tl.join(tl.join(a, c), tl.join(b, d))  # last three axes: the field number's bits, highest first
        return tl.reshape(tl.permute(w, (0, 1, 3, 4, 5, 2)), (S, BN, 256))
