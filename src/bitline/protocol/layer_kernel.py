"""The kernel protocol of the field: a kernel bound to a layer's config, processing the layer's parameters once.

Every registered kernel has it, over `pack` and `apply` (see `layer_kernel`). A kernel written for the protocol alone, with
its own `process_weights_after_loading` and `apply_weights`, joins the selection through `register_linear_kernel`.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitline.errors import InputError
from bitline.kernels.base import Kernel
from bitline.kernels.registry import entries as entries_of
from bitline.kernels.registry import kernel_by_name
from bitline.linear import OP
from bitline.platform import Platform
from bitline.protocol.config import Config, family_of
from bitline.protocol.layer_reader import NAMES, LayerParameters, read_layer
from bitline.select import Policy, choose
from bitline.types import LinearSpec, Verdict
from bitline.weight import QuantizedWeight

log = logging.getLogger("bitline")


def platform_of(compute_capability: int | Platform | str | None = None) -> Platform:
    """A compute capability as the field counts (90 for sm90) is an NVIDIA GPU; None is the GPU that is here, or the CPU."""
    if isinstance(compute_capability, Platform):
        return compute_capability
    if isinstance(compute_capability, str):
        return Platform.parse(compute_capability)
    if compute_capability is not None and (not torch.version.hip):
        return Platform.parse(f"cuda:sm{compute_capability}") if compute_capability > 0 else Platform.detect("cpu")
    return Platform.detect("cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu")


class LinearKernel(ABC):
    """The protocol. An instance serves the layers of one config; it holds no weights, the layer does.

    names: where the layer calls a parameter by another name than the family's own (`NAMES`), in the roles' order, as a list
    `layer_param_names`, or by keyword: w_q_param_name, w_s_param_name, …, or role=name. Raises ValueError with the reason where
    the kernel cannot do the config or does not run on this machine.
    """

    config: Config
    policy: Policy | None = None  # of a kernel that was chosen: another may serve a layer that this one cannot do

    def __init__(
        self, config: Config, *positional: str | None, layer_param_names: Sequence[str] = (), **names: str | None
    ) -> None:
        self.config = config
        roles = NAMES[family_of(config)]
        listed = (*positional, *layer_param_names)
        if len(listed) > len(roles):
            raise InputError("more names than such a layer has parameters", found=", ".join(map(str, listed)),
                             expected=", ".join(roles))  # fmt: skip
        given = dict(zip(roles, listed, strict=False)) | {k.removesuffix("_param_name"): v for k, v in names.items()}
        if unknown := [role for role in given if role not in roles]:
            raise InputError("no such role of a parameter", found=", ".join(unknown), expected=", ".join(roles))
        self.names = {role: name for role, name in given.items() if name is not None}
        for verdict in (type(self).is_supported(), type(self).can_implement(config)):
            ok, reason = verdict
            if not ok:
                raise ValueError(f"{type(self).__name__} cannot run this layer: {reason}")

    @classmethod
    def is_supported(cls, compute_capability: Any = None) -> Any:
        """(ok, reason): does it run on this machine, or on an NVIDIA GPU of that compute capability.

        Unless a kernel says more, that is what `get_min_capability` says.
        """
        place, least = platform_of(compute_capability), cls.get_min_capability()
        if place.vendor == "cuda" and place.capability < least:
            return Verdict(False, f"needs compute capability {least}; this is {place.capability}", f"cuda:sm{least}")
        return Verdict(True)

    @classmethod
    def get_min_capability(cls) -> int:
        """The smallest NVIDIA compute capability that it runs on; -1 where it runs without one."""
        return -1

    @classmethod
    @abstractmethod
    def can_implement(cls, config: Any) -> Any:
        """(ok, reason): can it do such a layer exactly."""

    @abstractmethod
    def process_weights_after_loading(self, layer: Any) -> None:
        """Re-lay the layer's loaded parameters for `apply_weights`. Safe to call again."""

    @abstractmethod
    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""


class MPLinearKernel(LinearKernel):
    """Integer weights, 16-bit inputs."""


class Int8ScaledMMLinearKernel(LinearKernel):
    """int8 weights and inputs."""


class FP8ScaledMMLinearKernel(LinearKernel):
    """FP8 weights, scales per tensor, row or group."""


class Fp8BlockScaledDynamicMMLinearKernel(LinearKernel):
    """FP8 weights in blocks, inputs in groups of a row."""


class NvFp4LinearKernel(LinearKernel):
    """NVFP4."""


class MxFp4LinearKernel(LinearKernel):
    """MXFP4."""


class Mxfp8LinearKernel(LinearKernel):
    """MXFP8."""


FAMILIES: dict[str, Any] = {
    "mp": MPLinearKernel, "int8": Int8ScaledMMLinearKernel, "fp8": FP8ScaledMMLinearKernel,
    "fp8_block": Fp8BlockScaledDynamicMMLinearKernel, "nvfp4": NvFp4LinearKernel, "mxfp4": MxFp4LinearKernel,
    "mxfp8": Mxfp8LinearKernel,
}  # fmt: skip
_CAPABILITIES = (60, 70, 75, 80, 86, 89, 90, 100, 103, 120, 121)


class OverPack(Kernel):
    """The protocol over a registered kernel's `pack` and `apply`; a base of what `layer_kernel` makes."""

    impl: ClassVar[type[Kernel]]
    names: dict[str, str]
    config: Config
    policy: Policy | None

    @classmethod
    def is_supported(cls, platform: Any = None) -> Verdict:
        """Also of a compute capability, of a platform's text, and of this machine."""
        place = platform_of(platform)
        if place.vendor not in cls.impl.platforms:
            return Verdict(False, f"runs on {', '.join(cls.impl.platforms)}; this platform is {place.vendor}")
        return cls.impl.is_supported(place)

    @classmethod
    def get_min_capability(cls) -> int:
        """The first NVIDIA architecture that it runs on; -1 where it does not need one, or runs on none."""
        if "cuda" not in cls.impl.platforms or "cpu" in cls.impl.platforms:
            return -1
        return next((c for c in _CAPABILITIES if cls.impl.is_supported(Platform.parse(f"cuda:sm{c}"))), -1)

    @classmethod
    def can_implement(cls, spec: Any) -> Verdict:
        """Also of a config."""
        spec = spec if isinstance(spec, LinearSpec) else spec.to_spec()
        if spec.act_dtype not in cls.impl.act_dtypes:
            return Verdict(False, f"input dtype {spec.act_dtype}")
        return cls.impl.can_implement(spec)

    def process_weights_after_loading(self, layer: Any, free_source: bool = False) -> None:
        """Pack the layer's parameters into buffers of the layer. The parameters are not changed.

        free_source: then replace them by empty ones; a later call keeps what is packed. Raises ValueError where the layer is
        not what the config said and this kernel cannot do it.
        """
        parameters = LayerParameters(layer, self.config, self.names)
        if getattr(layer, "_bitline_source_freed", False):
            return
        weight = read_layer(layer, self.config, self.names)
        ok, reason = type(self).can_implement(weight.spec)
        impl = self.impl if ok else self._another(weight, reason)
        packed = impl.pack(weight)
        for name in getattr(layer, "_bitline_names", ()):
            delattr(layer, name)  # of another kernel that processed the layer before
        layer._bitline_spec, layer._bitline_names = weight.spec.key, [f"_bitline_{name}" for name in packed]
        layer._bitline_kernel = impl.__name__
        for name, tensor in zip(layer._bitline_names, packed.values(), strict=True):
            _keep(layer, name, tensor)
        if free_source and self._frees(impl):
            for name in parameters.all():
                _forget(layer, name)
            layer._bitline_source_freed = True

    def _frees(self, impl: type[Kernel]) -> bool:
        """Whether the parameters go, where that is asked for, once `impl` has packed them."""
        return True

    def _another(self, weight: QuantizedWeight, reason: str) -> type[Kernel]:
        """The next best kernel for a layer that this one cannot do; a ValueError where this one was not chosen but named."""
        spec, family = weight.spec, family_of(self.config)
        if self.policy is None or self.policy.kernel == self.impl.__name__:
            raise ValueError(f"{type(self).__name__} cannot run this layer ({spec}): {reason}")
        entries = [e for e in entries_of() if not e.kernel.families or family in e.kernel.families]
        chosen = choose(spec, Platform.detect(weight.device), self.policy, kernels=entries).kernel
        _warn_another(type(self).__name__, reason, chosen.__name__)
        return chosen

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] in the config's input dtype -> [..., N], in `out_type` where the config has one."""
        if not hasattr(layer, "_bitline_spec"):
            raise InputError("the layer's weights have not been processed", fix="call process_weights_after_loading first")
        spec = LinearSpec.parse(layer._bitline_spec)
        if x.dtype != spec.act_dtype or x.dim() == 0 or x.shape[-1] != spec.k:
            raise InputError("the layer got an input that it was not made for", found=f"{list(x.shape)} {x.dtype}",
                             expected=f"[..., {spec.k}] {spec.act_dtype}")  # fmt: skip
        packed = [getattr(layer, name) for name in layer._bitline_names]
        rows = math.prod(x.shape[:-1])
        y = OP(x.reshape(rows, spec.k), packed, bias, layer._bitline_kernel, layer._bitline_spec)
        y = y.view(*x.shape[:-1], spec.n)
        out = getattr(self.config, "out_type", None) or getattr(self.config, "out_dtype", None)
        return y if out is None else y.to(out)


@functools.cache
def _warn_another(name: str, reason: str, another: str) -> None:
    log.warning("a layer is another than its config said, and %s cannot run it (%s): %s does", name, reason, another)


def _keep(layer: Any, name: str, tensor: Tensor) -> None:
    if isinstance(layer, nn.Module):
        layer.register_buffer(name, tensor, persistent=False)
    else:
        setattr(layer, name, tensor)


def _forget(layer: Any, name: str) -> None:
    """Release a parameter's memory; its name stays, so that the layer's own code still finds it."""
    param = getattr(layer, name)
    param.data = param.data.new_empty(0)


_bound: dict[tuple[type[Kernel], str], Any] = {}
OVER: dict[str, type[OverPack]] = {}  # kernels whose layers do more than OverPack does


def layer_kernel(kernel: type[Kernel], family: str) -> Any:
    """A registered kernel's class with the protocol: a subclass of both, of the same name, bound to a config when made.

    A kernel that was written for the protocol is given back as it is.
    """
    own = getattr(kernel, "layer_kernel", None)
    if own is not None:
        return own
    if (kernel, family) in _bound:
        return _bound[kernel, family]
    base = FAMILIES[family]
    made = type(kernel.__name__, (OVER.get(kernel.__name__, OverPack), kernel, base), {
        "__module__": "bitline.kernels.linear", "__doc__": kernel.__doc__, "impl": kernel,
    })  # fmt: skip
    _bound[kernel, family] = made
    return made


def by_name(name: str) -> Any:
    """The class `bitline.kernels.linear.<name>` of a registered kernel."""
    kernel = kernel_by_name(name)
    return layer_kernel(kernel, (kernel.families or ("mp",))[0])
