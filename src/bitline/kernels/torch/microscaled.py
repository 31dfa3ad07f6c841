"""NVFP4 and MXFP8 on Blackwell by `torch._scaled_mm` with swizzled block scales, which runs cuBLASLt's block-scaled GEMM."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline.kernels.base import Packed
from bitline.kernels.microscaled import MXFP8, NVFP4, MicroscaledKernel, swizzle_scales
from bitline.platform import Platform
from bitline.types import YES, Verdict, no


class _TorchMicroscaledKernel(MicroscaledKernel):
    platforms = ("cuda",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Blackwell."""
        if platform.capability < 100:
            return no(f"{platform.arch or platform.vendor} has no block-scaled MMA for microscaled formats", "cuda:sm100")
        return YES


class CutlassNvFp4LinearKernel(_TorchMicroscaledKernel):
    """NVFP4 by cuBLASLt through torch, under the name of vLLM's CUTLASS kernel.

    The GEMM writes float32, which the global scale multiplies before the result is rounded once.
    """

    backend = "cutlass"
    families = ("nvfp4",)
    fmt = NVFP4

    @classmethod
    def _gemm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        fp4 = torch.float4_e2m1fn_x2
        return alpha * torch._scaled_mm(
            a.view(fp4), w.view(fp4).t(), a_scale.view(-1).view(NVFP4.sf_dtype), scale.view(-1).view(NVFP4.sf_dtype),
            out_dtype=torch.float32,
        )  # fmt: skip


class TorchNvFp4LinearKernel(CutlassNvFp4LinearKernel):
    """CutlassNvFp4LinearKernel under the name of vLLM's kernel on `torch._scaled_mm`."""

    backend = "torch"
    priority = -10


class TorchMxfp8LinearKernel(_TorchMicroscaledKernel):
    """MXFP8 by cuBLASLt through torch, with float32 output that is rounded once."""

    backend = "torch"
    families = ("mxfp8",)
    fmt = MXFP8

    @classmethod
    def _pack_operand(cls, codes: Tensor, scale: Tensor) -> Packed:
        return {"codes": codes.view(torch.float8_e4m3fn), "scale": swizzle_scales(scale)}

    @classmethod
    def _gemm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        return torch._scaled_mm(
            a, w.t(), a_scale.view(-1).view(MXFP8.sf_dtype), scale.view(-1).view(MXFP8.sf_dtype), out_dtype=torch.float32
        )
