"""FlashInfer's NVFP4, MXFP4 and MXFP8 GEMMs on Blackwell (`mm_fp4`, `mm_mxfp8`)."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitline.kernels.base import Packed
from bitline.kernels.microscaled import MXFP4, MXFP8, NVFP4, MicroscaledKernel, swizzle_scales
from bitline.kernels.providers.common import installed
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight


def _flashinfer_gemm() -> Any:
    return importlib.import_module("flashinfer.gemm")


class _FlashInferKernel(MicroscaledKernel):
    """Base of the FlashInfer kernels.

    mm_backend: the `backend` argument of FlashInfer's function. capabilities: the architectures FlashInfer lists for it.
    """

    platforms = ("cuda",)
    capabilities: ClassVar[tuple[int, ...]] = (100, 103, 107, 110, 120, 121)
    mm_backend: ClassVar[str]

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """The package, and an architecture of the backend."""
        if platform.capability not in cls.capabilities:
            names = ", ".join(f"sm{c}" for c in cls.capabilities)
            return no(f"FlashInfer's {cls.mm_backend} backend is for {names}; this is {platform.arch or platform.vendor}", names)
        return installed(platform, "flashinfer")

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """See MicroscaledKernel.pack."""
        _flashinfer_gemm()  # a package that cannot be imported fails at load time, not in the first call
        return super().pack(weight)

    @classmethod
    def _gemm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        y: Tensor = _flashinfer_gemm().mm_fp4(
            a, w.t(), a_scale, scale.t(), alpha, dtype, None, block_size=cls.fmt.sf_vec_size, use_8x4_sf_layout=False,
            backend=cls.mm_backend, use_nvfp4=cls.fmt is NVFP4,
        )  # fmt: skip
        return y


class FlashInferCutlassNvFp4LinearKernel(_FlashInferKernel):
    """NVFP4 by `mm_fp4`, CUTLASS backend."""

    backend = "flashinfer_cutlass"
    families = ("nvfp4",)
    priority = 5
    fmt, mm_backend = NVFP4, "cutlass"


class FlashInferTrtllmNvFp4LinearKernel(_FlashInferKernel):
    """NVFP4 by `mm_fp4`, TRT-LLM backend, which takes the rows of weights and scales shuffled for its 128-row tiles."""

    backend = "flashinfer_trtllm"
    families = ("nvfp4",)
    act_dtypes = (torch.bfloat16,)
    capabilities = (100, 103, 107)
    fmt, mm_backend = NVFP4, "trtllm"
    pad_n, pad_k = 128, 256

    @classmethod
    def _pack_operand(cls, codes: Tensor, scale: Tensor) -> Packed:
        """Row 4 q + r of each 32 rows moves to q + 8 r: FlashInfer's `shuffle_matrix_a` for an epilogue tile of 128 rows."""
        shuffled = [t.view(-1, 8, 4, t.shape[1]).transpose(1, 2).reshape(t.shape) for t in (codes, scale)]
        return {"codes": shuffled[0], "scale": swizzle_scales(shuffled[1])}


class FlashInferCudnnNvFp4LinearKernel(_FlashInferKernel):
    """NVFP4 by `mm_fp4`, cuDNN backend."""

    backend = "flashinfer_cudnn"
    families = ("nvfp4",)
    priority = -5
    fmt, mm_backend = NVFP4, "cudnn"


class FlashInferB12xNvFp4LinearKernel(_FlashInferKernel):
    """NVFP4 by `mm_fp4`, FlashInfer's own backend for sm120 and sm121."""

    backend = "flashinfer_b12x"
    families = ("nvfp4",)
    capabilities = (120, 121)
    priority = 6
    fmt, mm_backend = NVFP4, "b12x"


class FlashInferMxFp4LinearKernel(_FlashInferKernel):
    """MXFP4 by `mm_fp4`, cuDNN backend. N is padded to whole 128x4 scale tiles."""

    backend = "flashinfer_cudnn"
    families = ("mxfp4",)
    fmt, mm_backend = MXFP4, "cudnn"
    pad_n = 128


class FlashInferCutlassMxfp8LinearKernel(_FlashInferKernel):
    """MXFP8 by `mm_mxfp8`, CUTLASS backend. M is padded to 128."""

    backend = "flashinfer_cutlass"
    families = ("mxfp8",)
    fmt, mm_backend = MXFP8, "cutlass"
    pad_m = 128

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """MXFP8 with N and K of at least 128, below which the package's outputs may be NaN, and K a multiple of 32."""
        if spec.k < 128 or spec.n < 128 or spec.k % 32:
            return no(f"[{spec.n}, {spec.k}] is too small, or K is not a multiple of 32",
                      "N and K of at least 128, K a multiple of 32")  # fmt: skip
        return super().can_implement(spec)

    @classmethod
    def _pack_operand(cls, codes: Tensor, scale: Tensor) -> Packed:
        return {"codes": codes.view(torch.float8_e4m3fn), "scale": swizzle_scales(scale).view(-1)}

    @classmethod
    def _gemm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        y: Tensor = _flashinfer_gemm().mm_mxfp8(a, w.t(), a_scale.view(-1), scale, None, dtype, False, cls.mm_backend)
        return y
