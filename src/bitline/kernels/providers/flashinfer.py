"""FlashInfer's products of NVFP4, MXFP4 and MXFP8 on Blackwell, and its small-batch product of block-scaled FP8 on Hopper."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitline.kernels.base import Packed
from bitline.kernels.microscaled import MXFP4, MXFP8, NVFP4, MicroscaledKernel, swizzle
from bitline.kernels.providers.common import installed
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight


def _gemm() -> Any:
    return importlib.import_module("flashinfer.gemm")


class _FlashInfer(MicroscaledKernel):
    """What all of them share: the package, and the architectures that each backend says it takes."""

    platforms = ("cuda",)
    capabilities: ClassVar[tuple[int, ...]] = (100, 103, 107, 110, 120, 121)
    way: ClassVar[str]

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """The package, on the architectures that it names for this backend."""
        if platform.capability not in cls.capabilities:
            names = ", ".join(f"sm{c}" for c in cls.capabilities)
            return no(f"FlashInfer's {cls.way} backend is for {names}; this is {platform.arch or platform.vendor}", names)
        return installed(platform, "flashinfer")

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """See MicroscaledKernel.pack."""
        _gemm()  # a package that cannot be loaded is an error of loading
        return super().pack(weight)

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        y: Tensor = _gemm().mm_fp4(
            a, w.t(), a_scale, scale.t(), alpha, dtype, None, block_size=cls.micro.columns, use_8x4_sf_layout=False,
            backend=cls.way, use_nvfp4=cls.micro is NVFP4,
        )  # fmt: skip
        return y


class FlashInferCutlassNvFp4LinearKernel(_FlashInfer):
    """NVFP4 by `mm_fp4`, CUTLASS backend: scales in 128x4 tiles."""

    backend = "flashinfer_cutlass"
    families = ("nvfp4",)
    priority = 5
    micro, way = NVFP4, "cutlass"


class FlashInferTrtllmNvFp4LinearKernel(_FlashInfer):
    """NVFP4 by `mm_fp4`, TRT-LLM backend: rows of weights and scales in the order that its 128-row tiles leave them in."""

    backend = "flashinfer_trtllm"
    families = ("nvfp4",)
    act_dtypes = (torch.bfloat16,)
    capabilities = (100, 103, 107)
    micro, way = NVFP4, "trtllm"
    rows_to, columns_to = 128, 256

    @classmethod
    def _layout(cls, codes: Tensor, scale: Tensor) -> Packed:
        """Row 4 q + r of each 32 is put at q + 8 r (the package's `shuffle_matrix_a` with tiles of 128 rows)."""
        shuffled = [t.view(-1, 8, 4, t.shape[1]).transpose(1, 2).reshape(t.shape) for t in (codes, scale)]
        return {"codes": shuffled[0], "scale": swizzle(shuffled[1])}


class FlashInferCudnnNvFp4LinearKernel(_FlashInfer):
    """NVFP4 by `mm_fp4`, cuDNN backend."""

    backend = "flashinfer_cudnn"
    families = ("nvfp4",)
    priority = -5
    micro, way = NVFP4, "cudnn"


class FlashInferB12xNvFp4LinearKernel(_FlashInfer):
    """NVFP4 by `mm_fp4`, its own kernels for sm120 and sm121."""

    backend = "flashinfer_b12x"
    families = ("nvfp4",)
    capabilities = (120, 121)
    priority = 6
    micro, way = NVFP4, "b12x"


class FlashInferMxFp4LinearKernel(_FlashInfer):
    """MXFP4 by `mm_fp4`, cuDNN backend. N is padded to whole tiles of scales."""

    backend = "flashinfer_cudnn"
    families = ("mxfp4",)
    micro, way = MXFP4, "cudnn"
    rows_to = 128


class FlashInferCutlassMxfp8LinearKernel(_FlashInfer):
    """MXFP8 by `mm_mxfp8`, CUTLASS backend. M is padded to 128."""

    backend = "flashinfer_cutlass"
    families = ("mxfp8",)
    micro, way = MXFP8, "cutlass"
    batch_to = 128

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """MXFP8 with N and K of at least 128, below which the package's outputs may be NaN, and whole groups."""
        if spec.k < 128 or spec.n < 128 or spec.k % 32:
            return no(f"[{spec.n}, {spec.k}] is too small or has no whole groups", "N and K of 128 and more, K a multiple of 32")
        return super().can_implement(spec)

    @classmethod
    def _layout(cls, codes: Tensor, scale: Tensor) -> Packed:
        return {"codes": codes.view(torch.float8_e4m3fn), "scale": swizzle(scale).view(-1)}

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        y: Tensor = _gemm().mm_mxfp8(a, w.t(), a_scale.view(-1), scale, None, dtype, False, cls.way)
        return y
