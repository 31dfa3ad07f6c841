"""A call of the Hopper kernels: find the launch plan for a layer and M, permute, pad or align x, and launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.kernels.hopper import layout
from bitline.kernels.hopper.heuristics import small_m_config_if_faster
from bitline.kernels.hopper.plans import SmallMPlan, WgmmaPlan
from bitline.kernels.hopper.scheme import DequantScheme, dequant_scheme
from bitline.types import LinearSpec

SMALL_M, PIPELINED_M = 16, 32  # up to here always, and where it is faster, an mma.sync kernel

_plans: dict[tuple[int, int, bool, int], SmallMPlan | WgmmaPlan] = {}


@functools.cache
def num_sms(device: int) -> int:
    """SMs of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def plan_of(spec: LinearSpec, m: int, has_bias: bool, device: int) -> SmallMPlan | WgmmaPlan:
    """The plan of a layer for M on a GPU. `spec` is identified by its id."""
    key = (id(spec), m if m > SMALL_M else 4 if m <= 4 else 8 if m <= 8 else 16, has_bias, device)
    plan = _plans.get(key)
    if plan is None:
        scheme = dequant_scheme(spec)
        assert isinstance(scheme, DequantScheme)
        if len(_plans) > 1 << 16:
            _plans.clear()
        config = None
        if SMALL_M < m <= PIPELINED_M:
            config = small_m_config_if_faster(m, layout.padded_shape(spec.n, spec.k)[0], spec.n, spec.k, scheme)
        if m <= SMALL_M or config:
            plan = _plans[key] = SmallMPlan(spec, scheme, m, has_bias, config)
        else:
            plan = _plans[key] = WgmmaPlan(spec, scheme, m, has_bias, num_sms(device))
    return plan


def run(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """y [M, N]; x [M, K] contiguous. InputError where x is not on the weight's GPU."""
    device = x.get_device()
    if device < 0 or packed[0].get_device() != device:  # the launcher takes any address
        raise InputError("a layer of this kernel and its input are on one GPU", found=f"an input on {x.device}, weights on "
                         f"{packed[0].device}", fix="move them, or choose a kernel for the weight's device")  # fmt: skip
    perm, k = packed[4], spec.k
    if perm.numel():
        x = x.index_select(1, perm)
    plan = plan_of(spec, x.shape[0], bias is not None, device)
    if k % 64 and (plan.pads_k or k % 8):
        x = torch.nn.functional.pad(x, (0, -k % 64))
    elif x.data_ptr() % 16:
        x = x.clone()
    if bias is not None and bias.data_ptr() % 16:
        bias = bias.clone()
    result: Tensor = plan(x, packed, bias)
    return result
