"""Base of vLLM's kernel names whose layers Bitline's own weight-only GPU kernels run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bitline.kernels import weight_only
from bitline.kernels.base import Kernel, Packed
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight


class WeightOnlyAlias(Kernel):
    """GluonHopperLinearKernel where it runs and takes the layer, else the portable Triton kernel, under another name."""

    platforms: ClassVar[tuple[str, ...]] = ("cuda",)
    measured: ClassVar[tuple[str, ...]] = ("sm90",)
    priority = -10
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Weight-only schemes that the kernels take."""
        if spec.act is not None:
            return no(f"it computes with 16-bit activations, and the scheme's are {spec.act}", "a weight-only scheme")
        return weight_only.can_implement(spec)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """As the kernel that runs on the weight's device."""
        return weight_only.kernel_for_device(weight.spec, weight.device).pack(weight)

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        return weight_only.kernel_for_device(spec, x.device).apply(x, packed, bias, spec)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The cost of the kernel that runs."""
        return weight_only.kernel_for_platform(spec, platform).cost(spec, platform, m)

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Of the portable kernel; the Hopper kernel's differs by padding."""
        return weight_only.portable_kernel(spec).packed_bytes(spec)
