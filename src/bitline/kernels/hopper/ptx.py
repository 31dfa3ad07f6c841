"""PTX of the Hopper kernels: codes to pairs of 16-bit numbers, and the products of a unit of 128 columns by mma.sync.

Each number is decoded exactly. 4-bit codes are or-ed into the mantissa of 128 (bf16) or 1024 (fp16), 8-bit ones into that
of 1024 (fp16); a bfloat16 has room for seven bits, so the eighth chooses between 128 and 256 as what is subtracted.
"""

from __future__ import annotations


class Format:
    """How the codes of one scheme are decoded for one input dtype.

    name: "u4" (code - 8), "z4" (code - zero point), "u8" (code - 128), "z8" (code - zero point), "e2m1" and "e4m3" (in the
    bit order of `layout.spread`; for float16 e4m3 as of `layout.byte_pairs`), "e2m1s" and "e4m3s" (the same, and
    what the exponents' biases differ by is left to the scale).
    half: the input is float16, else bfloat16.
    """

    registers = "a0,a1,a2,a3,t,one,magic,minus,minus1"

    def __init__(self, name: str, half: bool) -> None:
        self.name, self.half = name, half
        self.width = 8 if name in ("u8", "z8", "e4m3", "e4m3s") else 4
        self.planes = self.width // 4
        self.zero = name.startswith("z")
        self.type = "f16x2" if half else "bf16x2"

    def constants(self, zero: str = "") -> str:
        """Set what `field` needs; zero: the operand that holds the zero points of rows g (byte 0) and g + 8 (byte 1)."""
        if self.name.startswith("e2m1"):  # 2**14 or 2**126, the difference of the exponents' biases
            return f"mov.b32 one,{'0x74007400' if self.half else '0x7E807E80'};"
        if self.name.startswith("e4m3"):
            return "mov.b32 one,0x7B807B80;"  # 2**120
        s = (
            "mov.b32 magic,0x64006400; mov.b32 one,0x3C003C00;"
            if self.half
            else "mov.b32 magic,0x43004300; mov.b32 one,0x3F803F80;"
        )
        if self.name == "z8" and not self.half:  # the zero point minus 128, as the codes are
            for i, out in enumerate(("minus", "minus1")):
                s += f"mov.b32 t,0; prmt.b32 t,{zero},t,{0x4040 + 0x101 * i:#x}; lop3.b32 {out},t,0x007f007f,magic,0xea;"
                s += f"lop3.b32 t,t,0x00800080,0x43804380,0x6a; sub.bf16x2 {out},{out},t;"
            return s
        if self.zero:  # -(1024 + zero) or -(128 + zero)
            high = "0xE4" if self.half else "0xC3"
            return s + f"mov.b32 t,{high}; prmt.b32 minus,{zero},t,0x4040; prmt.b32 minus1,{zero},t,0x4141;"
        middle = {("u4", True): "0xE408E408", ("u4", False): "0xC308C308", ("u8", True): "0xE480E480"}.get(
            (self.name, self.half), "0"
        )
        return s + f"mov.b32 minus,{middle};"

    def field(self, out: str, word: str, row: int, half: int) -> str:
        """The pair of numbers of one row (0 for g, 1 for g + 8) and half, from its word (8 bits: of that half's plane)."""
        if self.name.startswith("e2m1"):
            return self._e2m1(out, word, row + 2 * half)
        if self.name.startswith("e4m3"):
            return self._e4m3(out, word, row)
        shift = 4 * (row + 2 * half) if self.width == 4 else 8 * row
        s = f"shr.u32 t,{word},{shift};" if shift else ""
        word = "t" if shift else word
        minus = "minus1" if self.zero and row else "minus"
        if self.width == 4 or self.half:
            mask = "0x000f000f" if self.width == 4 else "0x00ff00ff"
            return s + f"lop3.b32 {out},{word},{mask},magic,0xea; fma.rn.{self.type} {out},{out},one,{minus};"
        # 128 + the low seven bits, minus 256 or 128 by the eighth
        s += f"lop3.b32 {out},{word},0x007f007f,magic,0xea; lop3.b32 t,{word},0x00800080,0x43804380,0x6a;"
        return s + f"sub.bf16x2 {out},{out},t;" + (f"sub.bf16x2 {out},{out},{minus};" if self.zero else "")

    def _e2m1(self, out: str, word: str, at: int) -> str:
        if self.half:
            return self._e2m1_half(out, word, at)
        if at == 0:
            s = f"and.b32 {out},{word},0x81c081c0;"
        elif at < 3:
            s = f"shl.b32 t,{word},{3 * at}; and.b32 {out},t,0x81c081c0;"
        else:
            s = f"shl.b32 t,{word},1; and.b32 {out},t,0x80008000; shr.u32 t,{word},5; lop3.b32 {out},t,0x01000100,{out},0xea;"
            s += f"shr.u32 t,{word},4; lop3.b32 {out},t,0x00c000c0,{out},0xea;"
        return s + self._biased(out)

    def _e2m1_half(self, out: str, word: str, at: int) -> str:
        if at < 2:
            s = f"shl.b32 t,{word},{3 * at}; and.b32 {out},t,0x8e008e00;"
        else:
            s = f"shl.b32 t,{word},{at - 1}; and.b32 {out},t,0x80008000; shl.b32 t,{word},{9 if at == 2 else 6};"
            s += f"lop3.b32 {out},t,0x0e000e00,{out},0xea;"
        return s + self._biased(out)

    def _biased(self, out: str) -> str:
        return "" if self.name.endswith("s") else f"mul.rn.{self.type} {out},{out},one;"

    def _e4m3(self, out: str, word: str, row: int) -> str:
        if self.half:
            return f"{{ .reg .b16 u,v; mov.b32 {{u,v}},{word}; cvt.rn.f16x2.e4m3x2 {out},{'v' if row else 'u'}; }}"
        if row == 0:
            s = f"and.b32 {out},{word},0x87f087f0;"
        else:
            s = f"shl.b32 t,{word},4; and.b32 {out},t,0x80f080f0; shr.u32 t,{word},4; lop3.b32 {out},t,0x07000700,{out},0xea;"
        return s + self._biased(out)


def mma_unit(name: str, half: bool, blocks: int, mt: int, scaled: bool, ring: bool = False) -> tuple[str, str]:
    """(assembly, constraints): `blocks` times 64 columns of a 16-row tile against 8*mt rows of x.

    Inputs: words [blocks][planes][4] (ring: the address of the lane's 16 bytes of the first, in shared memory, the others 512
    apart), x [mt][blocks][half][4], then the words of zero points where the format has them (one for each block if scaled),
    then (scaled) for each block the scale of rows g and g + 8 as pairs, then 4*mt sums to start from. Outputs: 4*mt sums.
    """
    f = Format(name, half)
    planes = f.planes
    no = 4 * mt
    at = no
    count = planes * blocks
    w = [f"w{i}" if ring else f"${at + i}" for i in range(4 * count)]
    slot = f"${at}"
    at += 1 if ring else len(w)
    x = [[f"${at + m * 8 * blocks + i}" for i in range(8 * blocks)] for m in range(mt)]
    at += 8 * blocks * mt
    zeros = [f"${at + b}" for b in range(blocks if scaled else 1)] if f.zero else []  # of each block, or of the unit
    at += len(zeros)
    scale = [(f"${at + 2 * b}", f"${at + 2 * b + 1}") for b in range(blocks)] if scaled else []
    at += 2 * len(scale)
    c = [f"${at + i}" for i in range(no)]
    s = f"{{ .reg .b32 {f.registers}; {f.constants(*zeros[:1])}\n"
    if ring:
        s += f".reg .b32 {','.join(w)};"
        s += "".join(f"ld.shared.v4.b32 {{{','.join(w[4 * i : 4 * i + 4])}}},[{slot}+{512 * i}];" for i in range(count))
    for i in range(no):
        s += f"mov.b32 ${i}, {c[i]};"
    kind = "f16" if half else "bf16"
    for b in range(blocks):
        if b and scaled and f.zero:
            s += f.constants(zeros[b])
        for h in range(2):
            for j in range(2):  # the columns of two neighbouring registers of x
                for i in range(4):
                    s += f.field(f"a{i}", w[(b * planes + h * (planes - 1)) * 4 + 2 * j + i // 2], i % 2, h)
                    if scaled:
                        s += f"mul.rn.{f.type} a{i},a{i},{scale[b][i % 2]};"
                for m in range(mt):
                    d = ",".join(f"${4 * m + i}" for i in range(4))
                    at = 8 * b + 4 * h + 2 * j
                    s += (
                        f"\nmma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{d}}},{{a0,a1,a2,a3}},"
                        f"{{{x[m][at]},{x[m][at + 1]}}},{{{d}}};\n"
                    )
    inputs = (1 if ring else len(w)) + 8 * blocks * mt + len(zeros) + 2 * len(scale)
    return s + "}", ",".join(["=&f"] * no + ["r"] * inputs + ["f"] * no)


def _four(at: int, name: str = "$") -> str:
    """The registers of 16 bytes, from the at-th on."""
    return "{" + ",".join(f"{name}{at + i}" for i in range(4)) + "}"


def load_words(count: int) -> tuple[str, str]:
    """`count` times 16 bytes, 512 apart, read once."""
    s = "".join(f"ld.global.nc.L1::no_allocate.v4.b32 {_four(4 * i)},[${4 * count}+{512 * i}];" for i in range(count))
    return s, ",".join(["=r"] * 4 * count if count == 1 else ["=&r"] * 4 * count) + ",l"


def copy_words(blocks: int, planes: int) -> tuple[str, str]:
    """16 bytes of each plane, 512 apart, of one or two blocks to as many places 512 apart in shared memory."""
    s = "".join(
        f"cp.async.cg.shared.global [$1+{512 * (b * planes + p)}],[${2 + b}+{512 * p}],16;"
        for b in range(blocks)
        for p in range(planes)
    )
    return s + " // $0", "=r,r" + ",l" * blocks


def load_x(blocks: int) -> tuple[str, str]:
    """For each block of 64 columns 32 bytes of a row of x, as two halves."""
    s = ""
    for i in range(2 * blocks):
        s += f"ld.global.nc.v4.b32 {_four(4 * i)},[${8 * blocks}+{128 * (i // 2) + 16 * (i % 2)}];"
    return s, ",".join(["=&r"] * 8 * blocks) + ",l"


def load_x_masked(blocks: int) -> tuple[str, str]:
    """`load_x`, with zeros in place of 16-byte pieces that do not lie in the bytes left from the address on."""
    n = 8 * blocks
    s = "{ .reg .pred p;" + "".join(f"mov.b32 ${i},0;" for i in range(n))
    for i in range(2 * blocks):
        at = 128 * (i // 2) + 16 * (i % 2)
        s += f"setp.gt.s32 p,${n + 1},{at}; @p ld.global.nc.v4.b32 {_four(4 * i)},[${n}+{at}];"
    return s + "}", ",".join(["=&r"] * n) + ",l,r"


def copy_few() -> tuple[str, str]:
    """16 bytes to shared memory if the third number is positive."""
    return "{ .reg .pred p; setp.gt.s32 p,$3,0; @p cp.async.cg.shared.global [$1],[$2],16; } // $0", "=r,r,l,r"


def copy_piece() -> tuple[str, str]:
    """16 bytes to shared memory, of which so many are copied and the others zero; the cache keeps them, others read them."""
    return "cp.async.ca.shared.global [$1],[$2],16,$3; // $0", "=r,r,l,r"


def ring_x(blocks: int, mt: int) -> tuple[str, str]:
    """`load_x` from shared memory, where blocks are 1024 * mt apart; two addresses: of the first and second halves."""
    s = ""
    for i in range(2 * blocks):
        s += f"ld.shared.v4.b32 {_four(4 * i)},[${8 * blocks + i % 2}+{1024 * mt * (i // 2)}];"
    return s, ",".join(["=&r"] * 8 * blocks) + ",r,r"


def swap_x(blocks: int) -> tuple[str, str]:
    """`load_x` where the lanes whose third number is not 0 read the second halves first; two addresses, in their order."""
    n = 8 * blocks
    s = f"{{ .reg .pred p; .reg .b32 a<8>; setp.ne.s32 p,${n + 2},0;"
    for b in range(blocks):
        for h in range(2):
            s += f"ld.global.nc.v4.b32 {_four(4 * h, 'a')},[${n + h}+{128 * b}];"
        for i in range(4):
            s += f"selp.b32 ${8 * b + i},a{4 + i},a{i},p; selp.b32 ${8 * b + 4 + i},a{i},a{4 + i},p;"
    return s + "}", ",".join(["=&r"] * n) + ",l,l,r"


def unit(name: str, half: bool) -> int:
    """n, where the numbers of `fragment` for bfloat16 are 2**-n times what the codes stand for, before the scale; else 0.

    Integers are taken as they are for bits of bfloat16, which are code * 2**-133 up to bit 7.
    """
    return 0 if half else {"u4": 133, "u8": 133, "z4": 133, "z8": 133, "e2m1": 126, "e4m3": 120}.get(name, 0)


def _subnormal(f: Format, words: list[str], zeros: list[str], at: int) -> str:
    """Set a0 … a3: integers as bits of bfloat16, those of rows g + 8 four bits higher if they have four; see `fragment`."""
    s = "{ .reg .b32 a0,a1,a2,a3,t,z0,z1; mov.b32 t,0;"
    if f.zero:
        s += f"prmt.b32 z0,{zeros[0]},t,0x4040; prmt.b32 z1,{zeros[0]},t,0x4141;"
        s += "shl.b32 z1,z1,4;" if f.width == 4 else ""
    if f.width == 4:
        s += f"shr.u32 t,{words[0]},8;"
        for h, word in enumerate((words[0], "t")):
            s += f"and.b32 a{2 * h},{word},0x000f000f; and.b32 a{2 * h + 1},{word},0x00f000f0;"
    else:
        for h, word in enumerate(words):
            s += f"and.b32 a{2 * h},{word},0x00ff00ff; prmt.b32 a{2 * h + 1},{word},t,0x4341;"
    for i in range(4):
        scale = f"${at + i % 2}"
        if f.zero:
            s += f"sub.bf16x2 a{i},a{i},z{i % 2}; mul.rn.bf16x2 a{i},a{i},{scale};"
        else:
            s += f"fma.rn.bf16x2 a{i},a{i},{scale},${at + 2 + i % 2};"
    return s


def _in_place(f: Format, words: list[str], zeros: list[str], at: int) -> str:
    """Set a0 … a3: 4-bit integers as float16, 1024 + code, and for rows g + 8, where they lie, 1024 + 16 * code over 16."""
    s = "{ .reg .b32 a0,a1,a2,a3,t,magic,n0,n1,m0,m1; mov.b32 magic,0x64006400; mov.b32 n0,0x3C003C00; mov.b32 n1,0x2C002C00;"
    if f.zero:  # -(1024 + zero) and -(64 + zero)
        s += f"mov.b32 t,0xE4; prmt.b32 m0,{zeros[0]},t,0x4040; mov.b32 t,0; prmt.b32 m1,{zeros[0]},t,0x4141;"
        s += "shl.b32 m1,m1,4; add.u32 m1,m1,0xD400D400;"
    else:
        s += "mov.b32 m0,0xE408E408; mov.b32 m1,0xD480D480;"
    s += f"shr.u32 t,{words[0]},8;"
    for i in range(4):
        s += f"lop3.b32 a{i},{(words[0], 't')[i // 2]},{0x000F000F << 4 * (i % 2):#x},magic,0xea;"
        s += f"fma.rn.f16x2 a{i},a{i},n{i % 2},m{i % 2}; mul.rn.f16x2 a{i},a{i},${at + i % 2};"
    return s


def fragment(name: str, half: bool) -> tuple[str, str]:
    """(assembly, constraints) of one step's fragment: words, zero word where the format has one, scale pairs -> 8 numbers.

    Where there is a `unit`, scale pairs of rows g and g + 8 are times 2**F, and after those of integers without zero points
    comes what is to be added for the middle of the codes (`scaled`): one instruction subtracts and scales.
    """
    f = Format(name + "s" if unit(name, half) and name.startswith("e") else name, half)
    words = [f"${8 + i}" for i in range(f.planes)]
    at = 8 + f.planes
    zeros = [f"${at}"] if f.zero else []
    at += f.zero
    if unit(name, half) == 133:
        s = _subnormal(f, words, zeros, at)
    elif half and name in ("u4", "z4"):
        s = _in_place(f, words, zeros, at)
    else:
        s = f"{{ .reg .b32 {f.registers}; {f.constants(*zeros)}"
        for i in range(4):
            word = words[(i // 2) * (f.planes - 1)]
            s += f.field(f"a{i}", word, i % 2, i // 2) + f"mul.rn.{f.type} a{i},a{i},${at + i % 2};"
    for i in range(4):
        s += f"mov.b32 {{${2 * i},${2 * i + 1}}},a{i};"
    pairs = 4 if name in ("u4", "u8") and not half else 2
    return s + "}", ",".join(["=h"] * 8 + ["r"] * (f.planes + f.zero + pairs))


def scaled(name: str, wide: bool) -> tuple[str, str]:
    """`duplicate` where there is a `unit`: pairs times powers of two, and then times minus the middle of the codes.

    Inputs: a word that holds the scales of rows g and g + 8, or (wide) both as float32, and the factors, as pairs. Outputs:
    the pairs of both rows, and for integers without zero points what is added for the middle of the codes in both.
    """
    middle = name.startswith("u")
    at = 4 if middle else 2
    s = "{ .reg .b32 t;"
    for i in range(2):
        s += f"cvt.rn.bf16x2.f32 t,${at + i},${at + i};" if wide else f"prmt.b32 t,${at},${at},{('0x1010', '0x3232')[i]};"
        s += f"mul.rn.bf16x2 ${i},t,${at + 1 + wide + i};"
    for i in range(2 * middle):  # -8 * 2**-133, or -128 * 2**-133
        s += f"mov.b32 t,{'0x80088008' if name == 'u4' and i == 0 else '0x80808080'}; mul.rn.bf16x2 ${2 + i},${i},t;"
    return s + "}", ",".join(["=&r"] * at + (["f", "f"] if wide else ["r"]) + ["r", "r"])


def duplicate(half: bool, wide: bool) -> tuple[str, str]:
    """A scale as a pair of the input's dtype: from a float32 (wide) one, from a word that holds rows g and g + 8 both."""
    if wide:
        return f"cvt.rn.{'f16x2' if half else 'bf16x2'}.f32 $0, $1, $1;", "=r,f"
    return "prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;", "=&r,=r,r"
