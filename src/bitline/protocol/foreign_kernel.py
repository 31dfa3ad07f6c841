"""A kernel that somebody wrote for the field's protocol alone, as one that `choose` can rank and a QuantLinear can run."""

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
    """The config of a spec; None where the family's config cannot say what the spec says."""
    plain = spec.block_offset == (0, 0) and not spec.ragged and spec.zero != "float" and not spec.input_multiplier
    shape = (spec.n, spec.k)
    made: Any = None
    if not plain:
        return None
    if family == "mp":
        made = configs.MPLinearLayerConfig(
            (spec.k, spec.n), (spec.k, spec.n), spec.weight, spec.act_dtype, spec.group_size, spec.zero == "int", spec.act_order
        )
    elif family == "int8" and spec.act is not None:
        made = configs.Int8ScaledMMLinearLayerConfig(
            not spec.act.dynamic, spec.block[0] == 1, spec.act.symmetric, shape, spec.act_dtype
        )
    elif family in ("fp8", "fp8_block"):
        made = configs.FP8ScaledMMLinearLayerConfig(_weight_key(spec), _act_key(spec.act), shape, spec.act_dtype)
    elif family in ("nvfp4", "mxfp4", "mxfp8"):
        kind: Any = {
            "nvfp4": configs.NvFp4LinearLayerConfig, "mxfp4": configs.MxFp4LinearLayerConfig,
            "mxfp8": configs.Mxfp8LinearLayerConfig,
        }[family]  # fmt: skip
        made = kind(shape, spec.act_dtype, spec.act is None)
    if made is None or configs.family_of(made) != family:
        return None
    try:
        back = made.to_spec()
    except ValueError:
        return None
    return made if back == spec.replace(scale_dtype=back.scale_dtype, bias=False) else None


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
    """A layer whose parameters hold the weight in the family's usual form (compressed-tensors'): the inverse of `read_layer`."""
    layer, s = nn.Module(), weight.spec
    if family == "mp":
        codes = weight.codes.contiguous().view(torch.int32)
        factor = 32 // s.weight.bits
        layer.weight_packed = PackedParameter(codes, packed_dim=1, packed_factor=factor)
        layer.weight_scale = GroupScaleParameter(weight.scale.clone(), s.group_size)
        if weight.zero is not None:
            packed = bitstream.pack(weight.zero.t().contiguous(), s.weight.bits).view(torch.int32).t().contiguous()
            layer.weight_zero_point = PackedParameter(packed, packed_dim=0, packed_factor=factor)
        if weight.perm is not None:
            g_idx = torch.empty(s.k, dtype=torch.int32, device=weight.device)
            g_idx[weight.perm.long()] = weight.column_groups().int()
            layer.weight_g_idx = RowParameter(g_idx)
        return layer
    own = getattr(torch, s.weight.name, torch.uint8)
    dtype = {"int8": torch.int8, "fp8": own, "fp8_block": own, "mxfp8": own}.get(family, torch.uint8)
    layer.weight = ModelWeightParameter(weight.codes.contiguous().view(dtype))
    if family == "fp8_block":
        layer.weight_scale = BlockScaleParameter(weight.scale.clone(), s.block)
    elif family in ("int8", "fp8") and s.block[1] >= s.k:
        make: Any = ChannelScaleParameter if s.block[0] == 1 else PerTensorScaleParameter
        layer.weight_scale = make(weight.scale.clone() if s.block[0] == 1 else weight.scale.reshape(1).clone())
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


def _ask(question: Callable[..., Any], *about: Any) -> Any:
    """The answer; where a stranger raises instead, a refusal with what it said: it must not take every choice down."""
    try:
        return question(*about)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def _verdict(answer: Any, otherwise: str) -> Verdict:
    ok, reason = answer if isinstance(answer, tuple | Verdict) else (answer, None)
    return YES if ok else no(str(reason or otherwise))


class Outside(Kernel):
    """Base of what `wrap` makes: a layer is written in the family's form, processed by the stranger, and kept as tensors."""

    layer_kernel: Any
    family: str
    rank: int | str
    deterministic = None
    cuda_graph = False

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """What the kernel says of the platform's compute capability, and of the least that it names."""
        least = _ask(cls.layer_kernel.get_min_capability)
        if isinstance(least, int) and 0 < platform.capability < least:
            return no(f"needs compute capability {least}; this is {platform.capability}", f"cuda:sm{least}")
        return _verdict(_ask(cls.layer_kernel.is_supported, platform.capability or None), "it refuses this machine")

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """What the kernel says of the config, where the family's config can say what the spec says."""
        config = config_of(spec, cls.family)
        if config is None:
            return no(f"a layer of the {cls.family} family cannot be described so")
        if cls.family == "mp" and (
            spec.k * spec.weight.bits % 32 or (spec.zero == "int" and spec.n * spec.weight.bits % 32) or 32 % spec.weight.bits
        ):
            return no("its codes do not fill whole words", "2, 4 or 8 bits, K and N in whole words")
        return _verdict(_ask(cls.layer_kernel.can_implement, config), "it refuses this layer")

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """Every tensor that the layer holds once the kernel has processed it."""
        layer = write_layer(weight, cls.family)
        cls._kernel(weight.spec).process_weights_after_loading(layer)
        tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
        tensors |= {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        plain = {
            name: value
            for name, value in vars(layer).items()
            if not name.startswith("_") and name not in tensors and name != "training"
        }
        cls._kept[weight.spec.key] = (tuple(tensors), plain)
        return {name: tensor.detach() for name, tensor in tensors.items()}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        names, plain = cls._kept[spec.key]
        layer = nn.Module()
        for name, tensor in zip(names, packed, strict=True):
            object.__setattr__(layer, name, tensor)
        for name, value in plain.items():
            object.__setattr__(layer, name, value)
        out: Tensor = cls._kernel(spec).apply_weights(layer, x, bias)
        return out

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The protocol knows no costs: by its rank just below the best of the others, just above the worst, or the best's own."""
        others = [e.kernel.cost(spec, platform, m) for e in registry.entries()
                  if not issubclass(e.kernel, Outside) and platform.vendor in e.platforms and e.kernel.is_supported(platform)
                  and spec.act_dtype in e.kernel.act_dtypes and e.kernel.can_implement(spec)]  # fmt: skip
        if not others:
            return roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=matmul_rate(spec, platform))
        return {"first": 0.99 * min(others), "last": 1.01 * max(others)}.get(str(cls.rank), min(others))

    _kept: dict[str, tuple[tuple[str, ...], dict[str, Any]]]
    _made: dict[str, Any]

    @classmethod
    def _kernel(cls, spec: LinearSpec) -> Any:
        made = cls._made.get(spec.key)
        if made is None:
            names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx") if cls.family == "mp" else ()
            made = cls._made[spec.key] = cls.layer_kernel(config_of(spec, cls.family), *names)
        return made


def wrap(kernel_class: type[LinearKernel], family: str, rank: int | str) -> type[Kernel]:
    """The kernel class of a protocol class, under its name."""
    return type(kernel_class.__name__, (Outside,), {
        "__module__": kernel_class.__module__, "__doc__": kernel_class.__doc__, "layer_kernel": kernel_class, "family": family,
        "families": (family,), "rank": rank, "backend": getattr(kernel_class, "backend", "plugin"), "_kept": {}, "_made": {},
    })  # fmt: skip
