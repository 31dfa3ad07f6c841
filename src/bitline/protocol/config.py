"""The layer configs of vLLM's kernel protocol, and their translation to LinearSpec.

Names and fields are vLLM's (vllm/model_executor/kernels/linear), so that a serving engine's code constructs them unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bitline import types
from bitline.errors import InputError
from bitline.types import ActSpec, LinearSpec, ScalarType

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_PLACEHOLDER_SHAPE = (4096, 4096)  # (N, K) of a config without a shape; the layer's own is checked when its weights are processed


@dataclass(frozen=True)
class GroupShape:
    """Rows and columns of a tensor that share a scale, -1 for the whole extent.

    (-1, -1) is per tensor, (1, -1) per token, (-1, 1) per channel, (1, g) per group, (128, 128) per block.

    Attributes:
        row: Rows per scale.
        col: Columns per scale.
    """

    row: int
    col: int


PER_TENSOR, PER_TOKEN, PER_CHANNEL = GroupShape(-1, -1), GroupShape(1, -1), GroupShape(-1, 1)


@dataclass(frozen=True)
class ScaleDesc:
    """One level of scales of a quantized tensor.

    Attributes:
        dtype: dtype of the scales.
        static: Whether they are known before run time.
        group_shape: Rows and columns that share one.
    """

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    """The quantization of a weight or activation tensor.

    Attributes:
        dtype: dtype of the codes; a ScalarType where torch has none.
        scale: The scales.
        scale2: The second level of scales, for example NVFP4's global scale.
        symmetric: False where there is a zero point.
    """

    dtype: torch.dtype | ScalarType
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


def _fp8(static: bool, shape: GroupShape) -> QuantKey:
    return QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, static, shape))


kFp8StaticTensorSym = _fp8(True, PER_TENSOR)
kFp8StaticChannelSym = _fp8(True, PER_CHANNEL)
kFp8Static128BlockSym = _fp8(True, GroupShape(128, 128))
kFp8DynamicTensorSym = _fp8(False, PER_TENSOR)
kFp8DynamicTokenSym = _fp8(False, PER_TOKEN)
kFp8Dynamic128Sym = _fp8(False, GroupShape(1, 128))


def _mxfp6(dtype: ScalarType, static: bool) -> QuantKey:
    return QuantKey(dtype, ScaleDesc(torch.uint8, static, GroupShape(1, 32)))


kMxfp6E2M3Static, kMxfp6E2M3Dynamic = _mxfp6(types.float6_e2m3, True), _mxfp6(types.float6_e2m3, False)
kMxfp6E3M2Static, kMxfp6E3M2Dynamic = _mxfp6(types.float6_e3m2, True), _mxfp6(types.float6_e3m2, False)
kMxfp4Dynamic = QuantKey(torch.uint8, ScaleDesc(torch.uint8, False, GroupShape(1, 32)))


@dataclass(frozen=True)
class MPLinearLayerConfig:
    """Mixed-precision layer: integer weights with 16-bit activations, or W4A8.

    Attributes:
        full_weight_shape: (K, N) of the whole layer.
        partition_weight_shape: (K, N) of this rank's shard.
        weight_type: Type of the codes.
        act_type: dtype of the activations; int8 and float8_e4m3fn mean dynamic per-token quantization.
        group_size: Columns per scale, -1 for one scale per row.
        zero_points: Whether the weight has stored zero points.
        has_g_idx: Whether the weight has act-order.
        out_type: Output dtype; `act_type` by default, bfloat16 where that is quantized.
    """

    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: ScalarType
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    has_g_idx: bool
    out_type: torch.dtype | None = None

    def to_spec(self) -> LinearSpec:
        """The spec of this rank's shard, with scales in the output dtype."""
        k, n = self.partition_weight_shape
        group = k if self.group_size == -1 else min(self.group_size, k)
        if group < 1:
            raise InputError("group_size must be -1 or positive", found=self.group_size)
        weight = self.weight_type
        if weight is types.int4:  # packed as uint4 with 8 added
            weight = types.uint4b8
        act = {torch.int8: ActSpec(types.int8), torch.float8_e4m3fn: ActSpec(types.float8_e4m3fn)}.get(self.act_type)
        out = self.out_type or (self.act_type if act is None else torch.bfloat16)
        return LinearSpec(
            n, k, weight, (1, group), scale_dtype=_float(out), zero="int" if self.zero_points else "none",
            act_order=self.has_g_idx, act=act, act_dtype=_float(out),
        )  # fmt: skip


@dataclass(frozen=True)
class Int8ScaledMMLinearLayerConfig:
    """W8A8 int8 layer.

    Attributes:
        is_static_input_scheme: Static per-tensor activation scales; if not, dynamic per-token ones.
        is_channelwise: One weight scale per channel; if not, per tensor.
        input_symmetric: False where activations have a zero point.
        weight_shape: (N, K). Optional, and not in vLLM's class; without it shape checks wait for the weights.
        input_dtype: dtype of the layer's input before quantization. Not in vLLM's class.
    """

    is_static_input_scheme: bool
    is_channelwise: bool
    input_symmetric: bool
    weight_shape: tuple[int, int] | None = None
    input_dtype: torch.dtype = torch.bfloat16

    def to_spec(self) -> LinearSpec:
        """The spec of the layer; scales are float32."""
        n, k = self.weight_shape or _PLACEHOLDER_SHAPE
        granularity: Any = "tensor" if self.is_static_input_scheme else "token"
        act = ActSpec(types.int8, not self.is_static_input_scheme, granularity, 0, self.input_symmetric)
        block = (1, k) if self.is_channelwise else (n, k)
        return LinearSpec(n, k, types.int8, block, act=act, act_dtype=_float(self.input_dtype))


@dataclass(frozen=True)
class FP8ScaledMMLinearLayerConfig:
    """FP8 layer with scales per tensor, channel, group or block.

    Attributes:
        weight_quant_key: Quantization of the weight.
        activation_quant_key: Quantization of the activations; None for a weight-only layer.
        weight_shape: (N, K).
        input_dtype: dtype of the layer's input before quantization.
        out_dtype: Output dtype; `input_dtype` by default.
    """

    weight_quant_key: QuantKey
    activation_quant_key: QuantKey | None
    weight_shape: tuple[int, int]
    input_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None

    def to_spec(self) -> LinearSpec:
        """The spec of the layer."""
        (n, k), shape = self.weight_shape, self.weight_quant_key.scale.group_shape
        block = (
            (1, k)
            if shape == PER_CHANNEL
            else tuple(size if size > 0 else full for size, full in zip(_pair(shape), (n, k), strict=True))
        )
        scale = self.weight_quant_key.scale.dtype
        return LinearSpec(
            n, k, _scalar(self.weight_quant_key.dtype), (min(block[0], n), min(block[1], k)), scale_dtype=scale,
            act=_act(self.activation_quant_key), act_dtype=_float(self.input_dtype),
        )  # fmt: skip


@dataclass(frozen=True)
class _BlockScaledConfig:
    """Fields of the MX and NVFP4 configs.

    Attributes:
        weight_shape: (N, K). Optional, and not in vLLM's classes; without it shape checks wait for the weights.
        input_dtype: dtype of the layer's input before quantization.
        use_a16: Weight-only: activations stay in 16 bits.
    """

    weight_shape: tuple[int, int] | None = None
    input_dtype: torch.dtype = torch.bfloat16
    use_a16: bool = False


class NvFp4LinearLayerConfig(_BlockScaledConfig):
    """NVFP4 layer: E2M1 codes, two per byte, E4M3 scales of 16 columns, one global scale. Fields: see MxFp4LinearLayerConfig."""

    def to_spec(self) -> LinearSpec:
        """The spec of the layer. Activations are quantized alike, under a static global scale of their own."""
        n, k = self.weight_shape or _PLACEHOLDER_SHAPE
        act = None if self.use_a16 else ActSpec(types.float4_e2m1, True, "group", 16, scale="e4m3")
        return LinearSpec(
            n, k, types.float4_e2m1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(n, k), act=act,
            act_dtype=_float(self.input_dtype),
        )  # fmt: skip


class MxFp4LinearLayerConfig(_BlockScaledConfig):
    """MXFP4 layer: E2M1 codes, two per byte, E8M0 scales of 32 columns.

    Attributes:
        weight_shape: (N, K). Optional, and not in vLLM's class; without it shape checks wait for the weights.
        input_dtype: dtype of the layer's input before quantization. Not in vLLM's class.
        use_a16: Weight-only: activations stay in 16 bits.
    """

    def to_spec(self) -> LinearSpec:
        """The spec of the layer. Activations are quantized alike."""
        return _mx(self, types.float4_e2m1)


class Mxfp8LinearLayerConfig(_BlockScaledConfig):
    """MXFP8 layer: E4M3 codes, E8M0 scales of 32 columns. Fields: see MxFp4LinearLayerConfig."""

    def to_spec(self) -> LinearSpec:
        """The spec of the layer. Activations are quantized alike."""
        return _mx(self, types.float8_e4m3fn)


@dataclass(frozen=True)
class MxFp6LinearLayerConfig:
    """MXFP6 layer: E2M3 or E3M2 codes, four in three bytes, E8M0 scales of 32 columns.

    Attributes:
        weight_quant_key: `kMxfp6E2M3Static` or `kMxfp6E3M2Static`.
        activation_quant_key: `kMxfp6E2M3Dynamic`, `kMxfp6E3M2Dynamic` or `kMxfp4Dynamic`; None for a weight-only layer.
        weight_shape: (N, K). Optional, and not in vLLM's class; without it shape checks wait for the weights.
        input_dtype: dtype of the layer's input before quantization. Not in vLLM's class.
    """

    weight_quant_key: QuantKey
    activation_quant_key: QuantKey | None = None
    weight_shape: tuple[int, int] | None = None
    input_dtype: torch.dtype = torch.bfloat16

    def to_spec(self) -> LinearSpec:
        """The spec of the layer."""
        n, k = self.weight_shape or _PLACEHOLDER_SHAPE
        weight, act = _mx_scalar(self.weight_quant_key), self.activation_quant_key
        if weight.bits != 6:
            raise InputError("an MXFP6 layer has weights of 6 bits", found=weight.name, expected="float6_e2m3 or float6_e3m2")
        return LinearSpec(
            n, k, weight, (1, 32), scale_dtype=torch.float8_e8m0fnu, act_dtype=_float(self.input_dtype),
            act=None if act is None else ActSpec(_mx_scalar(act), True, "group", 32, scale="e8m0"),
        )  # fmt: skip


Config = (
    MPLinearLayerConfig | Int8ScaledMMLinearLayerConfig | FP8ScaledMMLinearLayerConfig | NvFp4LinearLayerConfig
    | MxFp4LinearLayerConfig | MxFp6LinearLayerConfig | Mxfp8LinearLayerConfig
)  # fmt: skip
ScaledMMLinearLayerConfig = Int8ScaledMMLinearLayerConfig | FP8ScaledMMLinearLayerConfig


def family_of(config: Config) -> str:
    """The kernel family of a config: "mp", "int8", "fp8", "fp8_block", "nvfp4", "mxfp4", "mxfp6" or "mxfp8"."""
    if isinstance(config, FP8ScaledMMLinearLayerConfig):
        shape = config.weight_quant_key.scale.group_shape
        return "fp8_block" if max(shape.row, shape.col) > 1 and shape.row != 1 else "fp8"
    names = {
        MPLinearLayerConfig: "mp", Int8ScaledMMLinearLayerConfig: "int8", NvFp4LinearLayerConfig: "nvfp4",
        MxFp4LinearLayerConfig: "mxfp4", MxFp6LinearLayerConfig: "mxfp6", Mxfp8LinearLayerConfig: "mxfp8",
    }  # fmt: skip
    return names[type(config)]


def _mx(config: MxFp4LinearLayerConfig | Mxfp8LinearLayerConfig, scalar: ScalarType) -> LinearSpec:
    n, k = config.weight_shape or _PLACEHOLDER_SHAPE
    act = None if config.use_a16 else ActSpec(scalar, True, "group", 32, scale="e8m0")
    return LinearSpec(n, k, scalar, (1, 32), scale_dtype=torch.float8_e8m0fnu, act=act, act_dtype=_float(config.input_dtype))


def _mx_scalar(key: QuantKey) -> ScalarType:
    """The element type of an MX key: a ScalarType of ours or vLLM's (float6_e2m3f), or uint8 for E2M1 pairs."""
    name = "float4_e2m1" if key.dtype == torch.uint8 else str(getattr(key.dtype, "name", key.dtype)).removesuffix("f")
    if name not in types.SCALAR_TYPES:
        raise InputError("no MX element type of this name", found=key.dtype, expected="float6_e2m3, float6_e3m2 or float4_e2m1")
    return types.SCALAR_TYPES[name]


def _act(key: QuantKey | None) -> ActSpec | None:
    if key is None:
        return None
    shape = key.scale.group_shape
    granularity: Any = {PER_TENSOR: "tensor", PER_TOKEN: "token"}.get(shape, "group")
    group_size = shape.col if granularity == "group" else 0
    return ActSpec(_scalar(key.dtype), not key.scale.static, granularity, group_size, key.symmetric)


def _scalar(dtype: torch.dtype | ScalarType) -> ScalarType:
    if isinstance(dtype, ScalarType):
        return dtype
    name = types.dtype_name(dtype)
    if name not in types.SCALAR_TYPES:
        raise InputError("no weight or activation type of this dtype", found=dtype, expected="float8_e4m3fn, float8_e5m2 or int8")
    return types.SCALAR_TYPES[name]


def _pair(shape: GroupShape) -> tuple[int, int]:
    return shape.row, shape.col


def _float(dtype: torch.dtype) -> torch.dtype:
    """The dtype, if it is one of a layer's output."""
    if dtype not in _FLOATS:
        raise InputError("a layer's output is a float", found=dtype, expected="float16, bfloat16 or float32")
    return dtype
