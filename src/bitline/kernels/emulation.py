"""Microscaled formats without microscaled hardware: dequantize, fake-quantize the activations, matmul in 16 or 32 bits."""

from __future__ import annotations

from typing import ClassVar

import torch

from bitline.kernels.reference import ReferenceLinearKernel
from bitline.types import YES, LinearSpec, Verdict, no


class _EmulationKernel(ReferenceLinearKernel):
    """The reference kernel under the name that a kernel family knows. Scales are read in checkpoint order, not swizzled.

    weight_types: names of the weight types it takes. sf_vec_size: weights of a row per block scale. sf_dtype: its dtype.
    """

    backend = "emulation"
    priority = -50
    weight_types: ClassVar[tuple[str, ...]]
    sf_vec_size: ClassVar[int] = 32
    sf_dtype: ClassVar[torch.dtype] = torch.float8_e8m0fnu

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The family's own weight types and block scales with any activation scheme, shape and shard."""
        if spec.weight.name not in cls.weight_types:
            return no(f"weight type {spec.weight}", " or ".join(cls.weight_types))
        if spec.scale_dtype != cls.sf_dtype:
            return no(f"scales are {spec.scale_dtype}", f"{cls.sf_dtype}, as the family's checkpoints have them")
        if spec.block[0] != 1 or spec.block[1] not in (cls.sf_vec_size, spec.k) or spec.block[1] > cls.sf_vec_size:
            return no(f"scale block {spec.block[0]}x{spec.block[1]}", f"scale block 1x{cls.sf_vec_size}")
        return YES


class EmulationNvFp4LinearKernel(_EmulationKernel):
    """NVFP4: E2M1 weights, E4M3 scales per 16 weights, a global scale."""

    families = ("nvfp4",)
    weight_types, sf_vec_size, sf_dtype = ("float4_e2m1",), 16, torch.float8_e4m3fn


class EmulationMxFp4LinearKernel(_EmulationKernel):
    """MXFP4: E2M1 weights, E8M0 scales per 32 weights."""

    families = ("mxfp4",)
    weight_types = ("float4_e2m1",)


class EmulationMxfp6LinearKernel(_EmulationKernel):
    """MXFP6: E2M3 or E3M2 weights, E8M0 scales per 32 weights."""

    families = ("mxfp6",)
    weight_types = ("float6_e2m3", "float6_e3m2")


class EmulationMxfp8LinearKernel(_EmulationKernel):
    """MXFP8: E4M3 or E5M2 weights, E8M0 scales per 32 weights."""

    families = ("mxfp8",)
    weight_types = ("float8_e4m3fn", "float8_e5m2")
