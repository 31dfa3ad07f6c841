"""FBGEMM's NVFP4 GEMM on Blackwell, from the package's new name (MSLK) or its former one."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from bitline.kernels.base import Packed
from bitline.kernels.microscaled import NVFP4, MicroscaledKernel, swizzle_scales
from bitline.platform import PACKAGES, Platform
from bitline.types import YES, Verdict, no


@functools.cache
def _ops() -> Any:
    """The operators of the installed package; MSLK's where both are installed."""
    if importlib.util.find_spec("mslk") is not None:
        importlib.import_module("mslk.gemm")
        return torch.ops.mslk
    importlib.import_module("fbgemm_gpu.experimental.gen_ai")
    return torch.ops.fbgemm


class FbgemmNvFp4LinearKernel(MicroscaledKernel):
    """NVFP4 by `f4f4bf16` with bfloat16 output; passing a global scale selects NVFP4, without one the operator reads MXFP4."""

    platforms = ("cuda",)
    backend = "fbgemm"
    families = ("nvfp4",)
    priority = -5
    act_dtypes = (torch.bfloat16,)
    fmt = NVFP4

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Blackwell's sm100 and sm103, and one of the two packages."""
        if platform.capability not in (100, 103):
            return no(f"FBGEMM's FP4 kernels are for sm100 and sm103; this is {platform.arch or platform.vendor}", "cuda:sm100")
        either = [PACKAGES[name].install for name in ("mslk", "fbgemm_gpu")]
        if not platform.packages & {"mslk", "fbgemm_gpu"}:
            return no("neither of the packages mslk-cuda and fbgemm-gpu-genai is installed", " or ".join(either))
        return YES

    @classmethod
    def _pack_operand(cls, codes: Tensor, scale: Tensor) -> Packed:
        _ops()
        return {"codes": codes.contiguous(), "scale": swizzle_scales(scale).view(-1)}

    @classmethod
    def _gemm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        y: Tensor = _ops().f4f4bf16(a, w, a_scale.view(-1), scale, global_scale=alpha)
        return y
