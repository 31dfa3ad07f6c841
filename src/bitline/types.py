"""Value types of the whole library: scalar types, activation schemes, layer specs and verdicts. No tensors here."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["int", "float", "table"]


@dataclass(frozen=True)
class ScalarType:
    """How one weight code of `bits` bits becomes a number.

    kind "int": an unsigned code minus `bias`, or two's complement where `signed`.
    kind "float": sign, `exponent` and `mantissa` bits; the value of each code is in `values()`.
    kind "table": `table[code]`.
    """

    name: str
    bits: int
    kind: Kind = "int"
    bias: int = 0
    signed: bool = False
    exponent: int = 0
    mantissa: int = 0
    table: tuple[float, ...] = ()

    @property
    def size_bits(self) -> int:
        """Bits of one code."""
        return self.bits

    def has_bias(self) -> bool:
        """True where a constant is subtracted from the stored code (uint4b8, uint8b128, …)."""
        return self.bias != 0

    @functools.cache  # noqa: B019  (ScalarTypes are few and live as long as the process)
    def values(self) -> tuple[float, ...]:
        """The number that each of the 2**bits codes stands for."""
        if self.kind == "table":
            return self.table
        if self.kind == "int":
            return tuple(float(self._integer(code)) for code in range(1 << self.bits))
        return tuple(_decode_float(self, code) for code in range(1 << self.bits))

    def _integer(self, code: int) -> int:
        if self.signed and code >> (self.bits - 1):
            return code - (1 << self.bits)
        return code - self.bias

    def min(self) -> float:
        """The smallest finite value."""
        return min(v for v in self.values() if math.isfinite(v))

    def max(self) -> float:
        """The largest finite value."""
        return max(v for v in self.values() if math.isfinite(v))

    def __repr__(self) -> str:
        return self.name


def _decode_float(t: ScalarType, code: int) -> float:
    """OCP MX 1.0 and OCP FP8 minifloats: subnormals, and the NaN/inf codes of each of the named types."""
    sign = -1.0 if code >> (t.exponent + t.mantissa) else 1.0  # unsigned types have no bit there
    exponent = (code >> t.mantissa) & ((1 << t.exponent) - 1)
    mantissa = code & ((1 << t.mantissa) - 1)
    full = (1 << t.exponent) - 1
    if t.name in ("float8_e4m3fn", "ufloat8_e5m3") and exponent == full and mantissa == (1 << t.mantissa) - 1:
        return math.nan
    if t.name == "float8_e5m2" and exponent == full:
        return math.nan if mantissa else sign * math.inf
    if t.name == "float8_e4m3fnuz" and code == 0x80:
        return math.nan
    offset = t.bias or (1 << (t.exponent - 1)) - 1
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - offset - t.mantissa)
    return sign * (1 + mantissa * 2.0**-t.mantissa) * 2.0 ** (exponent - offset)


uint1, uint2, uint3, uint4, uint5, uint6, uint7, uint8 = (ScalarType(f"uint{b}", b) for b in range(1, 9))
uint1b1, uint2b2, uint3b4, uint4b8, uint5b16, uint6b32, uint7b64, uint8b128 = (
    ScalarType(f"uint{b}b{1 << (b - 1)}", b, bias=1 << (b - 1)) for b in range(1, 9)
)
int4, int8 = (ScalarType(f"int{b}", b, signed=True) for b in (4, 8))
float8_e4m3fn = ScalarType("float8_e4m3fn", 8, "float", exponent=4, mantissa=3)
float8_e5m2 = ScalarType("float8_e5m2", 8, "float", exponent=5, mantissa=2)
float8_e4m3fnuz = ScalarType("float8_e4m3fnuz", 8, "float", bias=8, exponent=4, mantissa=3)
ufloat8_e5m3 = ScalarType("ufloat8_e5m3", 8, "float", exponent=5, mantissa=3)  # of scales alone: no sign
float6_e2m3 = ScalarType("float6_e2m3", 6, "float", exponent=2, mantissa=3)
float6_e3m2 = ScalarType("float6_e3m2", 6, "float", exponent=3, mantissa=2)
float4_e2m1 = ScalarType("float4_e2m1", 4, "float", exponent=2, mantissa=1)
# bitsandbytes' two tables, each value the exact one of its float32.
nf4 = ScalarType("nf4", 4, "table", table=(
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
))  # fmt: skip
fp4_bnb = ScalarType("fp4_bnb", 4, "table", table=(
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
    0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
))  # fmt: skip
# ggml's ternary codes: -1, 0 and 1, and a fourth value that two bits leave over.
uint2b1 = ScalarType("uint2b1", 2, bias=1)
# ggml's tables (gguf's quants.py). Types of whole vectors are spelled weight by weight: a magnitude of the vector's grid, and
# a sign in the top bit. Grid values are divided by the factor that their scales lack, so that scales are integers times d.
iq4_nl = ScalarType("iq4_nl", 4, "table", table=(
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
))  # fmt: skip
iq3_xxs = ScalarType("iq3_xxs", 4, "table", table=(
    1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.5,
))  # fmt: skip
iq3_s = ScalarType("iq3_s", 4, "table", table=(
    1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0,
))  # fmt: skip
iq2 = ScalarType("iq2", 3, "table", table=(1.0, 3.125, 5.375, 0.0, -1.0, -3.125, -5.375, 0.0))  # no file has the zeros
iq1_m = ScalarType("iq1_m", 3, "table", table=(-0.875, 0.125, 1.125, 0.0, -1.125, -0.125, 0.875, 0.0))  # nor these
binary = ScalarType("binary", 1, "table", table=(-1.0, 1.0))

SCALAR_TYPES: dict[str, ScalarType] = {t.name: t for t in list(globals().values()) if isinstance(t, ScalarType)}


def unsigned(bits: int, *, symmetric: bool) -> ScalarType:
    """uint{bits} with an implied middle zero where `symmetric`, else uint{bits} whose zero comes with the weight."""
    return SCALAR_TYPES[f"uint{bits}b{1 << (bits - 1)}" if symmetric else f"uint{bits}"]


DTYPES: dict[str, torch.dtype] = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    )
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ActSpec:
    """How a checkpoint asks for the layer's input to be quantized before the product.

    granularity "tensor": one scale for the whole input; "token": one per row; "group": one per `group_size` columns
    of a row. `dynamic` scales are computed from the input, static ones come with the weight (`input_scale`).
    limit: what an absolute value counts as at most when a dynamic scale is computed, so that larger ones saturate; 0 for none.
    """

    dtype: ScalarType
    dynamic: bool = True
    granularity: Literal["tensor", "token", "group"] = "token"
    group_size: int = 0
    symmetric: bool = True
    scale: Literal["float", "e8m0", "e4m3", "e5m3"] = "float"
    limit: float = 0.0

    def __str__(self) -> str:
        how = f"group{self.group_size}" if self.granularity == "group" else self.granularity
        parts = [self.dtype.name, "dynamic" if self.dynamic else "static", how]
        more = ([] if self.symmetric else ["asym"]) + ([] if self.scale == "float" else [self.scale])
        return "-".join(parts + more + ([f"limit{self.limit!r}"] if self.limit else []))

    @staticmethod
    def parse(text: str) -> ActSpec:
        """The inverse of str()."""
        text, _, limit = text.partition("-limit")
        name, when, how, *rest = text.split("-")
        size = int(how.removeprefix("group")) if how.startswith("group") else 0
        scale: Any = next((r for r in rest if r in ("e8m0", "e4m3", "e5m3")), "float")
        granularity: Any = "group" if size else how
        return ActSpec(SCALAR_TYPES[name], when == "dynamic", granularity, size, "asym" not in rest, scale, float(limit or 0))


@dataclass(frozen=True)
class LinearSpec:
    """Everything about one linear layer that selection may look at, and no tensor.

    W[n, k] = scale2 * scale[(n + block_offset[0]) // bn, (k + block_offset[1]) // bk] * (code[n, k] - zero) (+ offset)

    n, k: out_features and in_features of this (possibly sharded) weight.
    block: (bn, bk) of one scale. (n, k) is per tensor, (1, k) per channel, (1, g) grouped, (128, 128) block FP8.
    block_offset: rows and columns of the first block that a tensor-parallel cut left on another rank.
    zero: "none", "int" (zero points in code units) or "float" (an offset in the weight's units is added).
    scale2_block: block of a second, coarser scale: (n, k) for NVFP4's global scale, (1, 256) for GGUF's K-quants.
    act_order: columns are stored in another order than the input's; ragged: groups are not `bk` columns each.
    act: how the input is to be quantized, None for a weight-only scheme.
    input_multiplier: the input is first multiplied by one number a column. The layer does that, so kernels are asked
        about the spec without it.
    """

    n: int
    k: int
    weight: ScalarType
    block: tuple[int, int]
    block_offset: tuple[int, int] = (0, 0)
    scale_dtype: torch.dtype = torch.float32
    zero: Literal["none", "int", "float"] = "none"
    scale2_block: tuple[int, int] | None = None
    act_order: bool = False
    ragged: bool = False
    act: ActSpec | None = None
    act_dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    input_multiplier: bool = False

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise ValueError(f"a linear layer needs n >= 1 and k >= 1, got n={self.n} k={self.k}")
        # A cut that lies within one block has no block structure left along that dimension: one spelling for one fact.
        offset, block = list(self.block_offset), list(self.block)
        for dim, size in enumerate((self.n, self.k)):
            if block[dim] < 1 or not 0 <= offset[dim] < block[dim]:
                raise ValueError(f"scale block {self.block} with offset {self.block_offset} is not valid")
            if offset[dim] + size <= block[dim]:
                block[dim], offset[dim] = size, 0
        object.__setattr__(self, "block", tuple(block))
        object.__setattr__(self, "block_offset", tuple(offset))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the scale tensor of a regular (not ragged) weight."""
        return (
            -(-(self.n + self.block_offset[0]) // self.block[0]),
            -(-(self.k + self.block_offset[1]) // self.block[1]),
        )

    @property
    def group_size(self) -> int:
        """Columns per scale, -1 where one scale serves a whole row."""
        return -1 if self.block[1] == self.k else self.block[1]

    @property
    def scheme(self) -> str:
        """A short name in the field's words: `uint4b8 g128`, `float8_e4m3fn 128x128`, `int8 channel a:int8-…`."""
        bn, bk = self.block
        if (bn, bk) == (self.n, self.k):
            size = "tensor"
        elif bn == 1:
            size = "channel" if bk == self.k else f"g{bk}"
        else:
            size = f"{bn}x{bk}"
        extra = {"none": "", "int": "+zero", "float": "+offset"}[self.zero]
        order = (" act-order" if self.act_order else "") + (" input-scaled" if self.input_multiplier else "")
        return f"{self.weight.name}{extra} {size}{order}" + (f" a:{self.act}" if self.act else "")

    @property
    def weight_only(self) -> bool:
        """True where the input stays in 16 or 32 bits."""
        return self.act is None

    def codes_bytes(self) -> int:
        """Bytes of the packed codes: n rows of ceil(k * bits / 8)."""
        return self.n * ((self.k * self.weight.bits + 7) // 8)

    def scale_count(self) -> int:
        """Number of scales of a regular weight."""
        return self.grid[0] * self.grid[1]

    def weight_bytes(self) -> int:
        """Bytes of codes, scales, zeros and offsets: what one pass over the weight has to read."""
        scales = self.scale_count()
        size = self.codes_bytes() + scales * self.scale_dtype.itemsize
        size += {"none": 0, "int": (scales * self.weight.bits + 7) // 8, "float": scales * self.scale_dtype.itemsize}[self.zero]
        return size + (4 * self.k if self.act_order else 0)

    def replace(self, **changes: Any) -> LinearSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def key(self) -> str:
        """A text form that `LinearSpec.parse` reads back; it is what a compiled graph carries."""
        return ";".join(
            (
                f"{self.n}x{self.k}",
                self.weight.name,
                f"{self.block[0]}x{self.block[1]}+{self.block_offset[0]}+{self.block_offset[1]}",
                dtype_name(self.scale_dtype),
                self.zero,
                f"{self.scale2_block[0]}x{self.scale2_block[1]}" if self.scale2_block else "-",
                "act_order" if self.act_order else "-",
                "ragged" if self.ragged else "-",
                str(self.act or "-"),
                dtype_name(self.act_dtype),
                "bias" if self.bias else "-",
                *(("input_multiplier",) if self.input_multiplier else ()),
            )
        )

    @staticmethod
    @functools.cache
    def parse(key: str) -> LinearSpec:
        """The inverse of `key`."""
        shape, weight, block, scale, zero, scale2, order, ragged, act, dtype, bias, *more = key.split(";")
        n, k = map(int, shape.split("x"))
        size, off_n, off_k = block.split("+")
        bn, bk = map(int, size.split("x"))
        b2n, b2k = map(int, scale2.split("x")) if scale2 != "-" else (0, 0)
        kind: Any = zero
        return LinearSpec(
            n, k, SCALAR_TYPES[weight], (bn, bk), (int(off_n), int(off_k)), DTYPES[scale], kind,
            (b2n, b2k) if b2n else None, order != "-", ragged != "-",
            None if act == "-" else ActSpec.parse(act), DTYPES[dtype], bias != "-", bool(more),
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.key)  # a string keeps its hash; hashing thirteen fields takes longer than a kernel launch

    def __str__(self) -> str:
        return f"[{self.n}, {self.k}] {self.scheme}, input {dtype_name(self.act_dtype)}"


@dataclass(frozen=True)
class Verdict:
    """A kernel's answer to "can you?": true or false in a condition, unpackable and indexable as (ok, reason).

    `fix` says what would change a refusal: the nearest shape, dtype, package or machine that would do.
    """

    ok: bool
    reason: str = ""
    fix: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def __iter__(self) -> Iterator[Any]:
        yield self.ok
        yield self.reason

    def __getitem__(self, index: int) -> Any:
        return (self.ok, self.reason)[index]


YES = Verdict(True)


def no(reason: str, fix: str = "") -> Verdict:
    """A refusal with its reason and, where there is one, the nearest fix."""
    return Verdict(False, reason, fix)
