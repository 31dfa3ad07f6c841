"""Dynamic quantization per tensor: a launch that works out the scale of all of x, which the kernels then take as a static one."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from bitline.kernels.hopper import runtime
from bitline.kernels.hopper.runtime import TypedPointer
from bitline.kernels.hopper.scaled_scheme import ActTraits
from bitline.kernels.hopper.workspace import workspace
from bitline.types import ActSpec, LinearSpec

_COLUMNS, _CTAS = 4096, 264  # elements of x that a CTA reads at a time; CTAs, two for each SM


@functools.cache
def device_code() -> Any:
    """The kernel."""
    from bitline.kernels.hopper.device.tensor_scale import tensor_scale

    return tensor_scale


def is_dynamic_per_tensor(act: ActSpec | None) -> bool:
    """Whether all of x has one scale, which depends on it."""
    return act is not None and act.dynamic and act.granularity == "tensor"


def tensor_scale_us(spec: LinearSpec, m: int) -> float:
    """Guessed time of the launch for x [m, K], 0 where there is none."""
    return 2.0 + m * spec.k * 2 / 3.5e6 if is_dynamic_per_tensor(spec.act) else 0.0


@functools.lru_cache(maxsize=256)
def _constants(act: ActSpec) -> tuple[ActTraits]:
    fp8 = act.dtype.kind == "float"
    max_code = act.dtype.max() if fp8 else 127.5
    return (ActTraits(fp8, "tensor", False, False, 0, max_code, torch.finfo(torch.float32).eps, _COLUMNS),)


def scale_of(x: Tensor, act: ActSpec) -> Tensor:
    """float32 [1], the scale of x: contiguous, its size a multiple of 8."""
    scale = x.new_empty(1, dtype=torch.float32)
    stream = runtime.raw_stream(x.get_device())
    flags = workspace(x, 0, stream)[1]
    ctas = min(_CTAS, -(-x.numel() // _COLUMNS))
    scalars = (x.numel() // 8, act.limit or math.inf, ctas)
    constants = _constants(act)
    key = ("tensor_scale", constants, x.dtype, x.get_device())
    binary = runtime.binaries.get(key)
    if binary is None:
        args = (x, scale, TypedPointer(flags, "i32"), *scalars)
        options = {"num_warps": 4, "launch_pdl": True}
        runtime.binaries[key] = runtime.compile_and_run(device_code(), ctas, args, constants, options)
    else:
        at = flags if isinstance(flags, int) else flags.data_ptr()
        binary(ctas, stream, (x.data_ptr(), scale.data_ptr(), at, *scalars, *constants))
    return scale
