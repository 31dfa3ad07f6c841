"""The layers that the field knows under Marlin's name, whose kernels are in no package of their own: Hopper's here do the job.

Their inputs keep 16 bits. A scheme that quantizes its input is refused, since the outputs would be others.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.types import LinearSpec, Verdict, no


class _Marlin(GluonHopperLinearKernel):
    backend = "marlin"
    priority = 15
    weight: ClassVar[str]
    columns: ClassVar[int]
    scales: ClassVar[torch.dtype]

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The family's weights; inputs of 16 bits."""
        if spec.weight.name != cls.weight or spec.scale_dtype != cls.scales or spec.block != (1, min(cls.columns, spec.k)):
            return no(f"{spec.weight} in blocks of {spec.block[0]}x{spec.block[1]} with {spec.scale_dtype} scales",
                      f"{cls.weight} with a scale of {cls.scales} for {cls.columns} columns")  # fmt: skip
        if spec.act is not None:
            return no(f"computes with 16-bit inputs, and the scheme's are {spec.act}", "a weight-only scheme")
        return super().can_implement(spec)


class MarlinNvFp4LinearKernel(_Marlin):
    """NVFP4 weights with 16-bit inputs."""

    families = ("nvfp4",)
    weight, columns, scales = "float4_e2m1", 16, torch.float8_e4m3fn


class MarlinMxFp4LinearKernel(_Marlin):
    """MXFP4 weights with 16-bit inputs."""

    families = ("mxfp4",)
    weight, columns, scales = "float4_e2m1", 32, torch.float8_e8m0fnu


class MarlinMxfp8LinearKernel(_Marlin):
    """MXFP8 weights with 16-bit inputs."""

    families = ("mxfp8",)
    weight, columns, scales = "float8_e4m3fn", 32, torch.float8_e8m0fnu
