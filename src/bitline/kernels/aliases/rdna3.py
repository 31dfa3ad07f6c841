"""vLLM's RDNA3W4A16LinearKernel by name: runs the portable Triton kernel."""

from __future__ import annotations

from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no

_ARCHITECTURES = ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151")


class RDNA3W4A16LinearKernel(TritonW4A16LinearKernel):
    """W4A16 GPTQ (uint4b8) on RDNA3 by TritonW4A16LinearKernel, compiled for wave32 with tiles for 16-wide WMMA.

    Deterministic: split-K partials are reduced in float32 in a fixed order.
    """

    platforms = ("rocm",)  # type: ignore[assignment]
    backend = "rdna"
    priority = 11

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """gfx110x and gfx115x, and Triton."""
        if platform.arch not in _ARCHITECTURES:
            return no(f"it is for RDNA3, this is {platform.arch or platform.vendor}", "rocm:gfx1100")
        return super().is_supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """uint4b8 of any shape, group size and act-order, 16-bit input."""
        if spec.weight.name != "uint4b8" or spec.zero != "none" or spec.act_dtype.itemsize != 2:
            return no(f"{spec.weight} with zero {spec.zero!r} and input {spec.act_dtype}", "uint4b8 and a 16-bit input")
        return super().can_implement(spec)
