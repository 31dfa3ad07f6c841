"""The layers that the field knows under Marlin's name, whose kernels are in no package of their own.

The Hopper kernel does the job where it runs and takes the layer, the portable Triton kernel on all other NVIDIA GPUs. Inputs keep
16 bits: a scheme that quantizes its input is refused, since the outputs would be others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bitline.kernels import weight_only
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

log = logging.getLogger("bitline")


class _Marlin(Kernel):
    platforms = ("cuda",)
    backend = "marlin"
    measured = ("sm90",)
    priority = -10
    act_dtypes = (torch.bfloat16, torch.float16)
    weight: ClassVar[str]
    columns: ClassVar[int] = 0  # of a scale; 0 for any block
    scales: ClassVar[torch.dtype | None] = None

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An NVIDIA GPU from sm75, and Triton."""
        return TritonMinifloatLinearKernel.is_supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The family's weights; inputs of 16 bits."""
        fits = spec.weight.name == cls.weight and cls.scales in (None, spec.scale_dtype)
        if not fits or (cls.columns and spec.block != (1, min(cls.columns, spec.k))):
            scale = f" with a scale of {cls.scales} for {cls.columns} columns" if cls.columns else ""
            return no(f"{spec.weight} in blocks of {spec.block[0]}x{spec.block[1]} with {spec.scale_dtype} scales",
                      f"{cls.weight}{scale}")  # fmt: skip
        if spec.act is not None:
            return no(f"computes with 16-bit inputs, and the scheme's are {spec.act}", "a weight-only scheme")
        return TritonMinifloatLinearKernel.can_implement(spec)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """As the kernel that does it on the weight's device."""
        return weight_only.here(weight.spec, weight.device).pack(weight)

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        return weight_only.here(spec, x.device).apply(x, packed, bias, spec)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """That of the kernel that does it."""
        return weight_only.on(spec, platform).cost(spec, platform, m)

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Of the portable kernel; Hopper's differs by its padding."""
        return TritonMinifloatLinearKernel.packed_bytes(spec)


class MarlinNvFp4LinearKernel(_Marlin):
    """NVFP4 weights with 16-bit inputs; a warning says so once."""

    families = ("nvfp4",)
    weight, columns, scales = "float4_e2m1", 16, torch.float8_e4m3fn

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """See `_Marlin.pack`."""
        _warn()
        return super().pack(weight)


@functools.cache
def _warn() -> None:
    log.warning("MarlinNvFp4LinearKernel multiplies NVFP4 weights with 16-bit inputs: FP4 units, if there are any, are not used")


class MarlinMxFp4LinearKernel(_Marlin):
    """MXFP4 weights with 16-bit inputs."""

    families = ("mxfp4",)
    weight, columns, scales = "float4_e2m1", 32, torch.float8_e8m0fnu


class MarlinMxfp8LinearKernel(_Marlin):
    """MXFP8 weights with 16-bit inputs."""

    families = ("mxfp8",)
    weight, columns, scales = "float8_e4m3fn", 32, torch.float8_e8m0fnu


class MarlinFP8ScaledMMLinearKernel(_Marlin):
    """FP8 weights per tensor, row or block with 16-bit inputs."""

    families = ("fp8", "fp8_block")
    weight = "float8_e4m3fn"

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """E4M3 with float scales of whatever block; E8M0 scales are MXFP8's."""
        if spec.scale_dtype == torch.float8_e8m0fnu:
            return no("E8M0 scales", "MarlinMxfp8LinearKernel, or scales of a 16- or 32-bit float")
        return super().can_implement(spec)
