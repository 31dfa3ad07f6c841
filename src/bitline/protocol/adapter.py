"""vLLM's kernel protocol for every registered kernel, over its `pack` and `apply`."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, ClassVar

from torch import Tensor, nn

from bitline.errors import InputError
from bitline.kernels.base import Kernel
from bitline.kernels.registry import entries as registered_kernels
from bitline.kernels.registry import kernel_by_name
from bitline.linear import OP
from bitline.platform import Platform
from bitline.protocol.config import Config, family_of
from bitline.protocol.layer_kernel import FAMILIES, platform_of
from bitline.protocol.layer_parameters import LayerParameters
from bitline.protocol.layer_reader import read_layer
from bitline.select import Policy, choose
from bitline.types import LinearSpec, Verdict
from bitline.weight import QuantizedWeight

log = logging.getLogger("bitline")
_CUDA_CAPABILITIES = (60, 70, 75, 80, 86, 89, 90, 100, 103, 120, 121)


class ProtocolAdapter(Kernel):
    """The protocol over `pack` and `apply` of a registered kernel `impl`; a base of the classes of `protocol_class`."""

    impl: ClassVar[type[Kernel]]
    names: dict[str, str]
    config: Config
    policy: Policy | None

    @classmethod
    def is_supported(cls, platform: Any = None) -> Verdict:
        """As Kernel.is_supported and LinearKernel.is_supported. platform: a Platform, its text, a compute capability or None."""
        platform = platform_of(platform)
        if platform.vendor not in cls.impl.platforms:
            return Verdict(False, f"runs on {', '.join(cls.impl.platforms)}; this platform is {platform.vendor}")
        return cls.impl.is_supported(platform)

    @classmethod
    def get_min_capability(cls) -> int:
        """The first compute capability that `impl` supports; -1 where it does not need a GPU, or supports none."""
        if "cuda" not in cls.impl.platforms or "cpu" in cls.impl.platforms:
            return -1
        return next((c for c in _CUDA_CAPABILITIES if cls.impl.is_supported(Platform.parse(f"cuda:sm{c}"))), -1)

    @classmethod
    def can_implement(cls, spec: Any) -> Verdict:
        """As Kernel.can_implement, also for a layer config."""
        spec = spec if isinstance(spec, LinearSpec) else spec.to_spec()
        if spec.act_dtype not in cls.impl.act_dtypes:
            return Verdict(False, f"input dtype {spec.act_dtype}")
        return cls.impl.can_implement(spec)

    def process_weights_after_loading(self, layer: Any, free_source: bool = False) -> None:
        """Pack the layer's parameters into buffers of the layer. The parameters are not changed.

        Args:
            layer: The layer, with its parameters loaded.
            free_source: Whether to replace the parameters by empty ones afterwards; later calls then keep the packed buffers.

        Raises:
            ValueError: Where the layer differs from its config and this kernel, which was named and not chosen, cannot run it.
        """
        parameters = LayerParameters(layer, self.config, self.names)
        if getattr(layer, "_bitline_source_freed", False):
            return
        weight = read_layer(layer, self.config, self.names)
        ok, reason = type(self).can_implement(weight.spec)
        impl = self.impl if ok else self._next_best(weight, reason)
        packed = impl.pack(weight)
        for name in getattr(layer, "_bitline_names", ()):
            delattr(layer, name)  # from an earlier call, maybe of another kernel
        layer._bitline_spec, layer._bitline_names = weight.spec.key, [f"_bitline_{name}" for name in packed]
        layer._bitline_kernel = impl.__name__
        for name, tensor in zip(layer._bitline_names, packed.values(), strict=True):
            _set_buffer(layer, name, tensor)
        if free_source and self._may_free_source(impl):
            for name in parameters.all():
                _release(layer, name)
            layer._bitline_source_freed = True

    def _may_free_source(self, impl: type[Kernel]) -> bool:
        """Whether `free_source` applies to a layer that `impl` has packed."""
        return True

    def _next_best(self, weight: QuantizedWeight, reason: str) -> type[Kernel]:
        """The next best kernel for a layer that this one cannot run. A ValueError where this one was named and not chosen."""
        spec, family = weight.spec, family_of(self.config)
        if self.policy is None or self.policy.kernel == self.impl.__name__:
            raise ValueError(f"{type(self).__name__} cannot run this layer ({spec}): {reason}")
        entries = [e for e in registered_kernels() if not e.kernel.families or family in e.kernel.families]
        chosen = choose(spec, Platform.detect(weight.device), self.policy, kernels=entries).kernel
        _warn_next_best(type(self).__name__, reason, chosen.__name__)
        return chosen

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the layer.

        Args:
            layer: The processed layer.
            x: [..., K] in the config's input dtype.
            bias: [N], or None.

        Returns:
            [..., N], in the config's out_type or out_dtype where it has one.

        Raises:
            InputError: Where the layer has not been processed, or x has another shape or dtype.
        """
        if not hasattr(layer, "_bitline_spec"):
            raise InputError("the layer's weights have not been processed", fix="call process_weights_after_loading first")
        spec = LinearSpec.parse(layer._bitline_spec)
        if x.dtype != spec.act_dtype or x.dim() == 0 or x.shape[-1] != spec.k:
            raise InputError("the input does not fit the layer", found=f"{list(x.shape)} {x.dtype}",
                             expected=f"[..., {spec.k}] {spec.act_dtype}")  # fmt: skip
        packed = [getattr(layer, name) for name in layer._bitline_names]
        m = math.prod(x.shape[:-1])
        y = OP(x.reshape(m, spec.k), packed, bias, layer._bitline_kernel, layer._bitline_spec)
        y = y.view(*x.shape[:-1], spec.n)
        out = getattr(self.config, "out_type", None) or getattr(self.config, "out_dtype", None)
        return y if out is None else y.to(out)


@functools.cache
def _warn_next_best(name: str, reason: str, next_best: str) -> None:
    log.warning("a layer differs from its config, and %s cannot run it (%s): %s is used instead", name, reason, next_best)


def _set_buffer(layer: Any, name: str, tensor: Tensor) -> None:
    if isinstance(layer, nn.Module):
        layer.register_buffer(name, tensor, persistent=False)
    else:
        setattr(layer, name, tensor)


def _release(layer: Any, name: str) -> None:
    """Release a parameter's memory. The attribute stays, since the layer's own code may access it."""
    param = getattr(layer, name)
    param.data = param.data.new_empty(0)


_protocol_classes: dict[tuple[type[Kernel], str], Any] = {}
ADAPTERS: dict[str, type[ProtocolAdapter]] = {}  # kernel name -> its adapter, where ProtocolAdapter is not enough


def protocol_class(kernel: type[Kernel], family: str) -> Any:
    """A registered kernel's class in the protocol: a subclass of the kernel and of the family's base, of the same name.

    For a foreign kernel, the protocol class that it wraps.
    """
    foreign = getattr(kernel, "protocol_class", None)
    if foreign is not None:
        return foreign
    if (kernel, family) not in _protocol_classes:
        adapter = ADAPTERS.get(kernel.__name__, ProtocolAdapter)
        members = {"__module__": "bitline.kernels.linear", "__doc__": kernel.__doc__, "impl": kernel}
        _protocol_classes[kernel, family] = type(kernel.__name__, (adapter, kernel, FAMILIES[family]), members)
    return _protocol_classes[kernel, family]


def protocol_class_by_name(name: str) -> Any:
    """The class `bitline.kernels.linear.<name>` of a registered kernel, for the first of its families."""
    kernel = kernel_by_name(name)
    return protocol_class(kernel, (kernel.families or ("mp",))[0])
