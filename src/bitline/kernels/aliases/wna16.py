"""vLLM's mixed-precision GPU kernels by name, where the code is vLLM's own: Bitline's weight-only kernels run the layers.

They take every shape, group size and act-order that those kernels take, not only the sizes of the originals.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from bitline.kernels.aliases.weight_only import WeightOnlyAlias
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no


class _IntegerAlias(WeightOnlyAlias):
    """Base of the aliases for integer weights. weight_types: names of those that the original takes."""

    families = ("mp",)
    weight_types: ClassVar[tuple[str, ...]] = ("uint4b8", "uint8b128", "uint4", "uint8")

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """What the portable Triton kernel runs on."""
        return TritonW4A16LinearKernel.is_supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The original's weight types."""
        if spec.weight.name not in cls.weight_types:
            return no(f"weight type {spec.weight}", " or ".join(cls.weight_types))
        return super().can_implement(spec)


class MarlinLinearKernel(_IntegerAlias):
    """Symmetric and asymmetric 4- and 8-bit weights on NVIDIA GPUs from sm75."""

    backend = "marlin"


class MacheteLinearKernel(_IntegerAlias):
    """Symmetric and asymmetric 4- and 8-bit weights on Hopper: runs GluonHopperLinearKernel."""

    backend = "machete"

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Hopper."""
        return GluonHopperLinearKernel.is_supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The weights of the family, where the Hopper kernel takes the layer."""
        verdict = super().can_implement(spec)
        return GluonHopperLinearKernel.can_implement(spec) if verdict else verdict


class ExllamaLinearKernel(_IntegerAlias):
    """Symmetric 2-, 3-, 4- and 8-bit weights with float16 activations, on NVIDIA and AMD GPUs."""

    platforms = ("cuda", "rocm")
    backend = "exllama"
    act_dtypes = (torch.float16,)
    weight_types = ("uint4b8", "uint8b128", "uint2b2", "uint3b4")


class ConchLinearKernel(_IntegerAlias):
    """Symmetric and asymmetric 4- and 8-bit weights on NVIDIA and AMD GPUs."""

    platforms = ("cuda", "rocm")
    backend = "conch"


class RDNAHybridW4A16LinearKernel(_IntegerAlias):
    """Symmetric and asymmetric 4-bit weights on RDNA3 and RDNA4: runs the portable Triton kernel at every M."""

    platforms = ("rocm",)
    backend = "rdna"
    measured = ()
    weight_types = ("uint4b8", "uint4")

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """gfx11 and gfx12, and Triton."""
        if not platform.arch.startswith(("gfx11", "gfx12")):
            return no(f"it is for RDNA3 and RDNA4, this is {platform.arch or platform.vendor}", "rocm:gfx1100")
        return super().is_supported(platform)
