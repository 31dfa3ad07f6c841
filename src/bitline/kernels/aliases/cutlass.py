"""The layers that the field knows under CUTLASS's name, whose kernels are in no package of their own: torch's do the job."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline.kernels.torch.fp8 import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
    RowWiseTorchFP8ScaledMMLinearKernel,
)
from bitline.kernels.torch.fp8_block import BlockWiseTorchFP8ScaledMMLinearKernel
from bitline.kernels.torch.int8_mm import TorchInt8ScaledMMLinearKernel
from bitline.platform import Platform
from bitline.types import LinearSpec


class CutlassInt8ScaledMMLinearKernel(TorchInt8ScaledMMLinearKernel):
    """W8A8 with and without zero points, static or dynamic, on `torch._int_mm` of CUDA."""

    platforms = ("cuda",)
    backend = "cutlass"
    priority = -10


class CutlassFP8ScaledMMLinearKernel(ChannelWiseTorchFP8ScaledMMLinearKernel):
    """FP8 per tensor or row times FP8 per tensor or token: the fused product where there is one for the scales, else three
    steps. K and N are padded with zeros to multiples of 16 (scales with 1), outputs are cut."""

    platforms = ("cuda",)
    backend = "cutlass"
    priority = -10

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        rowwise = a_scale.numel() == a.shape[0] > 1 and dtype == torch.bfloat16
        kernel = RowWiseTorchFP8ScaledMMLinearKernel if rowwise else ChannelWiseTorchFP8ScaledMMLinearKernel
        return kernel._product(a, a_scale, w, scale, bias, dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """That of the product it would take."""
        for kernel in (PerTensorTorchFP8ScaledMMLinearKernel, RowWiseTorchFP8ScaledMMLinearKernel):
            if spec.act_dtype in kernel.act_dtypes and kernel.can_implement(spec):
                return kernel.cost(spec, platform, m)
        return super().cost(spec, platform, m)


class CutlassFp8BlockScaledMMKernel(BlockWiseTorchFP8ScaledMMLinearKernel):
    """Block-scaled FP8 on Hopper."""

    backend = "cutlass"
    priority = -10
