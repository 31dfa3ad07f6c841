"""Foreign kernels: third-party classes written for vLLM's protocol alone, as kernels that `choose` ranks and QuantLinear runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitline import bitstream
from bitline.kernels import registry
from bitline.kernels.base import Kernel, Packed, matmul_rate, roofline
from bitline.platform import Platform
from bitline.protocol import config as configs
from bitline.protocol.layer_kernel import LinearKernel
from bitline.protocol.parameters import (
    BlockScaleParameter,
    ChannelScaleParameter,
    GroupScaleParameter,
    ModelWeightParameter,
    PackedParameter,
    PerTensorScaleParameter,
    RowParameter,
)
from bitline.types import YES, ActSpec, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight


def config_of(spec: LinearSpec, family: str) -> configs.Config | None:
    """The layer config of a spec; None where the family's config cannot express the spec."""
    if spec.block_offset != (0, 0) or spec.ragged or spec.zero == "float" or spec.input_multiplier:
        return None
    config = _make_config(spec, family)
    if config is None or configs.family_of(config) != family:
        return None
    try:
        round_trip = config.to_spec()
    except ValueError:
        return None
    return config if round_trip == spec.replace(scale_dtype=round_trip.scale_dtype, bias=False) else None


def _make_config(spec: LinearSpec, family: str) -> configs.Config | None:
    shape = (spec.n, spec.k)
    if family == "mp":
        return configs.MPLinearLayerConfig(
            (spec.k, spec.n), (spec.k, spec.n), spec.weight, spec.act_dtype, spec.group_size, spec.zero == "int", spec.act_order
        )
    if family == "int8" and spec.act is not None:
        return configs.Int8ScaledMMLinearLayerConfig(
            not spec.act.dynamic, spec.block[0] == 1, spec.act.symmetric, shape, spec.act_dtype
        )
    if family in ("fp8", "fp8_block"):
        return configs.FP8ScaledMMLinearLayerConfig(_weight_key(spec), _act_key(spec.act), shape, spec.act_dtype)
    if family == "mxfp6":
        act = None if spec.act is None else configs.QuantKey(spec.act.dtype, configs.kMxfp6E2M3Dynamic.scale)
        return configs.MxFp6LinearLayerConfig(
            configs.QuantKey(spec.weight, configs.kMxfp6E2M3Static.scale), act, shape, spec.act_dtype
        )
    block_scaled: Any = {
        "nvfp4": configs.NvFp4LinearLayerConfig, "mxfp4": configs.MxFp4LinearLayerConfig, "mxfp8": configs.Mxfp8LinearLayerConfig,
    }  # fmt: skip
    return block_scaled[family](shape, spec.act_dtype, spec.act is None) if family in block_scaled else None


def _weight_key(spec: LinearSpec) -> configs.QuantKey:
    rows = -1 if spec.block[0] == spec.n else spec.block[0]
    columns = -1 if spec.block[1] == spec.k else spec.block[1]
    shape = configs.PER_CHANNEL if (spec.block[0], columns) == (1, -1) else configs.GroupShape(rows, columns)
    dtype = getattr(torch, spec.weight.name, torch.float8_e4m3fn)
    return configs.QuantKey(dtype, configs.ScaleDesc(spec.scale_dtype, True, shape))


def _act_key(act: ActSpec | None) -> configs.QuantKey | None:
    if act is None:
        return None
    shape = {"tensor": configs.PER_TENSOR, "token": configs.PER_TOKEN}.get(act.granularity, configs.GroupShape(1, act.group_size))
    scale = configs.ScaleDesc(torch.float32, not act.dynamic, shape)
    return configs.QuantKey(getattr(torch, act.dtype.name), scale, None, act.symmetric)


def write_layer(weight: QuantizedWeight, family: str) -> nn.Module:
    """A layer whose parameters hold the weight in compressed-tensors' layout of the family: the inverse of `read_layer`."""
    return _mixed_precision_layer(weight) if family == "mp" else _scaled_layer(weight, family)


def _mixed_precision_layer(weight: QuantizedWeight) -> nn.Module:
    """weight_packed int32 [N, K / f], weight_scale [N, G], weight_zero_point int32 [N / f, G] and weight_g_idx."""
    layer, s = nn.Module(), weight.spec
    pack_factor = 32 // s.weight.bits
    codes = weight.codes.contiguous().view(torch.int32)
    layer.weight_packed = PackedParameter(codes, packed_dim=1, packed_factor=pack_factor)
    layer.weight_scale = GroupScaleParameter(weight.scale.clone(), s.group_size)
    if weight.zero is not None:
        packed = bitstream.pack(weight.zero.t().contiguous(), s.weight.bits).view(torch.int32).t().contiguous()
        layer.weight_zero_point = PackedParameter(packed, packed_dim=0, packed_factor=pack_factor)
    if weight.perm is not None:
        g_idx = torch.empty(s.k, dtype=torch.int32, device=weight.device)
        g_idx[weight.perm.long()] = weight.column_groups().int()
        layer.weight_g_idx = RowParameter(g_idx)
    return layer


def _scaled_layer(weight: QuantizedWeight, family: str) -> nn.Module:
    """weight [N, K] or packed uint8 [N, K / 2], weight_scale, and the global and static input scales of the family."""
    layer, s = nn.Module(), weight.spec
    element = getattr(torch, s.weight.name, torch.uint8)
    dtype = {"int8": torch.int8, "fp8": element, "fp8_block": element, "mxfp8": element}.get(family, torch.uint8)
    layer.weight = ModelWeightParameter(weight.codes.contiguous().view(dtype))
    if family == "fp8_block":
        layer.weight_scale = BlockScaleParameter(weight.scale.clone(), s.block)
    elif family in ("int8", "fp8") and s.block[1] >= s.k:
        per_channel = s.block[0] == 1
        scale = weight.scale.clone() if per_channel else weight.scale.reshape(1).clone()
        layer.weight_scale = ChannelScaleParameter(scale) if per_channel else PerTensorScaleParameter(scale)
    else:
        scale = weight.scale.view(torch.uint8) if s.scale_dtype == torch.float8_e8m0fnu else weight.scale
        layer.weight_scale = GroupScaleParameter(scale.clone(), s.block[1])
    if weight.scale2 is not None:
        layer.weight_global_scale = PerTensorScaleParameter(weight.scale2.reshape(1).clone())
    names = ("input_global_scale_inv", "") if family == "nvfp4" else ("input_scale", "input_zero_point")
    for name, value in zip(names, (weight.input_scale, weight.input_zero), strict=True):
        if value is not None and name:
            setattr(layer, name, PerTensorScaleParameter(value.reshape(1).clone()))
    return layer


def _answer(question: Callable[..., Any], *arguments: Any) -> Any:
    """A foreign kernel's answer; a refusal where it raises, so that its defect cannot break selection."""
    try:
        return question(*arguments)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def _verdict(answer: Any, default_reason: str) -> Verdict:
    ok, reason = answer if isinstance(answer, tuple | Verdict) else (answer, None)
    return YES if ok else no(str(reason or default_reason))


class ForeignKernel(Kernel):
    """Base of the classes of `wrap_foreign_kernel`.

    `pack` writes the weight into a layer in the family's layout, has the foreign kernel process it, and keeps its tensors. rank:
    "first", "last" or a priority, see `register_linear_kernel`.
    """

    protocol_class: Any
    family: str
    rank: int | str
    deterministic = None
    cuda_graph = False

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """The foreign kernel's minimum capability, and its answer about the platform's compute capability."""
        minimum = _answer(cls.protocol_class.get_min_capability)
        if isinstance(minimum, int) and 0 < platform.capability < minimum:
            return no(f"needs compute capability {minimum}; this is {platform.capability}", f"cuda:sm{minimum}")
        return _verdict(_answer(cls.protocol_class.is_supported, platform.capability or None), "it refuses this machine")

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The foreign kernel's answer about the layer's config, where the family's config can express the spec."""
        config = config_of(spec, cls.family)
        if config is None:
            return no(f"the {cls.family} family's config cannot express this layer")
        if cls.family == "mp" and (
            spec.k * spec.weight.bits % 32 or (spec.zero == "int" and spec.n * spec.weight.bits % 32) or 32 % spec.weight.bits
        ):
            return no("its codes do not fill int32s", "2, 4 or 8 bits, K and N multiples of the pack factor")
        return _verdict(_answer(cls.protocol_class.can_implement, config), "it refuses this layer")

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """The tensors of a layer that the foreign kernel has processed."""
        layer = write_layer(weight, cls.family)
        cls._instance(weight.spec).process_weights_after_loading(layer)
        tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
        tensors |= {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        attributes = {
            name: value
            for name, value in vars(layer).items()
            if not name.startswith("_") and name not in tensors and name != "training"
        }
        cls._layer_state[weight.spec.key] = (tuple(tensors), attributes)
        return {name: tensor.detach() for name, tensor in tensors.items()}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        names, attributes = cls._layer_state[spec.key]
        layer = nn.Module()
        for name, tensor in zip(names, packed, strict=True):
            object.__setattr__(layer, name, tensor)
        for name, value in attributes.items():
            object.__setattr__(layer, name, value)
        out: Tensor = cls._instance(spec).apply_weights(layer, x, bias)
        return out

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """By rank just below the lowest cost of all other kernels, just above the highest, or the lowest.

        The protocol itself has no costs.
        """
        others = [e.kernel.cost(spec, platform, m) for e in registry.entries()
                  if not issubclass(e.kernel, ForeignKernel)
                  and platform.vendor in e.platforms and e.kernel.is_supported(platform)
                  and spec.act_dtype in e.kernel.act_dtypes and e.kernel.can_implement(spec)]  # fmt: skip
        if not others:
            return roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=matmul_rate(spec, platform))
        return {"first": 0.99 * min(others), "last": 1.01 * max(others)}.get(str(cls.rank), min(others))

    _layer_state: dict[str, tuple[tuple[str, ...], dict[str, Any]]]  # spec key -> tensor names and other attributes of its layer
    _instances: dict[str, Any]  # spec key -> instance of protocol_class

    @classmethod
    def _instance(cls, spec: LinearSpec) -> Any:
        instance = cls._instances.get(spec.key)
        if instance is None:
            names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx") if cls.family == "mp" else ()
            instance = cls._instances[spec.key] = cls.protocol_class(config_of(spec, cls.family), *names)
        return instance


def wrap_foreign_kernel(protocol_class: type[LinearKernel], family: str, rank: int | str) -> type[Kernel]:
    """A Kernel subclass, of the same name, over a class of the protocol."""
    return type(protocol_class.__name__, (ForeignKernel,), {
        "__module__": protocol_class.__module__, "__doc__": protocol_class.__doc__, "protocol_class": protocol_class,
        "family": family, "families": (family,), "rank": rank, "backend": getattr(protocol_class, "backend", "plugin"),
        "_layer_state": {}, "_instances": {},
    })  # fmt: skip
