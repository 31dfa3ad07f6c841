"""humming's compiled-on-demand products on NVIDIA GPUs: weights of 2 to 8 bits with inputs of 16 and of 8 bits.

Facts are those of the wheel of version 0.1.19. Codes are one little-endian bit stream a row, as canonical ones; a signed integer
is stored plus half its range. N and K are padded to multiples of 128, of which every tile of its heuristics is a part. Few rows
of a long K are split over blocks that add 16-bit partial sums, by atomics where there are more than three: outputs may
differ from call to call, so that these kernels do not declare themselves deterministic.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline import bitstream
from bitline.errors import InputError
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.providers.common import installed
from bitline.kernels.triton.act_quant import groups_of, rows_of
from bitline.platform import Platform
from bitline.types import YES, ActSpec, LinearSpec, Verdict, dtype_name, no
from bitline.weight import QuantizedWeight

_TILE, _BLOCK, _LOCKS = 128, 128, 2048
_FLOATS = {"float8_e4m3fn": "float8e4m3", "float6_e2m3": "float6e2m3", "float6_e3m2": "float6e3m2", "float4_e2m1": "float4e2m1"}
_ONE_BYTE = {torch.float8_e4m3fn: "float8e4m3", torch.float8_e8m0fnu: "float8e8m0"}


@dataclass(frozen=True)
class Form:
    """A layer in humming's words. group: columns of a scale, 0 for one a row. kind: tensor, channel, group or block."""

    weight: str
    scale: str
    kind: str
    group: int = 0
    zero: bool = False
    scale2: bool = False
    act: str = ""

    def padded(self, spec: LinearSpec) -> tuple[int, int]:
        """N and K in whole tiles and groups."""
        columns = max(_TILE, self.group)  # both powers of two
        return -(-spec.n // _TILE) * _TILE, -(-spec.k // columns) * columns


def _form(spec: LinearSpec, act: str, least: int) -> Form | Verdict:
    """How humming would have the weight, or why it would not. least: columns that a group has at least."""
    kind, rows, columns = spec.weight, *spec.block
    symmetric = (
        spec.zero == "none" and kind.kind == "int" and kind.bits >= 2 and (kind.signed or kind.bias == 1 << (kind.bits - 1))
    )
    with_zero = spec.zero == "int" and not kind.signed and not kind.bias and kind.bits >= 2
    if not (symmetric or with_zero or (spec.zero == "none" and kind.name in _FLOATS)):
        return no(f"{kind} with zero {spec.zero!r}", "integers of 2 to 8 bits, symmetric or with zero points, FP8, FP6 or FP4")
    if spec.ragged or spec.block_offset[1]:
        return no("groups of unequal size, or cut inside", "groups that start at column 0 and are equally long")
    if spec.scale2_block not in (None, (spec.n, spec.k)):
        return no("several second scales", "one scale of the whole weight, or none")
    name = _FLOATS.get(kind.name, f"uint{kind.bits}")
    whole, single = columns >= spec.k, spec.scale_dtype in _ONE_BYTE
    if spec.block == (spec.n, spec.k) and spec.scale_dtype == torch.float32 and not with_zero and spec.scale2_block is None:
        return Form(name, "float32", "tensor", act=act)
    if (not whole or single) and (columns < least or columns & (columns - 1)):
        return no(f"groups of {columns} columns", f"groups of a power of two from {least}, or one scale a row")
    if single:
        if rows != 1 or with_zero or (spec.scale2_block and spec.scale_dtype == torch.float8_e8m0fnu):
            return no(f"{spec.scale_dtype} scales of {rows} rows, or with zero points", "a scale for columns of one row")
        if spec.scale_dtype == torch.float8_e8m0fnu and spec.act_dtype == torch.float16:
            return no("E8M0 scales have a wider range than float16", "with input dtype bfloat16")
        return Form(name, _ONE_BYTE[spec.scale_dtype], "group", columns, scale2=spec.scale2_block is not None, act=act)
    if spec.scale_dtype != spec.act_dtype or spec.scale2_block is not None:
        return no(f"scales are {dtype_name(spec.scale_dtype)} and would be rounded",
                  f"scales in the input's dtype, {dtype_name(spec.act_dtype)}")  # fmt: skip
    group = 0 if whole else columns
    return Form(name, dtype_name(spec.act_dtype), "group" if group else "channel", group, with_zero, act=act)


@functools.lru_cache(maxsize=4096)
def _config(form: Form, spec: LinearSpec, device: torch.device) -> Any:
    """humming's description of a layer: what its kernels are compiled for."""
    schema, transform = (importlib.import_module(f"humming.{name}") for name in ("schema", "transform"))
    n, k = form.padded(spec)
    block = form.kind == "block"
    weight = schema.HummingWeightSchema(
        b_dtype=form.weight, bs_dtype=form.scale, weight_scale_group_size=form.group, weight_scale_type=form.kind,
        weight_scale_group_size_n=_BLOCK if block else 0, weight_scale_2_type="tensor" if form.scale2 else None,
        has_zero_point=form.zero,
    )  # fmt: skip
    inputs = None
    if form.act:
        inputs = schema.HummingInputSchema(
            a_dtype=form.act, input_scale_group_size=_BLOCK if block else 0,
            input_quant_mode="dynamic_group" if block else "dynamic_token",
        )  # fmt: skip
    return transform.prepare_layer_config(n, k, weight, inputs, torch_dtype=spec.act_dtype, device=device)


class _Humming(Kernel):
    """What the three have in common. A base: subclasses say by `form` what they take."""

    platforms = ("cuda",)
    backend = "humming"
    deterministic = False
    measured = ("sm90",)
    act_dtypes = (torch.bfloat16, torch.float16)
    least_capability: ClassVar[int] = 75

    @classmethod
    def form(cls, spec: LinearSpec) -> Form | Verdict:
        """The layer in humming's words, or the refusal."""
        raise NotImplementedError

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An NVIDIA GPU that has the units, and the package. It compiles with NVRTC, or nvcc, when a weight is packed."""
        if platform.capability < cls.least_capability:
            return no(f"humming's kernels of this kind are for sm{cls.least_capability} and later; this is {platform.arch}",
                      f"cuda:sm{cls.least_capability}")  # fmt: skip
        return installed(platform, "humming")

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """See `form`."""
        found = cls.form(spec)
        return found if isinstance(found, Verdict) else YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """As humming transforms them: weight int32, scale, zero, scale2; locks int32 [2048], zero between calls; perm int32 [K];
        input_scale [1]. Absent ones are empty. An InputError for E4M3's code of NaN, which humming reads as 480."""
        spec, form = weight.spec, cls.form(weight.spec)
        assert isinstance(form, Form), "can_implement refuses these layers"
        config = _config(form, spec, weight.device)
        tensors = importlib.import_module("humming.transform").transform_humming_tensors(config, _tensors(weight, form))
        absent = torch.empty(0, device=weight.device)
        static = weight.input_scale
        return {
            "weight": tensors["weight"],
            "scale": tensors["weight_scale"],
            "zero": tensors.get("zero_point", absent),
            "scale2": tensors.get("weight_scale_2", absent),
            "locks": torch.zeros(_LOCKS, dtype=torch.int32, device=weight.device),
            "perm": absent.int() if weight.perm is None else weight.perm.clone(),
            "input_scale": absent if static is None else static.reshape(1).float(),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        weight, scale, zero, scale2, locks, perm, static = packed
        form = cls.form(spec)
        assert isinstance(form, Form), "can_implement refuses these layers"
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        x = x.index_select(1, perm) if perm.numel() else x
        columns = form.padded(spec)[1] - spec.k
        inputs, input_scale = cls._inputs(pad(x, (0, columns)) if columns else x, spec, static)
        y: Tensor = importlib.import_module("humming.forward").humming_forward(
            _config(form, spec, x.device), inputs=inputs, weight=weight, weight_scale=scale,
            zero_point=zero if zero.numel() else None, weight_scale_2=scale2 if scale2.numel() else None,
            input_scale=input_scale, locks=locks,
        )  # fmt: skip
        y = y[:, : spec.n]
        return y.contiguous() if bias is None else y + bias

    @classmethod
    def _inputs(cls, x: Tensor, spec: LinearSpec, static: Tensor) -> tuple[Tensor, Tensor | None]:
        """The input's codes and scales; x itself where it keeps 16 bits."""
        return x, None


class HummingLinearKernel(_Humming):
    """Integers of 2 to 8 bits, E4M3, FP6 and FP4 with 16-bit inputs."""

    families = ("mp", "fp8", "nvfp4", "mxfp4", "mxfp8")

    @classmethod
    def form(cls, spec: LinearSpec) -> Form | Verdict:
        """Weight-only; groups of a power of two from 16, a scale a row or one for all."""
        if spec.act is not None:
            return no(f"the input is to be quantized ({spec.act}); this kernel is weight-only", "a weight-only scheme")
        return _form(spec, "", 16)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Shares of the rates and a call of 2.5 us more than nothing: within 20 % of what was measured on an H200
        (W4A16, MXFP4 and NVFP4; 4096x4096 to 8192x28672; 1 to 4096 rows). Fine groups cost bandwidth."""
        rates, fine = platform.rates, 0 < spec.block[1] < min(64, spec.k)
        size = spec.weight_bytes() + 2 * m * (spec.n + spec.k)
        compute = 2.0 * m * spec.n * spec.k / ((0.55 if m <= 128 else 0.86) * rates.bf16)
        return max(size / ((0.6 if fine else 0.85) * rates.bandwidth), compute) + rates.launch + 2.5e-6


class _Quantized(_Humming):
    """Inputs of 8 bits, quantized here, by the definition of `bitline.act_quant`."""

    quantizes_input = True
    codes: ClassVar[str]  # of the input, Bitline's name
    share: ClassVar[float] = 0.4  # of the rate of products, measured

    @classmethod
    def _rate(cls, platform: Platform) -> float:
        return platform.rates.of("int8" if cls.codes == "int8" else "fp8")

    @classmethod
    def _takes(cls, act: ActSpec | None) -> Verdict:
        if act is None or act.dtype.name != cls.codes or act.granularity == "group" or not act.symmetric:
            return no(f"input scheme {act or 'of 16 bits'}", f"symmetric {cls.codes} inputs per tensor or token")
        return YES

    @classmethod
    def _inputs(cls, x: Tensor, spec: LinearSpec, static: Tensor) -> tuple[Tensor, Tensor | None]:
        assert spec.act is not None
        rows = x.shape[0]
        codes, scale, _zero = rows_of(x, spec.act, rows + -rows % 4, x.shape[1], static)  # four scales are read at a time
        scale = scale if scale.numel() > 1 else scale.expand(codes.shape[0]).contiguous()
        return codes[:rows], scale[:rows].view(rows, 1)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A pass over x, and shares of the rates: within 20 % of what was measured on an H200 for 28672x4096, 1 to 4096 rows."""
        rates = platform.rates
        passes = 3 * m * spec.k / rates.bandwidth + rates.launch
        size = spec.weight_bytes() + m * (2 * spec.n + spec.k)
        compute = 2.0 * m * spec.n * spec.k / (cls.share * cls._rate(platform))
        return passes + max(size / (0.85 * rates.bandwidth), compute) + rates.launch + 2.5e-6


class HummingInt8ScaledMMLinearKernel(_Quantized):
    """W8A8 and W4A8, and every other width up to 8 bits, times int8 inputs."""

    families = ("int8", "mp")
    codes = "int8"

    @classmethod
    def form(cls, spec: LinearSpec) -> Form | Verdict:
        """Symmetric integers; a scale a row, or in groups of a power of two from 32 below 8 bits."""
        taken = cls._takes(spec.act)
        if not taken or spec.zero != "none" or spec.weight.kind != "int" or spec.scale_dtype in _ONE_BYTE:
            return taken and no(f"{spec.weight} with zero {spec.zero!r}, {spec.scale_dtype} scales", "symmetric integers")
        if spec.weight.bits == 8 and spec.block[1] < spec.k:
            return no("8-bit weights in groups", "one scale a row, or for the whole weight")
        return _form(spec, "int8", 32)


class HummingFP8ScaledMMLinearKernel(_Quantized):
    """FP8 weights times FP8 inputs, scales per tensor, row or 128x128 block; and 4-bit integers times FP8 inputs (W4AFP8)."""

    families = ("fp8", "fp8_block", "mp")
    codes = "float8_e4m3fn"
    least_capability = 89

    @classmethod
    def form(cls, spec: LinearSpec) -> Form | Verdict:
        """E4M3 with a scale a row, one for all, or 128x128 blocks in float32; symmetric 2- to 4-bit integers."""
        act, kind, (rows, columns) = spec.act, spec.weight, spec.block
        blocks = rows in (_BLOCK, spec.n) and columns in (_BLOCK, spec.k) and max(rows, columns) <= _BLOCK
        if act is not None and act.granularity == "group" and blocks:
            plain = act.dtype.name == cls.codes and act.group_size == _BLOCK and act.scale == "float" and act.symmetric
            if not plain or not act.dynamic or kind.name != "float8_e4m3fn" or spec.scale_dtype != torch.float32:
                return no(f"input scheme {act}, {kind} with {spec.scale_dtype} scales", "block FP8 with float32 scales")
            if any(spec.block_offset) or spec.ragged or spec.act_order or spec.scale2_block is not None:
                return no("blocks cut inside, or columns in another order", "blocks that start at row and column 0")
            return Form("float8e4m3", "float32", "block", _BLOCK, act="float8e4m3")
        taken = cls._takes(act)
        small = kind.kind == "int" and kind.bits <= 4 and spec.zero == "none"
        if not taken or spec.scale_dtype in _ONE_BYTE or not (small or kind.name == "float8_e4m3fn"):
            return taken and no(f"{kind} with {spec.scale_dtype} scales", "float8_e4m3fn, or symmetric integers of 2 to 4 bits")
        if not small and spec.block[1] < spec.k:
            return no(f"a scale for {rows}x{columns} weights", "one scale a row, for the whole weight, or 128x128")
        return _form(spec, "float8e4m3", 32)

    @classmethod
    def _inputs(cls, x: Tensor, spec: LinearSpec, static: Tensor) -> tuple[Tensor, Tensor | None]:
        if spec.act is None or spec.act.granularity != "group":
            return super()._inputs(x, spec, static)
        return groups_of(x, spec.act, *x.shape)


def _tensors(weight: QuantizedWeight, form: Form) -> dict[str, Tensor]:
    """A weight as `HummingWeightSchema.get_tensors_attrs` asks: weight int32 [N', K' bits / 32], weight_scale [N', G], [1] or
    [N' / 128, K' / 128], zero_point int32 [N' bits / 32, G], packed along N, weight_scale_2 float32 [1]."""
    spec, width = weight.spec, weight.spec.weight.bits
    n, k = form.padded(spec)
    codes = weight.codes
    if form.weight == "float8e4m3" and any(bool(((c & 0x7F) == 0x7F).any()) for c in codes[:, : spec.k].split(4096)):
        raise InputError("the weight holds codes of NaN, which humming reads as numbers", tensor="weight",
                         fix="another kernel, or bitline's own choice")  # fmt: skip
    if spec.weight.signed:
        codes = codes ^ sum(1 << i for i in range(width - 1, 8, width))
    codes = pad(codes, (0, k * width // 8 - codes.shape[1], 0, n - spec.n))
    found = {"weight": codes.contiguous().view(torch.int32)}
    row = (torch.arange(spec.n, device=weight.device) + spec.block_offset[0]) // spec.block[0]
    groups = k // (form.group or k)
    fill = lambda t: pad(t.index_select(0, row), (0, groups - t.shape[1], 0, n - spec.n))
    if form.kind == "tensor":
        found["weight_scale"] = weight.scale.reshape(1).float()
    elif form.kind == "block":
        found["weight_scale"] = pad(weight.scale, (0, groups - weight.scale.shape[1], 0, n // _BLOCK - weight.scale.shape[0]))
    elif form.scale in _ONE_BYTE.values():
        found["weight_scale"] = fill(weight.scale.view(torch.uint8)).view(weight.scale.dtype)
    else:
        found["weight_scale"] = fill(weight.scale)
    if form.zero and weight.zero is not None:
        rows_of_zeros = fill(weight.zero).t().clone(memory_format=torch.contiguous_format)  # strides too, with one group
        found["zero_point"] = bitstream.pack(rows_of_zeros, width).view(torch.int32).t().contiguous()
    if form.scale2 and weight.scale2 is not None:
        found["weight_scale_2"] = weight.scale2.reshape(1).float()
    return found
