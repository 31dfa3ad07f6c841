"""Block-scaled FP8 on Hopper: DeepGEMM, and FlashInfer's kernel for small M."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Container, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.kernels.base import Packed, roofline
from bitline.kernels.providers.common import installed
from bitline.kernels.torch.fp8_block import BlockWiseTorchFP8ScaledMMLinearKernel
from bitline.platform import PACKAGES, Platform, installed_packages
from bitline.types import LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_SMALL_M = 32  # FlashInfer's kernel below, DeepGEMM or cuBLASLt from here on


@functools.cache
def _deep_gemm() -> Any:
    found = getattr(importlib.import_module("deep_gemm"), "fp8_gemm_nt", None)
    if found is None:
        raise InputError("this version of the package deep_gemm is too old", found="no fp8_gemm_nt in it",
                         fix=PACKAGES["deep_gemm"].install)  # fmt: skip
    return found


def _flashinfer() -> Any:
    return importlib.import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90


class DeepGemmFp8BlockScaledMMKernel(BlockWiseTorchFP8ScaledMMLinearKernel):
    """`deep_gemm.fp8_gemm_nt` with float32 scales: 1x128 for activations, 128x128 for weights. N and K may end inside a block."""

    backend = "deep_gemm"
    priority = 5
    measured: ClassVar[tuple[str, ...]] = ("sm90",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Hopper. On Blackwell the package rounds scales to powers of two, which the layer's spec does not say."""
        if platform.capability != 90:
            return no(f"float32 scales are for Hopper; this is {platform.arch or platform.vendor}", "cuda:sm90")
        return installed(platform, "deep_gemm")

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """See BlockWiseTorchFP8ScaledMMLinearKernel.pack."""
        _deep_gemm()
        return super().pack(weight)

    @classmethod
    def _multiply(
        cls, a: Tensor, a_scale: Tensor, m: int, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See BlockWiseTorchFP8ScaledMMLinearKernel._multiply."""
        codes, scale = packed
        y = torch.empty(a.shape[0], codes.shape[0], dtype=spec.act_dtype, device=a.device)
        _deep_gemm()((a, a_scale), (codes, scale), y, disable_ue8m0_cast=True)
        return _unpad(y, m, bias, spec)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A pass over x, and a GEMM at 80 % of peak."""
        quantize = 3 * m * spec.k / platform.rates.bandwidth + platform.rates.launch
        return quantize + roofline(spec, platform, m, weight_bytes=spec.n * spec.k, rate=platform.rates.of("fp8")) / 0.8


class FlashInferFp8DeepGEMMDynamicBlockScaledKernel(BlockWiseTorchFP8ScaledMMLinearKernel):
    """FlashInfer's `fp8_blockscale_gemm_sm90` for M < 32, else DeepGEMM, or cuBLASLt where DeepGEMM is not installed.

    Both kernels read one packed weight; each call dispatches on M. FlashInfer gets activations that are quantized here: it
    could quantize 16-bit ones itself, but multiplies by 448 / amax, which rounds some codes differently from the definition.
    """

    backend = "flashinfer_deepgemm"
    priority = 8
    measured: ClassVar[tuple[str, ...]] = ("sm90",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Hopper and FlashInfer."""
        if platform.capability != 90:
            return no(f"FlashInfer's block-scaled FP8 is for sm90; this is {platform.arch or platform.vendor}", "cuda:sm90")
        return installed(platform, "flashinfer")

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """See BlockWiseTorchFP8ScaledMMLinearKernel.pack; both kernels take it."""
        _flashinfer()
        return super().pack(weight)

    @classmethod
    def _multiply(
        cls, a: Tensor, a_scale: Tensor, m: int, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See BlockWiseTorchFP8ScaledMMLinearKernel._multiply."""
        if m >= _SMALL_M:
            return _large_m_kernel(installed_packages())._multiply(a, a_scale, m, packed, bias, spec)
        y = _flashinfer()(a, packed[0], a_scale, packed[1], out_dtype=torch.bfloat16)
        return _unpad(y, m, bias, spec)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Small M: a roofline at 70 % of peak and two launches; large M: the cost of the kernel that takes over."""
        if m < _SMALL_M:
            gemm = roofline(spec, platform, m, weight_bytes=spec.n * spec.k, rate=platform.rates.of("fp8"))
            return gemm / 0.7 + platform.rates.launch
        return _large_m_kernel(platform.packages).cost(spec, platform, m)


def _large_m_kernel(packages: Container[str]) -> type[BlockWiseTorchFP8ScaledMMLinearKernel]:
    return DeepGemmFp8BlockScaledMMKernel if "deep_gemm" in packages else BlockWiseTorchFP8ScaledMMLinearKernel


def _unpad(y: Tensor, m: int, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """The layer's rows and columns of y [M', N'], bias added."""
    top = spec.block_offset[0]
    y = y[:m, top : top + spec.n]
    return y.contiguous() if bias is None else y + bias
