"""What the field's zentorch layer does beyond the protocol: it processes a layer once, frees what it has packed, and leaves a
layer that zentorch cannot do to `CPUWNA16LinearKernel`, untouched."""

from __future__ import annotations

from typing import Any

from bitline.kernels.base import Kernel
from bitline.protocol.layer_kernel import OVER, OverPack, by_name
from bitline.weight import QuantizedWeight


class OverZentorch(OverPack):
    """The protocol over `ZentorchWNA16LinearKernel`."""

    def process_weights_after_loading(self, layer: Any, free_source: bool = True) -> None:
        """Pack the layer for zentorch and replace its parameters by empty ones; where zentorch refuses the loaded layer, pack it
        for CPUWNA16LinearKernel and leave the parameters as they are. A second call does nothing."""
        if hasattr(layer, "_bitline_spec"):
            return
        super().process_weights_after_loading(layer, free_source=free_source)

    def _frees(self, impl: type[Kernel]) -> bool:
        return impl is self.impl

    def _another(self, weight: QuantizedWeight, reason: str) -> type[Kernel]:
        other = by_name("CPUWNA16LinearKernel")
        ok, why = other.can_implement(weight.spec)
        if not ok:
            raise ValueError(f"neither zentorch nor CPUWNA16LinearKernel can run this layer: {reason}; {why}")
        impl: type[Kernel] = other.impl
        return impl


OVER["ZentorchWNA16LinearKernel"] = OverZentorch
