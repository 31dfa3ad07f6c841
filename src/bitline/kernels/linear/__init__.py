"""vLLM's kernel protocol under vLLM's names: configs, parameters, selection functions, and every kernel class by its name."""

from __future__ import annotations

from typing import Any

from bitline.kernels import registry
from bitline.kernels.providers.ark import get_ark_state
from bitline.protocol import zentorch as zentorch  # registers its adapter
from bitline.protocol.adapter import protocol_class_by_name
from bitline.protocol.autoround import INCARKLinearMethod, INCLayerConfig, INCXPULinearBase, INCXPULinearMethod
from bitline.protocol.choosing import (
    choose_linear_kernel,
    choose_mp_linear_kernel,
    choose_scaled_mm_linear_kernel,
    fp8_scaled_mm_is_batch_invariant,
    init_fp8_linear_kernel,
    init_int8_linear_kernel,
    init_linear_kernel,
    init_mxfp4_linear_kernel,
    init_mxfp6_linear_kernel,
    init_mxfp8_linear_kernel,
    init_nvfp4_linear_kernel,
    init_wfp8_a16_linear_kernel,
    is_supported_and_can_implement_kernel,
    register_linear_kernel,
)
from bitline.protocol.config import (
    FP8ScaledMMLinearLayerConfig,
    GroupShape,
    Int8ScaledMMLinearLayerConfig,
    MPLinearLayerConfig,
    MxFp4LinearLayerConfig,
    MxFp6LinearLayerConfig,
    Mxfp8LinearLayerConfig,
    NvFp4LinearLayerConfig,
    QuantKey,
    ScaleDesc,
    ScaledMMLinearLayerConfig,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp4Dynamic,
    kMxfp6E2M3Dynamic,
    kMxfp6E2M3Static,
    kMxfp6E3M2Dynamic,
    kMxfp6E3M2Static,
)
from bitline.protocol.layer_kernel import (
    Fp8BlockScaledDynamicMMLinearKernel,
    FP8ScaledMMLinearKernel,
    Int8ScaledMMLinearKernel,
    LinearKernel,
    MPLinearKernel,
    MxFp4LinearKernel,
    MxFp6LinearKernel,
    Mxfp8LinearKernel,
    NvFp4LinearKernel,
    ScaledMMLinearKernel,
)
from bitline.protocol.parameters import (
    BitlineParameter,
    BlockScaleParameter,
    ChannelScaleParameter,
    GroupScaleParameter,
    ModelWeightParameter,
    PackedParameter,
    PerTensorScaleParameter,
    RowParameter,
    permute_param_layout_,
)
from bitline.types import (
    ScalarType,
    float4_e2m1,
    float6_e2m3,
    float6_e3m2,
    float8_e4m3fn,
    float8_e5m2,
    int4,
    int8,
    uint2,
    uint2b2,
    uint3,
    uint3b4,
    uint4,
    uint4b8,
    uint5,
    uint5b16,
    uint6,
    uint6b32,
    uint7,
    uint7b64,
    uint8,
    uint8b128,
)  # fmt: skip

__all__ = [
    "BitlineParameter",
    "BlockScaleParameter",
    "ChannelScaleParameter",
    "FP8ScaledMMLinearKernel",
    "FP8ScaledMMLinearLayerConfig",
    "Fp8BlockScaledDynamicMMLinearKernel",
    "GroupScaleParameter",
    "GroupShape",
    "INCARKLinearMethod",
    "INCLayerConfig",
    "INCXPULinearBase",
    "INCXPULinearMethod",
    "Int8ScaledMMLinearKernel",
    "Int8ScaledMMLinearLayerConfig",
    "LinearKernel",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "ModelWeightParameter",
    "MxFp4LinearKernel",
    "MxFp4LinearLayerConfig",
    "MxFp6LinearKernel",
    "MxFp6LinearLayerConfig",
    "Mxfp8LinearKernel",
    "Mxfp8LinearLayerConfig",
    "NvFp4LinearKernel",
    "NvFp4LinearLayerConfig",
    "PackedParameter",
    "PerTensorScaleParameter",
    "QuantKey",
    "RowParameter",
    "ScalarType",
    "ScaleDesc",
    "ScaledMMLinearKernel",
    "ScaledMMLinearLayerConfig",
    "choose_linear_kernel",
    "choose_mp_linear_kernel",
    "choose_scaled_mm_linear_kernel",
    "float4_e2m1",
    "float6_e2m3",
    "float6_e3m2",
    "float8_e4m3fn",
    "float8_e5m2",
    "fp8_scaled_mm_is_batch_invariant",
    "get_ark_state",
    "init_fp8_linear_kernel",
    "init_int8_linear_kernel",
    "init_linear_kernel",
    "init_mxfp4_linear_kernel",
    "init_mxfp6_linear_kernel",
    "init_mxfp8_linear_kernel",
    "init_nvfp4_linear_kernel",
    "init_wfp8_a16_linear_kernel",
    "int4",
    "int8",
    "is_supported_and_can_implement_kernel",
    "kFp8Dynamic128Sym",
    "kFp8DynamicTensorSym",
    "kFp8DynamicTokenSym",
    "kFp8Static128BlockSym",
    "kFp8StaticChannelSym",
    "kFp8StaticTensorSym",
    "kMxfp4Dynamic",
    "kMxfp6E2M3Dynamic",
    "kMxfp6E2M3Static",
    "kMxfp6E3M2Dynamic",
    "kMxfp6E3M2Static",
    "permute_param_layout_",
    "register_linear_kernel",
    "uint2",
    "uint2b2",
    "uint3",
    "uint3b4",
    "uint4",
    "uint4b8",
    "uint5",
    "uint5b16",
    "uint6",
    "uint6b32",
    "uint7",
    "uint7b64",
    "uint8",
    "uint8b128",
]  # fmt: skip


# Names of vLLM that differ from ours in capitals alone.
_SPELLINGS = {"EmulationMxfp4LinearKernel": "EmulationMxFp4LinearKernel", "TorchMxFp8LinearKernel": "TorchMxfp8LinearKernel"}


def __getattr__(name: str) -> Any:
    name = _SPELLINGS.get(name, name)
    if any(entry.name == name for entry in registry.entries()):
        return protocol_class_by_name(name)
    raise AttributeError(f"module 'bitline.kernels.linear' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_SPELLINGS, *(entry.name for entry in registry.entries())]
