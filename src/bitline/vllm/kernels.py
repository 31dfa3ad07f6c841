"""The kernels road: vLLM's own quantization configs choose Bitline's kernels, which Bitline ranks.

vLLM takes the first kernel of a list that accepts a layer. Bitline has two classes in each list. The first accepts a layer that
one of Bitline's kernels really runs, so it goes before vLLM's kernels; the last also accepts one that Bitline only emulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import vllm.model_executor.kernels.linear as theirs
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic
from vllm.platforms import current_platform

from bitline.engines import packed_layer
from bitline.errors import BitlineError, InputError
from bitline.platform import Platform
from bitline.protocol import config as configs
from bitline.protocol.choosing import choose_linear_kernel
from bitline.protocol.layer_parameters import LayerParameters
from bitline.protocol.layer_reader import read_layer
from bitline.types import SCALAR_TYPES
from bitline.vllm.engine import VLLM
from bitline.vllm.methods import added_bias

# Kind of layer -> vLLM's list of its kernels, by platform. fp8_a16 has FP8 weights and 16-bit activations.
TABLES = {
    "mp": "_POSSIBLE_KERNELS", "int8": "_POSSIBLE_INT8_KERNELS", "fp8": "_POSSIBLE_FP8_KERNELS",
    "fp8_block": "_POSSIBLE_FP8_BLOCK_KERNELS", "fp8_a16": "_POSSIBLE_WFP8A16_KERNELS", "nvfp4": "_POSSIBLE_NVFP4_KERNELS",
    "mxfp4": "_POSSIBLE_MXFP4_KERNELS", "mxfp6": "_POSSIBLE_MXFP6_KERNELS", "mxfp8": "_POSSIBLE_MXFP8_KERNELS",
}  # fmt: skip
_BASES: dict[str, Any] = {
    "mp": theirs.MPLinearKernel, "int8": theirs.Int8ScaledMMLinearKernel, "fp8": theirs.FP8ScaledMMLinearKernel,
    "fp8_block": theirs.Fp8BlockScaledMMLinearKernel, "fp8_a16": theirs.FP8ScaledMMLinearKernel,
    "nvfp4": theirs.NvFp4LinearKernel, "mxfp4": theirs.MxFp4LinearKernel,
    "mxfp6": theirs.MxFp6LinearKernel, "mxfp8": theirs.Mxfp8LinearKernel,
}  # fmt: skip
_NAMES = {
    "mp": "WNA16", "int8": "Int8ScaledMM", "fp8": "Fp8ScaledMM", "fp8_block": "Fp8BlockScaledMM", "fp8_a16": "Fp8A16",
    "nvfp4": "NvFp4", "mxfp4": "MxFp4", "mxfp6": "MxFp6", "mxfp8": "Mxfp8",
}  # fmt: skip


def this_platform() -> Platform:
    """The platform that vLLM runs on."""
    return Platform.detect(current_platform.device_type)


def translate(config: Any, kind: str) -> configs.Config:
    """vLLM's config of a layer as Bitline's. An InputError where Bitline has no word for what it says.

    vLLM's configs of int8, NVFP4, MXFP4, MXFP6 and MXFP8 name no dtype: it is the default one while vLLM builds a model.
    """
    dtype = torch.get_default_dtype()
    match kind:
        case "mp":
            name = str(config.weight_type)
            if name not in SCALAR_TYPES:
                raise InputError("no weight type of this name", found=name, expected=", ".join(SCALAR_TYPES))
            return configs.MPLinearLayerConfig(
                config.full_weight_shape, config.partition_weight_shape, SCALAR_TYPES[name], config.act_type, config.group_size,
                config.zero_points, False, config.out_type,
            )  # fmt: skip
        case "int8":
            static, channelwise = config.is_static_input_scheme, config.is_channelwise
            return configs.Int8ScaledMMLinearLayerConfig(static, channelwise, config.input_symmetric, None, dtype)
        case "fp8" | "fp8_block" | "fp8_a16":
            weight = _key(config.weight_quant_key)
            assert weight is not None
            act = None if kind == "fp8_a16" else _key(config.activation_quant_key)
            shape = tuple(config.weight_shape)
            return configs.FP8ScaledMMLinearLayerConfig(weight, act, shape, config.input_dtype, config.out_dtype)
        case "nvfp4":
            return configs.NvFp4LinearLayerConfig(None, dtype)
        case "mxfp4":
            if config.activation_quant_key not in (None, kMxfp4Dynamic):
                raise InputError("activations of another type", found=config.activation_quant_key, expected="MXFP4 or 16 bits")
            weight_only = config.activation_quant_key is None or _is_weight_only_file()
            return configs.MxFp4LinearLayerConfig(None, dtype, use_a16=weight_only)
        case "mxfp6":
            weight = _key(config.weight_quant_key)
            assert weight is not None
            return configs.MxFp6LinearLayerConfig(weight, _key(config.activation_quant_key), None, dtype)
    if config.bmm_batch_size is not None:
        raise InputError("a batched matrix multiplication is no linear layer", found=f"{config.bmm_batch_size} matrices")
    return configs.Mxfp8LinearLayerConfig(tuple(config.weight_shape), dtype)


def _is_weight_only_file() -> bool:
    """Whether a compressed-tensors file quantizes no activations. In MXFP4 vLLM asks for quantized ones whatever it says."""
    config = get_current_vllm_config_or_none()
    schemes = getattr(None if config is None else config.quant_config, "target_scheme_map", None) or {}
    return bool(schemes) and all(scheme.get("input_activations") is None for scheme in schemes.values())


def _key(key: Any) -> configs.QuantKey | None:
    def level(scale: Any) -> configs.ScaleDesc | None:
        return None if scale is None else configs.ScaleDesc(scale.dtype, scale.static, configs.GroupShape(*scale.group_shape))

    if key is None:
        return None
    first = level(key.scale)
    assert first is not None
    return configs.QuantKey(key.dtype, first, level(key.scale2), key.symmetric)


class BitlineKernel:
    """vLLM's protocol over the kernel that Bitline chooses. A base of one class per kind of layer and per place in the list."""

    kind: ClassVar[str]
    emulates: ClassVar[bool] = False  # whether layers that Bitline only emulates are accepted
    config: Any
    ours: configs.Config
    names: dict[str, str]

    def __init__(self, config: Any, names: dict[str, str]) -> None:
        self.config, self.names = config, names
        self.ours = translate(config, self.kind)  # now, while vLLM builds the model

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Always: whether a layer can run is `can_implement`'s question."""
        return True, None

    @classmethod
    def get_min_capability(cls) -> int:
        """None."""
        return -1

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Whether one of Bitline's kernels runs the layer; the reasons of all where none does."""
        try:
            choice = choose_linear_kernel(translate(config, cls.kind), this_platform())
        except (ValueError, BitlineError) as error:
            return False, str(error)
        if choice.kernel.emulates and not cls.emulates:
            refused = "; ".join(f"{c.name}: {c.verdict.reason}" for c in choice.candidates if c.supported and not c.verdict)
            return False, f"Bitline would only emulate it, by {choice.best.name}. {refused}"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer's parameters, and release their memory."""
        weight = read_layer(layer, self.ours, self.names)
        name = getattr(layer, "prefix", "") or type(layer).__name__
        packed_layer.pack(
            layer, [weight], added_bias(layer), dtype=weight.spec.act_dtype, device=weight.device, name=name, engine=VLLM
        )
        for parameter in LayerParameters(layer, self.ours, self.names).all():
            data = getattr(layer, parameter)
            data.data = data.data.new_empty(0)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_options: Any) -> Tensor:
        """x [..., K] -> [..., N] in the config's output dtype."""
        y = packed_layer.run(layer, x, bias)
        out = getattr(self.config, "out_type", None) or getattr(self.config, "out_dtype", None)
        return y if out is None else y.to(out)

    def input_quant_key(self) -> Any:
        """None: x is quantized inside the kernel."""
        return None

    def _get_layer_params(self, layer: Any, **_options: Any) -> Any:
        raise NotImplementedError("Bitline's kernels read a layer's parameters once, when it is processed")

    apply_scaled_mm = apply_block_scaled_mm = _get_layer_params


class _MixedPrecision(BitlineKernel):
    def __init__(self, config: Any, w_q_param_name: str, w_s_param_name: str, w_zp_param_name: str | None = None) -> None:
        names = {"w_q": w_q_param_name, "w_s": w_s_param_name}
        super().__init__(config, names | ({"w_zp": w_zp_param_name} if config.zero_points and w_zp_param_name else {}))


class _Int8(BitlineKernel):
    def __init__(self, config: Any, layer_param_names: Sequence[str]) -> None:
        super().__init__(config, dict(zip(("w_q", "w_s", "i_s", "i_zp"), layer_param_names, strict=False)))


class _Fp8(BitlineKernel):
    def __init__(self, config: Any, layer_param_names: Sequence[str]) -> None:
        super().__init__(config, dict(zip(("w_q", "w_s", "i_s", "i_s_ub"), layer_param_names, strict=False)))


class _ByUsualNames(BitlineKernel):
    def __init__(self, config: Any) -> None:
        super().__init__(config, {})


_CONSTRUCTORS: dict[str, type[BitlineKernel]] = {"mp": _MixedPrecision, "int8": _Int8, "fp8": _Fp8, "fp8_a16": _Fp8}
_classes: dict[tuple[str, bool], type] = {}


def kernel_class(kind: str, emulates: bool) -> type:
    """The class of a kind of layer in vLLM's list: a subclass of BitlineKernel and of vLLM's base class."""
    if (kind, emulates) not in _classes:
        name = f"Bitline{_NAMES[kind]}{'Emulation' if emulates else ''}LinearKernel"
        members = {"kind": kind, "emulates": emulates, "__module__": __name__}
        base = _CONSTRUCTORS.get(kind, _ByUsualNames)
        _classes[kind, emulates] = type(name, (base, _BASES[kind]), members)
    return _classes[kind, emulates]


def register() -> None:
    """Put Bitline's classes first and last in vLLM's lists of this platform."""
    for kind, table in TABLES.items():
        kernels = getattr(theirs, table).setdefault(current_platform._enum, [])
        first, last = kernel_class(kind, False), kernel_class(kind, True)
        if first not in kernels:
            kernels.insert(0, first)
            kernels.append(last)
