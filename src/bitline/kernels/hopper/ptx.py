"""Inline PTX of the Hopper kernels: dequantizing codes to pairs of 16-bit floats, loads, and MMAs of a K tile by mma.sync.

Codes are dequantized exactly, by bit manipulation. 4-bit integers are ORed into the mantissa of 128 (bf16) or 1024 (fp16), 8-bit
integers into that of 1024 (fp16); a bf16 mantissa has seven bits, so that the eighth bit selects 128 or 256 to subtract. The
technique is that of Kim et al., "Who Says Elephants Can't Run" (2022), as in FasterTransformer and Marlin.

Functions return (assembly, constraints) for `gl.inline_asm_elementwise`.
"""

from __future__ import annotations


class CodeFormat:
    """Dequantization of one code format to one input dtype.

    name: "u4" (code - 8), "z4" (code - zero point), "u8" (code - 128), "z8" (code - zero point), "e2m1" and "e4m3" (bits in the
    order of `layout.spread_float_bits`; e4m3 to float16 in that of `layout.byte_pairs`), "e2m1s" and "e4m3s" (the same without
    the exponent rebias, which the scale then holds).
    fp16: to float16, else to bfloat16.
    """

    registers = "a0,a1,a2,a3,t,one,magic,minus,minus1"

    def __init__(self, name: str, fp16: bool) -> None:
        self.name, self.fp16 = name, fp16
        self.bits = 8 if name in ("u8", "z8", "e4m3", "e4m3s") else 4
        self.planes = self.bits // 4
        self.zero_points = name.startswith("z")
        self.pair_type = "f16x2" if fp16 else "bf16x2"

    def constants(self, zero: str = "") -> str:
        """Set the registers that `dequant_pair` reads. zero: the operand with the zero points of rows g and g + 8, in bytes."""
        if self.name.startswith("e2m1"):  # exponent rebias: 2**14 or 2**126
            return f"mov.b32 one,{'0x74007400' if self.fp16 else '0x7E807E80'};"
        if self.name.startswith("e4m3"):
            return "mov.b32 one,0x7B807B80;"  # exponent rebias: 2**120
        s = (
            "mov.b32 magic,0x64006400; mov.b32 one,0x3C003C00;"
            if self.fp16
            else "mov.b32 magic,0x43004300; mov.b32 one,0x3F803F80;"
        )
        if self.name == "z8" and not self.fp16:  # zero point - 128, since codes become code - 128
            for i, out in enumerate(("minus", "minus1")):
                s += f"mov.b32 t,0; prmt.b32 t,{zero},t,{0x4040 + 0x101 * i:#x}; lop3.b32 {out},t,0x007f007f,magic,0xea;"
                s += f"lop3.b32 t,t,0x00800080,0x43804380,0x6a; sub.bf16x2 {out},{out},t;"
            return s
        if self.zero_points:  # -(1024 + zero point) or -(128 + zero point)
            high = "0xE4" if self.fp16 else "0xC3"
            return s + f"mov.b32 t,{high}; prmt.b32 minus,{zero},t,0x4040; prmt.b32 minus1,{zero},t,0x4141;"
        # -(magic + implicit zero point)
        minus = {("u4", True): "0xE408E408", ("u4", False): "0xC308C308", ("u8", True): "0xE480E480"}.get(
            (self.name, self.fp16), "0"
        )
        return s + f"mov.b32 minus,{minus};"

    def dequant_pair(self, out: str, packed: str, row: int, half: int) -> str:
        """Set `out` to the pair of row g (row 0) or g + 8 (row 1) in a column half, from packed int32 (8 bits: of its plane)."""
        if self.name.startswith("e2m1"):
            return self._e2m1(out, packed, row + 2 * half)
        if self.name.startswith("e4m3"):
            return self._e4m3(out, packed, row)
        shift = 4 * (row + 2 * half) if self.bits == 4 else 8 * row
        s = f"shr.u32 t,{packed},{shift};" if shift else ""
        packed = "t" if shift else packed
        minus = "minus1" if self.zero_points and row else "minus"
        if self.bits == 4 or self.fp16:
            mask = "0x000f000f" if self.bits == 4 else "0x00ff00ff"
            return s + f"lop3.b32 {out},{packed},{mask},magic,0xea; fma.rn.{self.pair_type} {out},{out},one,{minus};"
        # 128 + the low seven bits, minus 256 or 128 by the eighth
        s += f"lop3.b32 {out},{packed},0x007f007f,magic,0xea; lop3.b32 t,{packed},0x00800080,0x43804380,0x6a;"
        return s + f"sub.bf16x2 {out},{out},t;" + (f"sub.bf16x2 {out},{out},{minus};" if self.zero_points else "")

    def _e2m1(self, out: str, packed: str, position: int) -> str:
        if self.fp16:
            return self._e2m1_fp16(out, packed, position)
        if position == 0:
            s = f"and.b32 {out},{packed},0x81c081c0;"
        elif position < 3:
            s = f"shl.b32 t,{packed},{3 * position}; and.b32 {out},t,0x81c081c0;"
        else:
            s = f"shl.b32 t,{packed},1; and.b32 {out},t,0x80008000; shr.u32 t,{packed},5; lop3.b32 {out},t,0x01000100,{out},0xea;"
            s += f"shr.u32 t,{packed},4; lop3.b32 {out},t,0x00c000c0,{out},0xea;"
        return s + self._rebias(out)

    def _e2m1_fp16(self, out: str, packed: str, position: int) -> str:
        if position < 2:
            s = f"shl.b32 t,{packed},{3 * position}; and.b32 {out},t,0x8e008e00;"
        else:
            s = f"shl.b32 t,{packed},{position - 1}; and.b32 {out},t,0x80008000; shl.b32 t,{packed},{9 if position == 2 else 6};"
            s += f"lop3.b32 {out},t,0x0e000e00,{out},0xea;"
        return s + self._rebias(out)

    def _rebias(self, out: str) -> str:
        return "" if self.name.endswith("s") else f"mul.rn.{self.pair_type} {out},{out},one;"

    def _e4m3(self, out: str, packed: str, row: int) -> str:
        if self.fp16:
            return f"{{ .reg .b16 u,v; mov.b32 {{u,v}},{packed}; cvt.rn.f16x2.e4m3x2 {out},{'v' if row else 'u'}; }}"
        if row == 0:
            s = f"and.b32 {out},{packed},0x87f087f0;"
        else:
            s = f"shl.b32 t,{packed},4; and.b32 {out},t,0x80f080f0; shr.u32 t,{packed},4; lop3.b32 {out},t,0x07000700,{out},0xea;"
        return s + self._rebias(out)


# ---- mma.sync kernels ---------------------------------------------------------------------------------------------------


def mma_k_tile(name: str, fp16: bool, k_blocks: int, m8_tiles: int, scaled: bool, staged: bool = False) -> tuple[str, str]:
    """Dequantize a K tile of a 16-row tile of W and multiply it with 8 * m8_tiles rows of x.

    Inputs: packed int32 [k_blocks][planes][4] (staged: the lane's shared-memory address of the first 16 bytes, the others 512
    apart), x [m8_tiles][k_blocks][half][4], packed zero points where the format has them (one for each K block if scaled, else
    one), (scaled) for each K block the scale pairs of rows g and g + 8, then 4 * m8_tiles accumulators. Outputs: accumulators.
    """
    f = CodeFormat(name, fp16)
    planes = f.planes
    num_acc = 4 * m8_tiles
    at = num_acc
    vectors = planes * k_blocks
    w = [f"w{i}" if staged else f"${at + i}" for i in range(4 * vectors)]
    address = f"${at}"
    at += 1 if staged else len(w)
    x = [[f"${at + m * 8 * k_blocks + i}" for i in range(8 * k_blocks)] for m in range(m8_tiles)]
    at += 8 * k_blocks * m8_tiles
    zeros = [f"${at + b}" for b in range(k_blocks if scaled else 1)] if f.zero_points else []
    at += len(zeros)
    scale = [(f"${at + 2 * b}", f"${at + 2 * b + 1}") for b in range(k_blocks)] if scaled else []
    at += 2 * len(scale)
    c = [f"${at + i}" for i in range(num_acc)]
    s = f"{{ .reg .b32 {f.registers}; {f.constants(*zeros[:1])}\n"
    if staged:
        s += f".reg .b32 {','.join(w)};"
        s += "".join(f"ld.shared.v4.b32 {{{','.join(w[4 * i : 4 * i + 4])}}},[{address}+{512 * i}];" for i in range(vectors))
    for i in range(num_acc):
        s += f"mov.b32 ${i}, {c[i]};"
    for b in range(k_blocks):
        if b and scaled and f.zero_points:
            s += f.constants(zeros[b])
        packed_regs = w[b * planes * 4 : (b + 1) * planes * 4]
        s += _mma_k_block(f, packed_regs, [registers[8 * b : 8 * b + 8] for registers in x], scale[b] if scaled else None)
    inputs = (1 if staged else len(w)) + 8 * k_blocks * m8_tiles + len(zeros) + 2 * len(scale)
    return s + "}", ",".join(["=&f"] * num_acc + ["r"] * inputs + ["f"] * num_acc)


def _mma_k_block(f: CodeFormat, packed_regs: list[str], x: list[list[str]], scale: tuple[str, str] | None) -> str:
    """The four m16n8k16 of a K block for each 8-row tile of x, after dequantizing their fragments of W."""
    kind = "f16" if f.fp16 else "bf16"
    s = ""
    for half in range(2):
        for j in range(2):  # MMA over the columns of two neighbouring registers of x
            for i in range(4):
                s += f.dequant_pair(f"a{i}", packed_regs[half * (f.planes - 1) * 4 + 2 * j + i // 2], i % 2, half)
                if scale:
                    s += f"mul.rn.{f.pair_type} a{i},a{i},{scale[i % 2]};"
            for m, registers in enumerate(x):
                d = ",".join(f"${4 * m + i}" for i in range(4))
                at = 4 * half + 2 * j
                s += (
                    f"\nmma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{d}}},{{a0,a1,a2,a3}},"
                    f"{{{registers[at]},{registers[at + 1]}}},{{{d}}};\n"
                )
    return s


def _vec4(first: int, prefix: str = "$") -> str:
    """Operand list of four registers (16 bytes), from the first on."""
    return "{" + ",".join(f"{prefix}{first + i}" for i in range(4)) + "}"


def load_weights(count: int) -> tuple[str, str]:
    """`count` loads of 16 bytes from global memory, 512 apart, streamed past the L1."""
    s = "".join(f"ld.global.nc.L1::no_allocate.v4.b32 {_vec4(4 * i)},[${4 * count}+{512 * i}];" for i in range(count))
    return s, ",".join(["=r"] * 4 * count if count == 1 else ["=&r"] * 4 * count) + ",l"


def load_x(k_blocks: int) -> tuple[str, str]:
    """32 bytes of a row of x per K block, from global memory, as two halves of 16."""
    s = ""
    for i in range(2 * k_blocks):
        s += f"ld.global.nc.v4.b32 {_vec4(4 * i)},[${8 * k_blocks}+{128 * (i // 2) + 16 * (i % 2)}];"
    return s, ",".join(["=&r"] * 8 * k_blocks) + ",l"


def load_x_masked(k_blocks: int) -> tuple[str, str]:
    """`load_x` with zeros for 16-byte vectors past K; second operand: bytes from the address to K."""
    n = 8 * k_blocks
    s = "{ .reg .pred p;" + "".join(f"mov.b32 ${i},0;" for i in range(n))
    for i in range(2 * k_blocks):
        at = 128 * (i // 2) + 16 * (i % 2)
        s += f"setp.gt.s32 p,${n + 1},{at}; @p ld.global.nc.v4.b32 {_vec4(4 * i)},[${n}+{at}];"
    return s + "}", ",".join(["=&r"] * n) + ",l,r"


def load_x_staggered(k_blocks: int) -> tuple[str, str]:
    """`load_x` whose lanes with a third operand other than 0 load the second half first; two addresses, in load order."""
    n = 8 * k_blocks
    s = f"{{ .reg .pred p; .reg .b32 a<8>; setp.ne.s32 p,${n + 2},0;"
    for b in range(k_blocks):
        for h in range(2):
            s += f"ld.global.nc.v4.b32 {_vec4(4 * h, 'a')},[${n + h}+{128 * b}];"
        for i in range(4):
            s += f"selp.b32 ${8 * b + i},a{4 + i},a{i},p; selp.b32 ${8 * b + 4 + i},a{i},a{4 + i},p;"
    return s + "}", ",".join(["=&r"] * n) + ",l,l,r"


def load_x_shared(k_blocks: int, m8_tiles: int) -> tuple[str, str]:
    """`load_x` from a shared-memory stage, K blocks 1024 * m8_tiles bytes apart; addresses of the first and second halves."""
    s = ""
    for i in range(2 * k_blocks):
        s += f"ld.shared.v4.b32 {_vec4(4 * i)},[${8 * k_blocks + i % 2}+{1024 * m8_tiles * (i // 2)}];"
    return s, ",".join(["=&r"] * 8 * k_blocks) + ",r,r"


def copy_weights(k_blocks: int, planes: int) -> tuple[str, str]:
    """cp.async of 16 bytes of each plane, 512 apart, of each K block, to shared memory, 512 apart."""
    s = "".join(
        f"cp.async.cg.shared.global [$1+{512 * (b * planes + p)}],[${2 + b}+{512 * p}],16;"
        for b in range(k_blocks)
        for p in range(planes)
    )
    return s + " // $0", "=r,r" + ",l" * k_blocks


def copy_table() -> tuple[str, str]:
    """cp.async of 16 bytes of a scale or zero-point table to shared memory, if the third operand is positive."""
    return "{ .reg .pred p; setp.gt.s32 p,$3,0; @p cp.async.cg.shared.global [$1],[$2],16; } // $0", "=r,r,l,r"


def copy_x() -> tuple[str, str]:
    """cp.async of 16 bytes of x to shared memory, all but the third operand's count zero-filled; allocates in the L1, since other
    CTAs of the SM load the same."""
    return "cp.async.ca.shared.global [$1],[$2],16,$3; // $0", "=r,r,l,r"


# ---- wgmma kernel -------------------------------------------------------------------------------------------------------


def fragment_exponent_bias(name: str, fp16: bool) -> int:
    """b where `dequant_fragment` gives 2**-b times the code's value before scaling; 0 for float16.

    bfloat16: a code in bits 0 to 7 of a bfloat16 is exactly code * 2**-133 (a subnormal, or exponent 1), so integers need no
    conversion; floats lack the exponent rebias. The packed scales and the epilogue's factor hold 2**b.
    """
    return 0 if fp16 else {"u4": 133, "u8": 133, "z4": 133, "z8": 133, "e2m1": 126, "e4m3": 120}.get(name, 0)


def _integers_as_bf16_bits(f: CodeFormat, packed_regs: list[str], zeros: list[str], at: int) -> str:
    """Set a0 … a3: integer codes as the low bits of bfloat16, 4-bit ones of rows g + 8 four bits higher; scaled."""
    s = "{ .reg .b32 a0,a1,a2,a3,t,z0,z1; mov.b32 t,0;"
    if f.zero_points:
        s += f"prmt.b32 z0,{zeros[0]},t,0x4040; prmt.b32 z1,{zeros[0]},t,0x4141;"
        s += "shl.b32 z1,z1,4;" if f.bits == 4 else ""
    if f.bits == 4:
        s += f"shr.u32 t,{packed_regs[0]},8;"
        for h, packed in enumerate((packed_regs[0], "t")):
            s += f"and.b32 a{2 * h},{packed},0x000f000f; and.b32 a{2 * h + 1},{packed},0x00f000f0;"
    else:
        for h, packed in enumerate(packed_regs):
            s += f"and.b32 a{2 * h},{packed},0x00ff00ff; prmt.b32 a{2 * h + 1},{packed},t,0x4341;"
    for i in range(4):
        scale = f"${at + i % 2}"
        if f.zero_points:
            s += f"sub.bf16x2 a{i},a{i},z{i % 2}; mul.rn.bf16x2 a{i},a{i},{scale};"
        else:
            s += f"fma.rn.bf16x2 a{i},a{i},{scale},${at + 2 + i % 2};"
    return s


def _int4_to_fp16(f: CodeFormat, packed_regs: list[str], zeros: list[str], at: int) -> str:
    """Set a0 … a3: 4-bit codes in float16 without a shift: 1024 + code, and (1024 + 16 * code) / 16 for rows g + 8."""
    s = "{ .reg .b32 a0,a1,a2,a3,t,magic,n0,n1,m0,m1; mov.b32 magic,0x64006400; mov.b32 n0,0x3C003C00; mov.b32 n1,0x2C002C00;"
    if f.zero_points:  # -(1024 + zero point) and -(64 + zero point)
        s += f"mov.b32 t,0xE4; prmt.b32 m0,{zeros[0]},t,0x4040; mov.b32 t,0; prmt.b32 m1,{zeros[0]},t,0x4141;"
        s += "shl.b32 m1,m1,4; add.u32 m1,m1,0xD400D400;"
    else:
        s += "mov.b32 m0,0xE408E408; mov.b32 m1,0xD480D480;"
    s += f"shr.u32 t,{packed_regs[0]},8;"
    for i in range(4):
        s += f"lop3.b32 a{i},{(packed_regs[0], 't')[i // 2]},{0x000F000F << 4 * (i % 2):#x},magic,0xea;"
        s += f"fma.rn.f16x2 a{i},a{i},n{i % 2},m{i % 2}; mul.rn.f16x2 a{i},a{i},${at + i % 2};"
    return s


def dequant_fragment(name: str, fp16: bool) -> tuple[str, str]:
    """One k16 step of a wgmma register fragment, dequantized and scaled: 8 elements.

    Inputs: packed int32 of each plane, packed zero points where the format has them, scale pairs of rows g and g + 8. With a
    `fragment_exponent_bias`, scale pairs come from `folded_scale_pairs`; for integers without zero points the addends for the
    implicit zero point follow, and one fma subtracts and scales.
    """
    bias = fragment_exponent_bias(name, fp16)
    f = CodeFormat(name + "s" if bias and name.startswith("e") else name, fp16)
    packed_regs = [f"${8 + i}" for i in range(f.planes)]
    at = 8 + f.planes
    zeros = [f"${at}"] if f.zero_points else []
    at += f.zero_points
    if bias == 133:
        s = _integers_as_bf16_bits(f, packed_regs, zeros, at)
    elif fp16 and name in ("u4", "z4"):
        s = _int4_to_fp16(f, packed_regs, zeros, at)
    else:
        s = f"{{ .reg .b32 {f.registers}; {f.constants(*zeros)}"
        for i in range(4):
            packed = packed_regs[(i // 2) * (f.planes - 1)]
            s += f.dequant_pair(f"a{i}", packed, i % 2, i // 2) + f"mul.rn.{f.pair_type} a{i},a{i},${at + i % 2};"
    for i in range(4):
        s += f"mov.b32 {{${2 * i},${2 * i + 1}}},a{i};"
    pairs = 4 if name in ("u4", "u8") and not fp16 else 2
    return s + "}", ",".join(["=h"] * 8 + ["r"] * (f.planes + f.zero_points + pairs))


def folded_scale_pairs(name: str, fp32_scales: bool) -> tuple[str, str]:
    """`scale_pairs` for formats with a `fragment_exponent_bias`: pairs times powers of two, and for integers without zero points
    the addends for the implicit zero point.

    Inputs: an int32 with the scales of rows g and g + 8, or both as float32 (fp32_scales), and the factors of both rows as pairs.
    Outputs: the scaled pairs of both rows, then the addends of both rows.
    """
    implicit_zero = name.startswith("u")
    at = 4 if implicit_zero else 2
    s = "{ .reg .b32 t;"
    for i in range(2):
        s += f"cvt.rn.bf16x2.f32 t,${at + i},${at + i};" if fp32_scales else f"prmt.b32 t,${at},${at},{('0x1010', '0x3232')[i]};"
        s += f"mul.rn.bf16x2 ${i},t,${at + 1 + fp32_scales + i};"
    for i in range(2 * implicit_zero):  # -8 * 2**-133, or -128 * 2**-133
        s += f"mov.b32 t,{'0x80088008' if name == 'u4' and i == 0 else '0x80808080'}; mul.rn.bf16x2 ${2 + i},${i},t;"
    return s + "}", ",".join(["=&r"] * at + (["f", "f"] if fp32_scales else ["r"]) + ["r", "r"])


def scale_pairs(fp16: bool, fp32_scales: bool) -> tuple[str, str]:
    """A scale as a pair of the input's dtype: of one float32 (fp32_scales), or of rows g and g + 8 from one int32."""
    if fp32_scales:
        return f"cvt.rn.{'f16x2' if fp16 else 'bf16x2'}.f32 $0, $1, $1;", "=r,f"
    return "prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;", "=&r,=r,r"
