"""Kernels under vLLM's names that run other code: what they take, and whose code runs."""

import pytest
import torch

from bitline import Platform, types
from bitline.kernels import weight_only
from bitline.kernels.aliases.marlin import (
    MarlinFP8ScaledMMLinearKernel,
    MarlinMxFp4LinearKernel,
    MarlinMxfp8LinearKernel,
    MarlinNvFp4LinearKernel,
)
from bitline.kernels.aliases.rdna3 import RDNA3W4A16LinearKernel
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel
from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel
from bitline.types import ActSpec, LinearSpec

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
NV = LinearSpec(64, 256, types.float4_e2m1, (1, 16), scale_dtype=E4M3, scale2_block=(64, 256))
MX4 = LinearSpec(64, 256, types.float4_e2m1, (1, 32), scale_dtype=E8M0)
MX8 = MX4.replace(weight=types.float8_e4m3fn)
FP8 = MX8.replace(block=(1, 256), scale_dtype=torch.float32)
SPECS = {
    MarlinNvFp4LinearKernel: NV,
    MarlinMxFp4LinearKernel: MX4,
    MarlinMxfp8LinearKernel: MX8,
    MarlinFP8ScaledMMLinearKernel: FP8,
}


@pytest.mark.parametrize("kernel", SPECS)
def test_marlin(kernel):
    assert [bool(kernel.can_implement(spec)) for spec in SPECS.values()] == [k is kernel for k in SPECS]
    act = ActSpec(types.float4_e2m1, True, "group", 16, scale="e4m3")
    refused = kernel.can_implement(SPECS[kernel].replace(act=act))
    assert not refused and "16-bit activations" in refused.reason
    assert not kernel.is_supported(Platform.parse("cuda:sm70")) and "cuda" in kernel.platforms


def test_marlin_runs_the_hopper_kernel_where_it_takes_the_layer_and_the_portable_one_elsewhere():
    hopper, ampere = Platform.parse("cuda:sm90"), Platform.parse("cuda:sm80")
    for kernel, spec in SPECS.items():
        assert kernel.is_supported(ampere) and kernel.is_supported(hopper)
        assert weight_only.kernel_for_platform(spec, ampere) is TritonMinifloatLinearKernel
        assert kernel.cost(spec, ampere, 1) == TritonMinifloatLinearKernel.cost(spec, ampere, 1)
        if GluonHopperLinearKernel.is_supported(hopper):
            assert weight_only.kernel_for_platform(spec, hopper) is GluonHopperLinearKernel
            assert kernel.cost(spec, hopper, 1) == GluonHopperLinearKernel.cost(spec, hopper, 1)
    assert weight_only.kernel_for_platform(NV.replace(act_dtype=torch.float32), hopper) is TritonMinifloatLinearKernel
    blocks = FP8.replace(n=300, block=(128, 128))
    assert MarlinFP8ScaledMMLinearKernel.can_implement(blocks)


def test_rdna3():
    kernel, spec = RDNA3W4A16LinearKernel, LinearSpec(64, 256, types.uint4b8, (1, 128), scale_dtype=torch.float16)
    assert kernel.pack.__func__ is TritonW4A16LinearKernel.pack.__func__
    assert kernel.apply.__func__ is TritonW4A16LinearKernel.apply.__func__
    assert kernel.deterministic and kernel.can_implement(spec) and kernel.can_implement(spec.replace(act_order=True))
    assert not kernel.can_implement(spec.replace(weight=types.uint4, zero="int"))
    assert not kernel.can_implement(spec.replace(act_dtype=torch.float32))
    assert kernel.is_supported(Platform.parse("rocm:gfx1100")) and kernel.is_supported(Platform.parse("rocm:gfx1151"))
    assert not kernel.is_supported(Platform.parse("rocm:gfx942"))
