"""vLLM's Marlin kernels for FP4 and FP8 weights by name. vLLM ships Marlin's code with itself; here Bitline's own kernels run.

GluonHopperLinearKernel where it runs and takes the layer, TritonMinifloatLinearKernel on all other NVIDIA GPUs. Both are
weight-only: a scheme that quantizes activations is refused, since its outputs would differ.
"""

from __future__ import annotations

import functools
import logging
from typing import ClassVar

import torch

from bitline.kernels.aliases.weight_only import WeightOnlyAlias
from bitline.kernels.base import Packed
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

log = logging.getLogger("bitline")


class _MarlinKernel(WeightOnlyAlias):
    """Base of the Marlin kernels.

    weight_type: the only weight type. sf_vec_size: columns per block scale, 0 for any scale block. sf_dtype: the scales' dtype,
    None for any.
    """

    backend = "marlin"
    weight_type: ClassVar[str]
    sf_vec_size: ClassVar[int] = 0
    sf_dtype: ClassVar[torch.dtype | None] = None

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An NVIDIA GPU from sm75, and Triton."""
        return TritonMinifloatLinearKernel.is_supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The family's weights with 16-bit activations."""
        fits = spec.weight.name == cls.weight_type and cls.sf_dtype in (None, spec.scale_dtype)
        if not fits or (cls.sf_vec_size and spec.block != (1, min(cls.sf_vec_size, spec.k))):
            scale = f" with {cls.sf_dtype} scales of 1x{cls.sf_vec_size} blocks" if cls.sf_vec_size else ""
            return no(f"{spec.weight} in blocks of {spec.block[0]}x{spec.block[1]} with {spec.scale_dtype} scales",
                      f"{cls.weight_type}{scale}")  # fmt: skip
        return super().can_implement(spec)


class MarlinNvFp4LinearKernel(_MarlinKernel):
    """NVFP4 weights with 16-bit activations; warns once that FP4 MMA is not used."""

    families = ("nvfp4",)
    weight_type, sf_vec_size, sf_dtype = "float4_e2m1", 16, torch.float8_e4m3fn

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """See `_MarlinKernel.pack`."""
        _warn_weight_only()
        return super().pack(weight)


@functools.cache
def _warn_weight_only() -> None:
    log.warning("MarlinNvFp4LinearKernel multiplies NVFP4 weights by 16-bit activations; FP4 MMA is not used")


class MarlinMxFp4LinearKernel(_MarlinKernel):
    """MXFP4 weights with 16-bit activations."""

    families = ("mxfp4",)
    weight_type, sf_vec_size, sf_dtype = "float4_e2m1", 32, torch.float8_e8m0fnu


class MarlinMxfp8LinearKernel(_MarlinKernel):
    """MXFP8 weights with 16-bit activations."""

    families = ("mxfp8",)
    weight_type, sf_vec_size, sf_dtype = "float8_e4m3fn", 32, torch.float8_e8m0fnu


class MarlinFP8ScaledMMLinearKernel(_MarlinKernel):
    """FP8 weights with per-tensor, per-channel or block scales and 16-bit activations."""

    families = ("fp8", "fp8_block")
    weight_type = "float8_e4m3fn"

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """E4M3 with float scales of any block; E8M0 scales are MXFP8's."""
        if spec.scale_dtype == torch.float8_e8m0fnu:
            return no("E8M0 scales", "MarlinMxfp8LinearKernel, or scales of a 16- or 32-bit float")
        return super().can_implement(spec)
