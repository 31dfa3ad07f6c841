"""vLLM's CUTLASS kernels by name. vLLM ships their code with itself; here `torch._int_mm`, `torch._scaled_mm` and Bitline's
kernels run instead."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline.kernels.hopper.w4a8_linear import GluonHopperW4A8LinearKernel
from bitline.kernels.torch.fp8 import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
    RowWiseTorchFP8ScaledMMLinearKernel,
)
from bitline.kernels.torch.fp8_block import BlockWiseTorchFP8ScaledMMLinearKernel
from bitline.kernels.torch.int8_mm import TorchInt8ScaledMMLinearKernel
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no


class CutlassInt8ScaledMMLinearKernel(TorchInt8ScaledMMLinearKernel):
    """W8A8 int8, static or dynamic, with or without zero points: runs `torch._int_mm` (cuBLAS)."""

    platforms = ("cuda",)
    backend = "cutlass"
    priority = -10


class CutlassFP8ScaledMMLinearKernel(ChannelWiseTorchFP8ScaledMMLinearKernel):
    """W8A8 FP8 with per-tensor or per-channel weight and per-tensor or per-token activation scales: runs `torch._scaled_mm`.

    CUTLASS's row-wise GEMM inside torch for per-token scales, M > 1 and bfloat16 output; else an unscaled GEMM (cuBLASLt) and
    scales after it. N and K are padded to multiples of 16.
    """

    platforms = ("cuda",)
    backend = "cutlass"
    priority = -10

    @classmethod
    def _scaled_mm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        rowwise = a_scale.numel() == a.shape[0] > 1 and dtype == torch.bfloat16
        kernel = RowWiseTorchFP8ScaledMMLinearKernel if rowwise else ChannelWiseTorchFP8ScaledMMLinearKernel
        return kernel._scaled_mm(a, a_scale, w, scale, bias, dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The cost of the fused GEMM where one takes these scales."""
        for kernel in (PerTensorTorchFP8ScaledMMLinearKernel, RowWiseTorchFP8ScaledMMLinearKernel):
            if spec.act_dtype in kernel.act_dtypes and kernel.can_implement(spec):
                return kernel.cost(spec, platform, m)
        return super().cost(spec, platform, m)


class CutlassFp8BlockScaledMMKernel(BlockWiseTorchFP8ScaledMMLinearKernel):
    """Block-scaled FP8 on Hopper: runs `torch._scaled_mm` (cuBLASLt)."""

    backend = "cutlass"
    priority = -10


class CutlassW4A8LinearKernel(GluonHopperW4A8LinearKernel):
    """4-bit weights and FP8 activations on Hopper: runs GluonHopperW4A8LinearKernel."""

    backend = "cutlass"
    priority = -10

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """FP8 activations."""
        if spec.act is None or spec.act.dtype.name != "float8_e4m3fn":
            return no("activations are not FP8", "W4AFP8")
        return super().can_implement(spec)
