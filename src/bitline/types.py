"""Value types of the whole library: scalar types, activation schemes, layer specs and verdicts. They hold no tensors."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

ScalarKind = Literal["int", "float", "table"]


@dataclass(frozen=True)
class ScalarType:
    """An element type of weights, activations or scales: how a code of `bits` bits maps to a number.

    The names follow vLLM's `scalar_type` (`uint4b8`, `float8_e4m3fn`). Floats follow OCP FP8 and OCP MX 1.0.

    Attributes:
        name: The type's name, unique in `SCALAR_TYPES`.
        bits: Width of one code in bits, 1 to 8.
        kind: "int", an integer; "float", a minifloat; "table", a codebook (NF4, GGUF's IQ types).
        bias: Of an unsigned integer, the implicit zero point that is subtracted from the code (8 for `uint4b8`). Of a float, the
            exponent bias where it is not the IEEE one, else 0.
        signed: Whether an integer is in two's complement.
        exponent: Exponent bits of a float.
        mantissa: Mantissa bits of a float, without the implicit one.
        table: The codebook, one value for each of the 2**bits codes.
    """

    name: str
    bits: int
    kind: ScalarKind = "int"
    bias: int = 0
    signed: bool = False
    exponent: int = 0
    mantissa: int = 0
    table: tuple[float, ...] = ()

    @property
    def size_bits(self) -> int:
        """`bits`, by vLLM's name."""
        return self.bits

    def has_bias(self) -> bool:
        """Whether the type has an implicit zero point, as `uint4b8` and `uint8b128` have."""
        return self.bias != 0

    @functools.cache  # noqa: B019  (ScalarTypes are few and live as long as the process)
    def values(self) -> tuple[float, ...]:
        """The value of each of the 2**bits codes, in code order."""
        if self.kind == "table":
            return self.table
        if self.kind == "int":
            return tuple(float(self._int_value(code)) for code in range(1 << self.bits))
        return tuple(_minifloat_value(self, code) for code in range(1 << self.bits))

    def _int_value(self, code: int) -> int:
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


def _minifloat_value(t: ScalarType, code: int) -> float:
    """The value of a minifloat code by OCP FP8 and OCP MX 1.0, with subnormals and each type's own NaN and infinity codes."""
    sign = -1.0 if code >> (t.exponent + t.mantissa) else 1.0  # an unsigned float has no bit above the exponent
    exponent = (code >> t.mantissa) & ((1 << t.exponent) - 1)
    mantissa = code & ((1 << t.mantissa) - 1)
    max_exponent = (1 << t.exponent) - 1
    if t.name in ("float8_e4m3fn", "ufloat8_e5m3") and exponent == max_exponent and mantissa == (1 << t.mantissa) - 1:
        return math.nan
    if t.name == "float8_e5m2" and exponent == max_exponent:
        return math.nan if mantissa else sign * math.inf
    if t.name == "float8_e4m3fnuz" and code == 0x80:
        return math.nan
    exponent_bias = t.bias or (1 << (t.exponent - 1)) - 1
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - exponent_bias - t.mantissa)
    return sign * (1 + mantissa * 2.0**-t.mantissa) * 2.0 ** (exponent - exponent_bias)


uint1, uint2, uint3, uint4, uint5, uint6, uint7, uint8 = (ScalarType(f"uint{b}", b) for b in range(1, 9))
uint1b1, uint2b2, uint3b4, uint4b8, uint5b16, uint6b32, uint7b64, uint8b128 = (
    ScalarType(f"uint{b}b{1 << (b - 1)}", b, bias=1 << (b - 1)) for b in range(1, 9)
)
int4, int8 = (ScalarType(f"int{b}", b, signed=True) for b in (4, 8))
float8_e4m3fn = ScalarType("float8_e4m3fn", 8, "float", exponent=4, mantissa=3)
float8_e5m2 = ScalarType("float8_e5m2", 8, "float", exponent=5, mantissa=2)
float8_e4m3fnuz = ScalarType("float8_e4m3fnuz", 8, "float", bias=8, exponent=4, mantissa=3)
ufloat8_e5m3 = ScalarType("ufloat8_e5m3", 8, "float", exponent=5, mantissa=3)  # a scale dtype: unsigned
float6_e2m3 = ScalarType("float6_e2m3", 6, "float", exponent=2, mantissa=3)
float6_e3m2 = ScalarType("float6_e3m2", 6, "float", exponent=3, mantissa=2)
float4_e2m1 = ScalarType("float4_e2m1", 4, "float", exponent=2, mantissa=1)
# bitsandbytes' NF4 and FP4 codebooks; each value is exact in float32.
nf4 = ScalarType("nf4", 4, "table", table=(
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
))  # fmt: skip
fp4_bnb = ScalarType("fp4_bnb", 4, "table", table=(
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
    0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
))  # fmt: skip
# ggml's ternary types (TQ1_0, TQ2_0): -1, 0 and 1; the fourth code of two bits is unused.
uint2b1 = ScalarType("uint2b1", 2, bias=1)
# ggml's codebooks (gguf's quants.py). The IQ types that look up whole vectors are stored per weight: a magnitude of the
# vector grid, with the sign in the top bit. Grid values are divided by the factor that their scales lack, so that every scale
# is an integer times the super-block scale d.
iq4_nl = ScalarType("iq4_nl", 4, "table", table=(
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
))  # fmt: skip
iq3_xxs = ScalarType("iq3_xxs", 4, "table", table=(
    1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.5,
))  # fmt: skip
iq3_s = ScalarType("iq3_s", 4, "table", table=(
    1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0,
))  # fmt: skip
# The zeros of the next two pad the codebook; no file has their codes.
iq2 = ScalarType("iq2", 3, "table", table=(1.0, 3.125, 5.375, 0.0, -1.0, -3.125, -5.375, 0.0))
iq1_m = ScalarType("iq1_m", 3, "table", table=(-0.875, 0.125, 1.125, 0.0, -1.125, -0.125, 0.875, 0.0))
binary = ScalarType("binary", 1, "table", table=(-1.0, 1.0))

SCALAR_TYPES: dict[str, ScalarType] = {t.name: t for t in list(globals().values()) if isinstance(t, ScalarType)}


def unsigned(bits: int, *, symmetric: bool) -> ScalarType:
    """The unsigned type of a width: with an implicit zero point (`uint4b8`) if symmetric, else with stored ones (`uint4`)."""
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
    """The activation quantization that a checkpoint asks for, applied to the layer's input before the GEMM.

    `bitline.act_quant` is its reference implementation.

    Attributes:
        dtype: Element type of the quantized activations (`int8`, `float8_e4m3fn`, `float4_e2m1`, …).
        dynamic: True where scales are computed from the input at run time, False where the checkpoint has a static
            `input_scale`.
        granularity: What shares a scale: "tensor", the whole input [M, K]; "token", one row; "group", `group_size` consecutive
            columns of a row.
        group_size: Columns per scale of granularity "group", else 0.
        symmetric: False where an int8 activation has a zero point.
        scale: Scale format: "float" (float32), "e8m0" (MX), "e4m3" (NVFP4, under a static global scale) or "e5m3".
        limit: Upper bound of the absolute maximum from which a dynamic scale is computed (vLLM's `input_scale_ub`); larger
            activations saturate. 0 for none.
        text: The text form, which `parse` reads; made once, so that torch.compile need not trace how.
    """

    dtype: ScalarType
    dynamic: bool = True
    granularity: Literal["tensor", "token", "group"] = "token"
    group_size: int = 0
    symmetric: bool = True
    scale: Literal["float", "e8m0", "e4m3", "e5m3"] = "float"
    limit: float = 0.0
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        granularity = f"group{self.group_size}" if self.granularity == "group" else self.granularity
        words = [self.dtype.name, "dynamic" if self.dynamic else "static", granularity]
        words += ([] if self.symmetric else ["asym"]) + ([] if self.scale == "float" else [self.scale])
        object.__setattr__(self, "text", "-".join(words + ([f"limit{self.limit!r}"] if self.limit else [])))

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def parse(text: str) -> ActSpec:
        """Parse the text form, which is `str` of an ActSpec.

        Args:
            text: For example "int8-dynamic-token" or "float4_e2m1-dynamic-group16-e4m3".
        """
        text, _, limit = text.partition("-limit")
        name, mode, granularity_text, *flags = text.split("-")
        group_size = int(granularity_text.removeprefix("group")) if granularity_text.startswith("group") else 0
        scale: Any = next((f for f in flags if f in ("e8m0", "e4m3", "e5m3")), "float")
        granularity: Any = "group" if group_size else granularity_text
        return ActSpec(
            SCALAR_TYPES[name], mode == "dynamic", granularity, group_size, "asym" not in flags, scale, float(limit or 0)
        )


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer's shape and quantization scheme, without tensors: all that kernel selection looks at.

    With the scale block (bn, bk) and columns in stored order, W [N, K] is:

        W[n, k] = scale2 * scale[(n + block_offset[0]) // bn, (k + block_offset[1]) // bk] * (code[n, k] - zero) (+ offset)

    Attributes:
        n: out_features N of this weight, which may be a tensor-parallel shard.
        k: in_features K of this weight.
        weight: Element type of the codes.
        block: Shape (bn, bk) of the scale block. (N, K) is per tensor, (1, K) per channel, (1, g) grouped, (128, 128) block
            FP8. A block that exceeds the weight is stored clipped to it.
        block_offset: Rows and columns of the first scale block that lie on another tensor-parallel rank.
        scale_dtype: dtype of the scales, as the checkpoint stores them.
        zero: "none"; "int", zero points in code units; "float", an offset in the weight's units that is added after scaling.
        scale2_block: Block shape of the second level of scales: (N, K) for NVFP4's global scale, (1, 256) for GGUF's super-block
            scales. None where there is one level.
        act_order: Whether the columns are stored permuted (GPTQ's act-order, `g_idx`).
        ragged: Whether groups have unequal sizes, as act-order shards can have; a per-column group index then replaces `bk`.
        act: Activation quantization; None for a weight-only scheme.
        act_dtype: dtype of the layer's input and output.
        bias: Whether the layer has a bias.
        input_multiplier: Whether the input is multiplied by one factor per column first (AWQ's pre-quantization scale). The layer
            does that itself, so kernels are asked about the spec without it.

    Raises:
        ValueError: For n or k below 1, or a block_offset that does not lie in the block.
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
        # A shard that lies inside one scale block has one scale along that dimension. The block is clipped to the shard and the
        # offset dropped, so that equal layers have equal specs.
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
        """Shape of the scale tensor: scale blocks along N and K. A ragged weight's K extent is that of its tensor instead."""
        return (
            -(-(self.n + self.block_offset[0]) // self.block[0]),
            -(-(self.k + self.block_offset[1]) // self.block[1]),
        )

    @property
    def group_size(self) -> int:
        """Columns per scale, -1 where one scale serves a whole row: the group size of checkpoint configs and vLLM."""
        return -1 if self.block[1] == self.k else self.block[1]

    @property
    def scheme(self) -> str:
        """A short name of the quantization scheme: `uint4b8 g128`, `float8_e4m3fn 128x128`, `int8 channel a:int8-…`."""
        bn, bk = self.block
        if (bn, bk) == (self.n, self.k):
            granularity = "tensor"
        elif bn == 1:
            granularity = "channel" if bk == self.k else f"g{bk}"
        else:
            granularity = f"{bn}x{bk}"
        zero = {"none": "", "int": "+zero", "float": "+offset"}[self.zero]
        flags = (" act-order" if self.act_order else "") + (" input-scaled" if self.input_multiplier else "")
        return f"{self.weight.name}{zero} {granularity}{flags}" + (f" a:{self.act}" if self.act else "")

    @property
    def weight_only(self) -> bool:
        """True where activations are not quantized (W4A16 and its like)."""
        return self.act is None

    def codes_bytes(self) -> int:
        """Bytes of the packed codes, N rows of ceil(K * bits / 8)."""
        return self.n * ((self.k * self.weight.bits + 7) // 8)

    def scale_count(self) -> int:
        """Number of scales of a weight that is not ragged."""
        return self.grid[0] * self.grid[1]

    def weight_bytes(self) -> int:
        """Bytes of codes, scales, zero points, offsets and permutation: the memory traffic of one pass over the weight."""
        scales = self.scale_count()
        size = self.codes_bytes() + scales * self.scale_dtype.itemsize
        size += {"none": 0, "int": (scales * self.weight.bits + 7) // 8, "float": scales * self.scale_dtype.itemsize}[self.zero]
        return size + (4 * self.k if self.act_order else 0)

    def replace(self, **changes: Any) -> LinearSpec:
        """A copy with some fields changed.

        Args:
            **changes: New values by field name.

        Raises:
            ValueError: As the constructor.
        """
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def key(self) -> str:
        """The text form that `LinearSpec.parse` reads back. Operators take it as an argument, so compiled graphs carry it."""
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
        """Parse the text form.

        Args:
            key: What `key` gave.
        """
        shape, weight, block, scale_dtype, zero_text, scale2, order, ragged, act, act_dtype, bias, *multiplier = key.split(";")
        n, k = map(int, shape.split("x"))
        size, offset_n, offset_k = block.split("+")
        bn, bk = map(int, size.split("x"))
        scale2_bn, scale2_bk = map(int, scale2.split("x")) if scale2 != "-" else (0, 0)
        zero: Any = zero_text
        return LinearSpec(
            n, k, SCALAR_TYPES[weight], (bn, bk), (int(offset_n), int(offset_k)), DTYPES[scale_dtype], zero,
            (scale2_bn, scale2_bk) if scale2_bn else None, order != "-", ragged != "-",
            None if act == "-" else ActSpec.parse(act), DTYPES[act_dtype], bias != "-", bool(multiplier),
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.key)  # str caches its hash; hashing the fields on every call takes longer than a kernel launch

    def __str__(self) -> str:
        return f"[{self.n}, {self.k}] {self.scheme}, input {dtype_name(self.act_dtype)}"


@dataclass(frozen=True)
class Verdict:
    """A kernel's answer to `is_supported` or `can_implement`.

    It is true or false in a condition, and unpacks and indexes as vLLM's tuple (ok, reason).

    Attributes:
        ok: Whether the kernel runs on the platform, or implements the layer.
        reason: Why it does not; "" where it does.
        fix: The nearest change that would make it accept: a shape, dtype, package or machine. "" where there is none.
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
    """A refusing Verdict with its reason and, where there is one, the nearest fix."""
    return Verdict(False, reason, fix)
