"""Which of Bitline's own GPU kernels runs a weight-only GEMM: W4A16 and the like, with 16- or 32-bit activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitline.kernels.base import Kernel
from bitline.kernels.hopper import experts as hopper_experts
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.triton import experts as portable_experts
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel
from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict


def portable_kernel(spec: LinearSpec) -> type[Kernel]:
    """The portable Triton kernel for the spec's weight type."""
    return TritonMinifloatLinearKernel if spec.weight.kind == "float" else TritonW4A16LinearKernel


def can_implement(spec: LinearSpec) -> Verdict:
    """The verdict of the portable kernel for such weights."""
    return portable_kernel(spec).can_implement(spec)


def kernel_for_platform(spec: LinearSpec, platform: Platform) -> type[Kernel]:
    """The Hopper kernel where it runs and takes the layer, else the portable one."""
    hopper = GluonHopperLinearKernel
    fits = hopper.is_supported(platform) and spec.act_dtype in hopper.act_dtypes and hopper.can_implement(spec)
    return hopper if fits else portable_kernel(spec)


@functools.lru_cache(maxsize=4096)
def kernel_for_device(spec: LinearSpec, device: torch.device) -> type[Kernel]:
    """`kernel_for_platform` for a device of this machine."""
    return kernel_for_platform(spec, Platform.detect(device))


def run_experts(x: Tensor, *arguments: Any, between: Callable[[Tensor], Tensor]) -> Tensor:
    """`run_experts` of the kernel that packed the weights; the last three arguments are both specs and the gate.

    between: applied to rows of the second projection's input.
    """
    up_spec = arguments[-3]
    is_hopper = kernel_for_device(up_spec, x.device) is GluonHopperLinearKernel
    run: Callable[..., Tensor] = hopper_experts.run_experts if is_hopper else portable_experts.run_experts
    return run(x, *arguments, between)
