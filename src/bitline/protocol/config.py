"""What a layer of the field's kernel protocol says about itself, and its translation into a LinearSpec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bitline import types
from bitline.errors import InputError
from bitline.types import ActSpec, LinearSpec, ScalarType

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_NOMINAL = (4096, 4096)  # where a config names no shape: the layer's own is judged when its weights are processed


@dataclass(frozen=True)
class GroupShape:
    """Rows and columns of a tensor that share a scale; -1 is the whole extent.

    (-1, -1) per tensor, (1, -1) per token, (-1, 1) per channel, (1, g) per group, (128, 128) per block.
    """

    row: int
    col: int


PER_TENSOR, PER_TOKEN, PER_CHANNEL = GroupShape(-1, -1), GroupShape(1, -1), GroupShape(-1, 1)


@dataclass(frozen=True)
class ScaleDesc:
    """A level of scales: their dtype, whether they are known before the input is, and what shares one."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    """How a tensor is quantized: the codes' dtype, one or two levels of scales, with or without a zero point."""

    dtype: torch.dtype
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


@dataclass(frozen=True)
class MPLinearLayerConfig:
    """A layer of integer weights whose input keeps 16 bits, or is quantized to 8 where `act_type` says so.

    full_weight_shape, partition_weight_shape: (K, N) of the whole layer and of this rank's part. weight_type: a ScalarType.
    act_type: a torch dtype, int8 and float8_e4m3fn for an input quantized per token. group_size: -1 is one per row.
    zero_points: they come with the weight. has_g_idx: so does an order of columns. out_type: default `act_type`, where
    that is quantized bfloat16.
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
        """The spec of this rank's part, with scales in the output's dtype."""
        k, n = self.partition_weight_shape
        group = k if self.group_size == -1 else min(self.group_size, k)
        if group < 1:
            raise InputError("a group size is -1 or positive", found=self.group_size)
        weight = self.weight_type
        if weight is types.int4:  # stored as uint4 with 8 added, wherever it is packed
            weight = types.uint4b8
        act = {torch.int8: ActSpec(types.int8), torch.float8_e4m3fn: ActSpec(types.float8_e4m3fn)}.get(self.act_type)
        out = self.out_type or (self.act_type if act is None else torch.bfloat16)
        return LinearSpec(
            n, k, weight, (1, group), scale_dtype=_float(out), zero="int" if self.zero_points else "none",
            act_order=self.has_g_idx, act=act, act_dtype=_float(out),
        )  # fmt: skip


@dataclass(frozen=True)
class Int8ScaledMMLinearLayerConfig:
    """An int8 layer with an int8 input. The shape (N, K) and the dtypes are optional: elsewhere this config lacks them."""

    is_static_input_scheme: bool
    is_channelwise: bool
    input_symmetric: bool
    weight_shape: tuple[int, int] | None = None
    input_dtype: torch.dtype = torch.bfloat16

    def to_spec(self) -> LinearSpec:
        """Static inputs are quantized per tensor, dynamic ones per token."""
        n, k = self.weight_shape or _NOMINAL
        how: Any = "tensor" if self.is_static_input_scheme else "token"
        act = ActSpec(types.int8, not self.is_static_input_scheme, how, 0, self.input_symmetric)
        block = (1, k) if self.is_channelwise else (n, k)
        return LinearSpec(n, k, types.int8, block, act=act, act_dtype=_float(self.input_dtype))


@dataclass(frozen=True)
class FP8ScaledMMLinearLayerConfig:
    """An FP8 layer. weight_shape is (N, K); without an activation key it is weight-only."""

    weight_quant_key: QuantKey
    activation_quant_key: QuantKey | None
    weight_shape: tuple[int, int]
    input_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None

    def to_spec(self) -> LinearSpec:
        """Scales per tensor, channel, group or block; inputs static or dynamic per tensor, token or group."""
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
class _Micro:
    """The shape (N, K) is optional: elsewhere these configs lack it. use_a16: the input keeps 16 bits."""

    weight_shape: tuple[int, int] | None = None
    input_dtype: torch.dtype = torch.bfloat16
    use_a16: bool = False


class NvFp4LinearLayerConfig(_Micro):
    """Two E2M1 codes a byte, E4M3 scales of 16 columns, one global scale."""

    def to_spec(self) -> LinearSpec:
        """(1, 16) with a global scale; the input likewise, under its own static global scale."""
        n, k = self.weight_shape or _NOMINAL
        act = None if self.use_a16 else ActSpec(types.float4_e2m1, True, "group", 16, scale="e4m3")
        return LinearSpec(
            n, k, types.float4_e2m1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(n, k), act=act,
            act_dtype=_float(self.input_dtype),
        )  # fmt: skip


class MxFp4LinearLayerConfig(_Micro):
    """Two E2M1 codes a byte, E8M0 scales of 32 columns."""

    def to_spec(self) -> LinearSpec:
        """(1, 32); the input likewise."""
        return _mx(self, types.float4_e2m1)


class Mxfp8LinearLayerConfig(_Micro):
    """E4M3 codes, E8M0 scales of 32 columns."""

    def to_spec(self) -> LinearSpec:
        """(1, 32); the input likewise."""
        return _mx(self, types.float8_e4m3fn)


Config = (
    MPLinearLayerConfig | Int8ScaledMMLinearLayerConfig | FP8ScaledMMLinearLayerConfig | NvFp4LinearLayerConfig
    | MxFp4LinearLayerConfig | Mxfp8LinearLayerConfig
)  # fmt: skip


def family_of(config: Config) -> str:
    """ "mp", "int8", "fp8", "fp8_block", "nvfp4", "mxfp4" or "mxfp8"."""
    if isinstance(config, FP8ScaledMMLinearLayerConfig):
        shape = config.weight_quant_key.scale.group_shape
        return "fp8_block" if max(shape.row, shape.col) > 1 and shape.row != 1 else "fp8"
    names = {
        MPLinearLayerConfig: "mp", Int8ScaledMMLinearLayerConfig: "int8", NvFp4LinearLayerConfig: "nvfp4",
        MxFp4LinearLayerConfig: "mxfp4", Mxfp8LinearLayerConfig: "mxfp8",
    }  # fmt: skip
    return names[type(config)]


def _mx(config: MxFp4LinearLayerConfig | Mxfp8LinearLayerConfig, scalar: ScalarType) -> LinearSpec:
    n, k = config.weight_shape or _NOMINAL
    act = None if config.use_a16 else ActSpec(scalar, True, "group", 32, scale="e8m0")
    return LinearSpec(n, k, scalar, (1, 32), scale_dtype=torch.float8_e8m0fnu, act=act, act_dtype=_float(config.input_dtype))


def _act(key: QuantKey | None) -> ActSpec | None:
    if key is None:
        return None
    shape = key.scale.group_shape
    how: Any = {PER_TENSOR: "tensor", PER_TOKEN: "token"}.get(shape, "group")
    return ActSpec(_scalar(key.dtype), not key.scale.static, how, shape.col if how == "group" else 0, key.symmetric)


def _scalar(dtype: torch.dtype) -> ScalarType:
    name = types.dtype_name(dtype)
    if name not in types.SCALAR_TYPES:
        raise InputError("no weight or input of this dtype", found=dtype, expected="float8_e4m3fn, float8_e5m2 or int8")
    return types.SCALAR_TYPES[name]


def _pair(shape: GroupShape) -> tuple[int, int]:
    return shape.row, shape.col


def _float(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _FLOATS:
        raise InputError("a layer's output is a float", found=dtype, expected="float16, bfloat16 or float32")
    return dtype
