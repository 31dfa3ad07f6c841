"""humming's JIT-compiled GEMMs on NVIDIA GPUs: weights of 2 to 8 bits with 16- and 8-bit activations.

Written against the wheel of version 0.1.19. Its codes are one little-endian bit stream per row, as canonical ones are; signed
integers are stored with half their range added. N and K are padded to multiples of 128, which all its tile sizes divide.
At small M and large K it splits K over thread blocks, which reduce 16-bit partial sums, with atomics where there are more than
three; outputs may differ from call to call, so these kernels do not declare themselves deterministic.
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
from bitline.kernels.triton.act_quant import quantize_groups_padded, quantize_padded
from bitline.platform import Platform
from bitline.types import YES, ActSpec, LinearSpec, Verdict, dtype_name, no
from bitline.weight import QuantizedWeight

_TILE, _BLOCK, _NUM_LOCKS = 128, 128, 2048
_FLOATS = {"float8_e4m3fn": "float8e4m3", "float6_e2m3": "float6e2m3", "float6_e3m2": "float6e3m2", "float4_e2m1": "float4e2m1"}
_ONE_BYTE_SCALES = {torch.float8_e4m3fn: "float8e4m3", torch.float8_e8m0fnu: "float8e8m0"}


@dataclass(frozen=True)
class HummingScheme:
    """A layer as humming describes it; weight, scale and act are its names of dtypes.

    kind: "tensor", "channel", "group" or "block" scales. group: columns per scale, 0 for per-channel and per-tensor scales.
    zero: integer zero points. scale2: a global scale. act: the activation codes' dtype, "" for 16-bit activations.
    """

    weight: str
    scale: str
    kind: str
    group: int = 0
    zero: bool = False
    scale2: bool = False
    act: str = ""

    def padded(self, spec: LinearSpec) -> tuple[int, int]:
        """N and K padded to whole tiles and groups."""
        columns = max(_TILE, self.group)  # both powers of two
        return -(-spec.n // _TILE) * _TILE, -(-spec.k // columns) * columns


def _weight_scheme(spec: LinearSpec, act: str, min_group: int) -> HummingScheme | Verdict:
    """humming's description of the weight, or why it has none. min_group: the fewest columns that a scale may have."""
    kind, rows, columns = spec.weight, *spec.block
    symmetric = (
        spec.zero == "none" and kind.kind == "int" and kind.bits >= 2 and (kind.signed or kind.bias == 1 << (kind.bits - 1))
    )
    with_zero = spec.zero == "int" and not kind.signed and not kind.bias and kind.bits >= 2
    if not (symmetric or with_zero or (spec.zero == "none" and kind.name in _FLOATS)):
        return no(f"{kind} with zero {spec.zero!r}", "integers of 2 to 8 bits, symmetric or with zero points, FP8, FP6 or FP4")
    if spec.ragged or spec.block_offset[1]:
        return no("groups of unequal size, or an unaligned first group", "groups of equal size that start at column 0")
    if spec.scale2_block not in (None, (spec.n, spec.k)):
        return no("several second-level scales", "one global scale, or none")
    name = _FLOATS.get(kind.name, f"uint{kind.bits}")
    per_channel, one_byte = columns >= spec.k, spec.scale_dtype in _ONE_BYTE_SCALES
    if spec.block == (spec.n, spec.k) and spec.scale_dtype == torch.float32 and not with_zero and spec.scale2_block is None:
        return HummingScheme(name, "float32", "tensor", act=act)
    if (not per_channel or one_byte) and (columns < min_group or columns & (columns - 1)):
        return no(f"groups of {columns} columns", f"groups of a power of two, at least {min_group}, or one scale per channel")
    if one_byte:
        if rows != 1 or with_zero or (spec.scale2_block and spec.scale_dtype == torch.float8_e8m0fnu):
            return no(f"{spec.scale_dtype} scales of {rows} rows, or with zero points", "symmetric block scales of one row")
        if spec.scale_dtype == torch.float8_e8m0fnu and spec.act_dtype == torch.float16:
            return no("E8M0 scales have a wider range than float16", "with input dtype bfloat16")
        scale = _ONE_BYTE_SCALES[spec.scale_dtype]
        return HummingScheme(name, scale, "group", columns, scale2=spec.scale2_block is not None, act=act)
    if spec.scale_dtype != spec.act_dtype or spec.scale2_block is not None:
        return no(f"scales are {dtype_name(spec.scale_dtype)} and would be rounded",
                  f"scales in the input's dtype, {dtype_name(spec.act_dtype)}")  # fmt: skip
    group = 0 if per_channel else columns
    return HummingScheme(name, dtype_name(spec.act_dtype), "group" if group else "channel", group, with_zero, act=act)


@functools.lru_cache(maxsize=4096)
def _layer_config(scheme: HummingScheme, spec: LinearSpec, device: torch.device) -> Any:
    """humming's layer config, which its kernels are compiled for."""
    schema, transform = (importlib.import_module(f"humming.{name}") for name in ("schema", "transform"))
    n, k = scheme.padded(spec)
    block = scheme.kind == "block"
    weight = schema.HummingWeightSchema(
        b_dtype=scheme.weight, bs_dtype=scheme.scale, weight_scale_group_size=scheme.group, weight_scale_type=scheme.kind,
        weight_scale_group_size_n=_BLOCK if block else 0, weight_scale_2_type="tensor" if scheme.scale2 else None,
        has_zero_point=scheme.zero,
    )  # fmt: skip
    inputs = None
    if scheme.act:
        inputs = schema.HummingInputSchema(
            a_dtype=scheme.act, input_scale_group_size=_BLOCK if block else 0,
            input_quant_mode="dynamic_group" if block else "dynamic_token",
        )  # fmt: skip
    return transform.prepare_layer_config(n, k, weight, inputs, torch_dtype=spec.act_dtype, device=device)


class _HummingKernel(Kernel):
    """Base of the humming kernels; subclasses say by `humming_scheme` which layers they take."""

    platforms = ("cuda",)
    backend = "humming"
    deterministic = False
    measured = ("sm90",)
    act_dtypes = (torch.bfloat16, torch.float16)
    min_capability: ClassVar[int] = 75

    @classmethod
    def humming_scheme(cls, spec: LinearSpec) -> HummingScheme | Verdict:
        """The layer as humming describes it, or the refusal."""
        raise NotImplementedError

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An NVIDIA GPU with the MMA instructions, and the package. It compiles with NVRTC or nvcc when a weight is packed."""
        if platform.capability < cls.min_capability:
            return no(f"humming's kernels of this kind are for sm{cls.min_capability} and later; this is {platform.arch}",
                      f"cuda:sm{cls.min_capability}")  # fmt: skip
        return installed(platform, "humming")

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """See `humming_scheme`."""
        found = cls.humming_scheme(spec)
        return found if isinstance(found, Verdict) else YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """weight int32, scale, zero and scale2, as humming transforms them; locks int32 [2048], zero between calls; perm int32
        [K]; input_scale [1]. Absent ones are empty. An InputError for E4M3 codes of NaN, which humming reads as 480."""
        spec, scheme = weight.spec, cls.humming_scheme(weight.spec)
        assert isinstance(scheme, HummingScheme), "can_implement refuses these layers"
        config = _layer_config(scheme, spec, weight.device)
        tensors = importlib.import_module("humming.transform").transform_humming_tensors(config, _tensors(weight, scheme))
        absent = torch.empty(0, device=weight.device)
        static = weight.input_scale
        return {
            "weight": tensors["weight"],
            "scale": tensors["weight_scale"],
            "zero": tensors.get("zero_point", absent),
            "scale2": tensors.get("weight_scale_2", absent),
            "locks": torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=weight.device),
            "perm": absent.int() if weight.perm is None else weight.perm.clone(),
            "input_scale": absent if static is None else static.reshape(1).float(),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        weight, scale, zero, scale2, locks, perm, static = packed
        scheme = cls.humming_scheme(spec)
        assert isinstance(scheme, HummingScheme), "can_implement refuses these layers"
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        x = x.index_select(1, perm) if perm.numel() else x
        columns = scheme.padded(spec)[1] - spec.k
        inputs, input_scale = cls._quantize_inputs(pad(x, (0, columns)) if columns else x, spec, static)
        y: Tensor = importlib.import_module("humming.forward").humming_forward(
            _layer_config(scheme, spec, x.device), inputs=inputs, weight=weight, weight_scale=scale,
            zero_point=zero if zero.numel() else None, weight_scale_2=scale2 if scale2.numel() else None,
            input_scale=input_scale, locks=locks,
        )  # fmt: skip
        y = y[:, : spec.n]
        return y.contiguous() if bias is None else y + bias

    @classmethod
    def _quantize_inputs(cls, x: Tensor, spec: LinearSpec, static: Tensor) -> tuple[Tensor, Tensor | None]:
        """Activation codes and their scales; x itself and None for 16-bit activations."""
        return x, None


class HummingLinearKernel(_HummingKernel):
    """Weight-only GEMM: integers of 2 to 8 bits, E4M3, FP6 and FP4 with 16-bit activations."""

    families = ("mp", "fp8", "nvfp4", "mxfp4", "mxfp8")

    @classmethod
    def humming_scheme(cls, spec: LinearSpec) -> HummingScheme | Verdict:
        """Weight-only; groups of a power of two from 16, per-channel or per-tensor scales."""
        if spec.act is not None:
            return no(f"the scheme quantizes activations ({spec.act}); this kernel is weight-only", "a weight-only scheme")
        return _weight_scheme(spec, "", 16)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline and 2.5 us per call: within 20 % of times measured on an H200 (W4A16, MXFP4 and NVFP4; 4096x4096 to
        8192x28672; M from 1 to 4096). Groups of less than 64 columns reach a smaller fraction of the bandwidth."""
        rates, small_groups = platform.rates, 0 < spec.block[1] < min(64, spec.k)
        size = spec.weight_bytes() + 2 * m * (spec.n + spec.k)
        compute = 2.0 * m * spec.n * spec.k / ((0.55 if m <= 128 else 0.86) * rates.bf16)
        return max(size / ((0.6 if small_groups else 0.85) * rates.bandwidth), compute) + rates.launch + 2.5e-6


class _HummingA8Kernel(_HummingKernel):
    """Base for 8-bit activations, which are quantized here as `bitline.act_quant` defines it."""

    quantizes_input = True
    act_type: ClassVar[str]  # Bitline's name of the activation codes' type
    mma_efficiency: ClassVar[float] = 0.4  # measured fraction of peak

    @classmethod
    def _rate(cls, platform: Platform) -> float:
        return platform.rates.of("int8" if cls.act_type == "int8" else "fp8")

    @classmethod
    def _takes_activations(cls, act: ActSpec | None) -> Verdict:
        if act is None or act.dtype.name != cls.act_type or act.granularity == "group" or not act.symmetric:
            return no(f"activation scheme {act or 'none'}", f"symmetric {cls.act_type} activations per tensor or token")
        return YES

    @classmethod
    def _quantize_inputs(cls, x: Tensor, spec: LinearSpec, static: Tensor) -> tuple[Tensor, Tensor | None]:
        assert spec.act is not None
        m = x.shape[0]
        codes, scale, _zero = quantize_padded(x, spec.act, m + -m % 4, x.shape[1], static)  # humming reads four scales at a time
        scale = scale if scale.numel() > 1 else scale.expand(codes.shape[0]).contiguous()
        return codes[:m], scale[:m].view(m, 1)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A pass over x and a roofline: within 20 % of times measured on an H200 for 28672x4096, M from 1 to 4096."""
        rates = platform.rates
        passes = 3 * m * spec.k / rates.bandwidth + rates.launch
        size = spec.weight_bytes() + m * (2 * spec.n + spec.k)
        compute = 2.0 * m * spec.n * spec.k / (cls.mma_efficiency * cls._rate(platform))
        return passes + max(size / (0.85 * rates.bandwidth), compute) + rates.launch + 2.5e-6


class HummingInt8ScaledMMLinearKernel(_HummingA8Kernel):
    """W8A8 and W4A8, and every other weight width up to 8 bits, with int8 activations."""

    families = ("int8", "mp")
    act_type = "int8"

    @classmethod
    def humming_scheme(cls, spec: LinearSpec) -> HummingScheme | Verdict:
        """Symmetric integers; per-channel scales, or for less than 8 bits groups of a power of two from 32."""
        taken = cls._takes_activations(spec.act)
        if not taken or spec.zero != "none" or spec.weight.kind != "int" or spec.scale_dtype in _ONE_BYTE_SCALES:
            return taken and no(f"{spec.weight} with zero {spec.zero!r}, {spec.scale_dtype} scales", "symmetric integers")
        if spec.weight.bits == 8 and spec.block[1] < spec.k:
            return no("8-bit weights in groups", "one scale per channel, or for the whole weight")
        return _weight_scheme(spec, "int8", 32)


class HummingFP8ScaledMMLinearKernel(_HummingA8Kernel):
    """FP8 weights with FP8 activations, scales per tensor, channel or 128x128 block; 2- to 4-bit integers with FP8 (W4AFP8)."""

    families = ("fp8", "fp8_block", "mp")
    act_type = "float8_e4m3fn"
    min_capability = 89

    @classmethod
    def humming_scheme(cls, spec: LinearSpec) -> HummingScheme | Verdict:
        """E4M3 with per-channel or per-tensor scales, or float32 scales of 128x128 blocks; symmetric 2- to 4-bit integers."""
        act, kind, (rows, columns) = spec.act, spec.weight, spec.block
        blocks = rows in (_BLOCK, spec.n) and columns in (_BLOCK, spec.k) and max(rows, columns) <= _BLOCK
        if act is not None and act.granularity == "group" and blocks:
            return cls._block_scheme(spec, act)
        taken = cls._takes_activations(act)
        small = kind.kind == "int" and kind.bits <= 4 and spec.zero == "none"
        if not taken or spec.scale_dtype in _ONE_BYTE_SCALES or not (small or kind.name == "float8_e4m3fn"):
            return taken and no(f"{kind} with {spec.scale_dtype} scales", "float8_e4m3fn, or symmetric integers of 2 to 4 bits")
        if not small and spec.block[1] < spec.k:
            return no(f"scale block {rows}x{columns}", "one scale per channel, for the whole weight, or per 128x128 block")
        return _weight_scheme(spec, "float8e4m3", 32)

    @classmethod
    def _block_scheme(cls, spec: LinearSpec, act: ActSpec) -> HummingScheme | Verdict:
        """128x128 weight blocks with activations in groups of 128."""
        standard = act.dtype.name == cls.act_type and act.group_size == _BLOCK and act.scale == "float" and act.symmetric
        if not standard or not act.dynamic or spec.weight.name != "float8_e4m3fn" or spec.scale_dtype != torch.float32:
            return no(f"activation scheme {act}, {spec.weight} with {spec.scale_dtype} scales", "block FP8 with float32 scales")
        if any(spec.block_offset) or spec.ragged or spec.act_order or spec.scale2_block is not None:
            return no("unaligned blocks, or act-order", "blocks that start at row and column 0")
        return HummingScheme("float8e4m3", "float32", "block", _BLOCK, act="float8e4m3")

    @classmethod
    def _quantize_inputs(cls, x: Tensor, spec: LinearSpec, static: Tensor) -> tuple[Tensor, Tensor | None]:
        if spec.act is None or spec.act.granularity != "group":
            return super()._quantize_inputs(x, spec, static)
        return quantize_groups_padded(x, spec.act, *x.shape)


def _tensors(weight: QuantizedWeight, scheme: HummingScheme) -> dict[str, Tensor]:
    """The weight as `HummingWeightSchema.get_tensors_attrs` asks for it: weight int32 [N', K' bits / 32], weight_scale
    [N', groups], [1] or [N' / 128, K' / 128], zero_point int32 [N' bits / 32, groups] packed along N, weight_scale_2 float32 [1].
    """
    spec, width = weight.spec, weight.spec.weight.bits
    n, k = scheme.padded(spec)
    tensors = {"weight": _padded_codes(weight, scheme, n, k)}
    row = (torch.arange(spec.n, device=weight.device) + spec.block_offset[0]) // spec.block[0]
    groups = k // (scheme.group or k)
    expand = lambda t: pad(t.index_select(0, row), (0, groups - t.shape[1], 0, n - spec.n))
    if scheme.kind == "tensor":
        tensors["weight_scale"] = weight.scale.reshape(1).float()
    elif scheme.kind == "block":
        missing = (0, groups - weight.scale.shape[1], 0, n // _BLOCK - weight.scale.shape[0])
        tensors["weight_scale"] = pad(weight.scale, missing)
    elif scheme.scale in _ONE_BYTE_SCALES.values():
        tensors["weight_scale"] = expand(weight.scale.view(torch.uint8)).view(weight.scale.dtype)
    else:
        tensors["weight_scale"] = expand(weight.scale)
    if scheme.zero and weight.zero is not None:
        zeros = expand(weight.zero).t().clone(memory_format=torch.contiguous_format)  # contiguous strides also with one group
        tensors["zero_point"] = bitstream.pack(zeros, width).view(torch.int32).t().contiguous()
    if scheme.scale2 and weight.scale2 is not None:
        tensors["weight_scale_2"] = weight.scale2.reshape(1).float()
    return tensors


def _padded_codes(weight: QuantizedWeight, scheme: HummingScheme, n: int, k: int) -> Tensor:
    """int32 [n, k bits / 32]: the codes as one bit stream per row, signed ones with half their range added."""
    spec, width, codes = weight.spec, weight.spec.weight.bits, weight.codes
    if scheme.weight == "float8e4m3" and any(bool(((c & 0x7F) == 0x7F).any()) for c in codes[:, : spec.k].split(4096)):
        raise InputError("the weight holds codes of NaN, which humming reads as numbers", tensor="weight",
                         fix="another kernel, or bitline's own choice")  # fmt: skip
    if spec.weight.signed:
        codes = codes ^ sum(1 << i for i in range(width - 1, 8, width))
    return pad(codes, (0, k * width // 8 - codes.shape[1], 0, n - spec.n)).contiguous().view(torch.int32)
