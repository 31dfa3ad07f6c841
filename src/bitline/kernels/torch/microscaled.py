"""NVFP4 and MXFP8 on torch's own scaled product (cuBLASLt on Blackwell), with scales in swizzled tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline.kernels.base import Packed
from bitline.kernels.microscaled import MXFP8, NVFP4, MicroscaledKernel, swizzle
from bitline.platform import Platform
from bitline.types import YES, Verdict, no


class _Torch(MicroscaledKernel):
    platforms = ("cuda",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Blackwell."""
        if platform.capability < 100:
            return no(f"{platform.arch or platform.vendor} has no units for micro-scaled formats", "cuda:sm100")
        return YES


class CutlassNvFp4LinearKernel(_Torch):
    """NVFP4 with float32 sums, which the global scale multiplies before the one rounding."""

    backend = "cutlass"
    families = ("nvfp4",)
    micro = NVFP4

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        four = torch.float4_e2m1fn_x2
        return alpha * torch._scaled_mm(
            a.view(four), w.view(four).t(), a_scale.view(-1).view(NVFP4.scale), scale.view(-1).view(NVFP4.scale),
            out_dtype=torch.float32,
        )  # fmt: skip


class TorchMxfp8LinearKernel(_Torch):
    """MXFP8 with float32 sums."""

    backend = "torch"
    families = ("mxfp8",)
    micro = MXFP8

    @classmethod
    def _layout(cls, codes: Tensor, scale: Tensor) -> Packed:
        return {"codes": codes.view(torch.float8_e4m3fn), "scale": swizzle(scale)}

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        return torch._scaled_mm(
            a, w.t(), a_scale.view(-1).view(MXFP8.scale), scale.view(-1).view(MXFP8.scale), out_dtype=torch.float32
        )
