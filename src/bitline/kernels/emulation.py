"""Micro-scaled formats without their units: dequantize, round the input as the checkpoint asks, multiply in 16 or 32 bits."""

from __future__ import annotations

from typing import ClassVar

import torch

from bitline.kernels.reference import ReferenceLinearKernel
from bitline.types import YES, LinearSpec, Verdict, no


class _Emulation(ReferenceLinearKernel):
    """The reference under the name by which a family knows it. Scales are read as stored, not in a swizzled order."""

    backend = "emulation"
    priority = -50
    weights: ClassVar[tuple[str, ...]]
    columns: ClassVar[int] = 32
    scales: ClassVar[torch.dtype] = torch.float8_e8m0fnu

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The family's own codes and scales, whatever happens to the input; any shape, any cut."""
        if spec.weight.name not in cls.weights:
            return no(f"weight type {spec.weight}", " or ".join(cls.weights))
        if spec.scale_dtype != cls.scales:
            return no(f"scales are {spec.scale_dtype}", f"{cls.scales}, as the family's checkpoints have them")
        if spec.block[0] != 1 or spec.block[1] not in (cls.columns, spec.k) or spec.block[1] > cls.columns:
            return no(f"a scale for {spec.block[0]}x{spec.block[1]} weights", f"a scale for {cls.columns} columns of a row")
        return YES


class EmulationNvFp4LinearKernel(_Emulation):
    """NVFP4: E2M1 codes, E4M3 scales of 16 columns, a global scale."""

    families = ("nvfp4",)
    weights, columns, scales = ("float4_e2m1",), 16, torch.float8_e4m3fn


class EmulationMxFp4LinearKernel(_Emulation):
    """MXFP4: E2M1 codes, E8M0 scales of 32 columns."""

    families = ("mxfp4",)
    weights = ("float4_e2m1",)


class EmulationMxfp6LinearKernel(_Emulation):
    """MXFP6: E2M3 or E3M2 codes, E8M0 scales of 32 columns."""

    families = ("mxfp6",)
    weights = ("float6_e2m3", "float6_e3m2")


class EmulationMxfp8LinearKernel(_Emulation):
    """MXFP8: E4M3 or E5M2 codes, E8M0 scales of 32 columns."""

    families = ("mxfp8",)
    weights = ("float8_e4m3fn", "float8_e5m2")
