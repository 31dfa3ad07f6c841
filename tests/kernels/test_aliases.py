"""Kernels under vLLM's names that run other code: what they take, and whose code runs."""

import pytest
import torch

import bitline
from bitline import Platform, Policy, native, types
from bitline.kernels import linear, weight_only
from bitline.kernels.aliases import wna16
from bitline.kernels.aliases.cpu import CPUInt8ScaledMMLinearKernel
from bitline.kernels.aliases.cutlass import CutlassW4A8LinearKernel
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
from bitline.testing import check_kernel
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


W4 = LinearSpec(64, 256, types.uint4b8, (1, 128), scale_dtype=torch.float16)


@pytest.mark.parametrize(("kernel", "machine", "other"), [
    (wna16.MarlinLinearKernel, "cuda:sm80", "cuda:sm70"), (wna16.MacheteLinearKernel, "cuda:sm90", "cuda:sm80"),
    (wna16.ExllamaLinearKernel, "rocm:gfx942", "cuda:sm70"), (wna16.ConchLinearKernel, "cuda:sm80", "cuda:sm70"),
    (wna16.RDNAHybridW4A16LinearKernel, "rocm:gfx1201", "rocm:gfx942"),
])  # fmt: skip
def test_integer_aliases(kernel, machine, other):
    here = Platform.parse(machine)
    assert kernel.is_supported(here) and here.vendor in kernel.platforms and not kernel.is_supported(Platform.parse(other))
    spec = W4.replace(act_dtype=torch.float16)
    assert kernel.can_implement(spec) and kernel.can_implement(spec.replace(act_order=True))
    for refused, words in ((spec.replace(weight=types.nf4), "nf4"), (spec.replace(act=ActSpec(types.int8)), "activations")):
        verdict = kernel.can_implement(refused)
        assert not verdict and words in verdict.reason and verdict.fix
    ran = weight_only.kernel_for_platform(spec, here)
    assert kernel.cost(spec, here, 1) == ran.cost(spec, here, 1)
    assert bitline.choose(spec, here, Policy(kernel=kernel.__name__)).best.name == kernel.__name__
    assert bitline.choose(spec, here).best.name == ran.__name__  # Bitline's own name comes first
    assert (torch.bfloat16 in kernel.act_dtypes) == (kernel is not wna16.ExllamaLinearKernel)


def test_machete_runs_the_hopper_kernel_and_no_other():
    assert GluonHopperLinearKernel.can_implement(W4) and wna16.MacheteLinearKernel.can_implement(W4)
    ragged = W4.replace(ragged=True, act_order=True)
    assert bool(wna16.MacheteLinearKernel.can_implement(ragged)) == bool(GluonHopperLinearKernel.can_implement(ragged))


@pytest.mark.skipif(native.core() is None, reason="needs the native core")
def test_the_cpu_int8_kernel_conforms():
    spec = LinearSpec(48, 208, types.int8, (1, 208), scale_dtype=torch.float32, act=ActSpec(types.int8))
    static = ActSpec(types.int8, False, "tensor", 0, False)
    specs = [spec, spec.replace(bias=True, act=static), spec.replace(act_dtype=torch.float32, block=(48, 208))]
    assert len(check_kernel(CPUInt8ScaledMMLinearKernel, specs).passed) == 3
    for other in (spec.replace(act=None), spec.replace(weight=types.int4), spec.replace(act=ActSpec(types.float8_e4m3fn))):
        assert not CPUInt8ScaledMMLinearKernel.can_implement(other)


def test_cutlass_w4a8_takes_fp8_activations():
    spec = W4.replace(weight=types.int4, scale_dtype=torch.bfloat16, act=ActSpec(types.float8_e4m3fn))
    assert CutlassW4A8LinearKernel.can_implement(spec)
    for other in (spec.replace(act=ActSpec(types.int8)), spec.replace(act=None)):
        assert "not FP8" in CutlassW4A8LinearKernel.can_implement(other).reason


def test_names_that_differ_in_capitals():
    assert linear.EmulationMxfp4LinearKernel is linear.EmulationMxFp4LinearKernel
    assert linear.TorchMxFp8LinearKernel is linear.TorchMxfp8LinearKernel
