"""The protocol of `ZentorchWNA16LinearKernel`, with vLLM's behaviour: layers are processed once and their parameters freed, and a
layer that zentorch cannot run goes to `CPUWNA16LinearKernel` with its parameters untouched."""

from __future__ import annotations

from typing import Any

from bitline.kernels.base import Kernel
from bitline.protocol.adapter import ADAPTERS, ProtocolAdapter, protocol_class_by_name
from bitline.weight import QuantizedWeight


class ZentorchAdapter(ProtocolAdapter):
    """The protocol over `ZentorchWNA16LinearKernel`."""

    def process_weights_after_loading(self, layer: Any, free_source: bool = True) -> None:
        """Pack the layer for zentorch and replace its parameters by empty ones.

        Where zentorch refuses the loaded layer, pack it for CPUWNA16LinearKernel and keep the parameters. A second call has no
        effect.
        """
        if hasattr(layer, "_bitline_spec"):
            return
        super().process_weights_after_loading(layer, free_source=free_source)

    def _may_free_source(self, impl: type[Kernel]) -> bool:
        return impl is self.impl

    def _next_best(self, weight: QuantizedWeight, reason: str) -> type[Kernel]:
        cpu_kernel = protocol_class_by_name("CPUWNA16LinearKernel")
        ok, cpu_reason = cpu_kernel.can_implement(weight.spec)
        if not ok:
            raise ValueError(f"neither zentorch nor CPUWNA16LinearKernel can run this layer: {reason}; {cpu_reason}")
        impl: type[Kernel] = cpu_kernel.impl
        return impl


ADAPTERS["ZentorchWNA16LinearKernel"] = ZentorchAdapter
