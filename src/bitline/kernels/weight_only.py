"""Which of Bitline's own GPU kernels multiplies a packed weight with inputs of 16 and 32 bits."""

from __future__ import annotations

import functools

import torch

from bitline.kernels.base import Kernel
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel
from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict

_PORTABLE = (TritonW4A16LinearKernel, TritonMinifloatLinearKernel)


def takes(spec: LinearSpec) -> Verdict:
    """Does a portable one take the layer; a refusal is that of the one for such weights."""
    return _PORTABLE[spec.weight.kind == "float"].can_implement(spec)


def on(spec: LinearSpec, platform: Platform) -> type[Kernel]:
    """Hopper's where it runs and takes the layer, else the portable one for such weights."""
    hopper = GluonHopperLinearKernel
    fits = hopper.is_supported(platform) and spec.act_dtype in hopper.act_dtypes and hopper.can_implement(spec)
    return hopper if fits else _PORTABLE[spec.weight.kind == "float"]


@functools.lru_cache(maxsize=4096)
def here(spec: LinearSpec, device: torch.device) -> type[Kernel]:
    """The same for a device of this machine."""
    return on(spec, Platform.detect(device))
