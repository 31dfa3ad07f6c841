"""Emulation kernels: the microscaled families by name, and the batch-invariant reference."""

import pytest
import torch

import bitline
from bitline import types
from bitline.kernels.emulation import (
    EmulationMxFp4LinearKernel,
    EmulationMxfp6LinearKernel,
    EmulationMxfp8LinearKernel,
    EmulationNvFp4LinearKernel,
)
from bitline.kernels.reference import BatchInvariantLinearKernel, ReferenceLinearKernel
from bitline.select import Policy
from bitline.testing.conformance import check_kernel
from bitline.types import ActSpec, LinearSpec

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
MX = LinearSpec(48, 208, types.float4_e2m1, (1, 32), scale_dtype=E8M0)
NV = LinearSpec(48, 208, types.float4_e2m1, (1, 16), scale_dtype=E4M3, scale2_block=(48, 208))


def variants(spec, act):
    """Weight-only and with quantized activations, every dtype, a shard that starts inside a block, a layer of one block."""
    other = [spec.replace(act_dtype=d, bias=True) for d in (torch.float16, torch.float32)]
    return [spec, spec.replace(act=act), *other, spec.replace(block_offset=(0, 8)), spec.replace(n=5, k=7)]


@pytest.mark.parametrize(
    ("kernel", "specs"),
    [
        (EmulationMxFp4LinearKernel, variants(MX, ActSpec(types.float4_e2m1, True, "group", 32, scale="e8m0"))),
        (EmulationNvFp4LinearKernel, variants(NV, ActSpec(types.float4_e2m1, True, "group", 16, scale="e4m3"))),
        (
            EmulationMxfp8LinearKernel,
            variants(MX.replace(weight=types.float8_e4m3fn), ActSpec(types.float8_e4m3fn, True, "group", 32, scale="e8m0")),
        ),
        (EmulationMxfp6LinearKernel, [MX.replace(weight=w) for w in (types.float6_e2m3, types.float6_e3m2)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_family_is_emulated_exactly(kernel, specs):
    report = check_kernel(kernel, specs)
    assert len(report.passed) == len(specs), report.refused


def test_a_kernel_takes_only_its_own_family():
    for kernel in (EmulationMxFp4LinearKernel, EmulationMxfp8LinearKernel, EmulationMxfp6LinearKernel):
        assert not kernel.can_implement(NV)
    assert not EmulationNvFp4LinearKernel.can_implement(MX)
    assert (
        "uint8"
        in EmulationMxfp8LinearKernel.can_implement(MX.replace(weight=types.float8_e4m3fn, scale_dtype=torch.uint8)).reason
    )


def test_emulation_ranks_before_the_reference():
    ranked = [c.name for c in bitline.choose(MX, "cpu").candidates if c.verdict]
    assert ranked.index("EmulationMxFp4LinearKernel") < ranked.index("ReferenceLinearKernel")
    assert bitline.choose(MX, "cpu", Policy(backend="emulation")).best.name == "EmulationMxFp4LinearKernel"


def test_a_batch_invariant_choice_never_dead_ends():
    for spec in (MX, NV, LinearSpec(64, 128, types.uint4b8, (1, 32)), LinearSpec(9, 33, types.uint3, (1, 5), zero="int")):
        for platform in ("cpu", "cuda:sm90", "rocm:gfx942", "xpu"):
            choice = bitline.choose(spec, platform, Policy(batch_invariant=True))
            assert choice.kernel.batch_invariant


def test_outputs_do_not_depend_on_the_batch():
    w = torch.randn(70, 300, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight = bitline.quantize(w, "W4A16", group_size=32)
    x = torch.randn(37, 300, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    layer = bitline.QuantLinear(weight, kernel=BatchInvariantLinearKernel.__name__)
    whole = layer(x)
    for m in (1, 2, 5, 16, 17, 36):
        assert torch.equal(layer(x[:m]), whole[:m]) and torch.equal(layer(x[37 - m :]), whole[37 - m :])
    reference = bitline.QuantLinear(weight, kernel=ReferenceLinearKernel.__name__)
    torch.testing.assert_close(whole, reference(x), rtol=2e-2, atol=2e-2)
