"""TritonFakeQuantLinearKernel under Triton's interpreter, in a process of its own: interpreted and compiled code do not mix."""

import pytest
import torch
from interpreter import needs_interpreter, run_interpreted, tiers

import bitline
from bitline import Platform, types
from bitline.act_quant import fake_quantize
from bitline.kernels.triton_fake_quant import TritonFakeQuantLinearKernel as Kernel
from bitline.kernels.triton_fake_quant import fake_quant_config, fake_quantize_fused
from bitline.select import Policy
from bitline.testing.conformance import check_kernel
from bitline.types import ActSpec, LinearSpec
from thinning import thinned

pytest.importorskip("triton")

E4M3, E2M1, INT8, E8M0 = types.float8_e4m3fn, types.float4_e2m1, types.int8, torch.float8_e8m0fnu
W4 = LinearSpec(33, 200, types.uint4b8, (1, 32), scale_dtype=torch.bfloat16)
MX4 = W4.replace(weight=E2M1, scale_dtype=E8M0, act=ActSpec(E2M1, True, "group", 32, scale="e8m0"))
NV4 = MX4.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(33, 200),
                  act=ActSpec(E2M1, True, "group", 16, scale="e4m3"))  # fmt: skip
FP8 = W4.replace(weight=E4M3, block=(1, 200), scale_dtype=torch.float32, act=ActSpec(E4M3))
SPECS = [
    W4.replace(act=ActSpec(INT8)),
    W4.replace(act=ActSpec(INT8, True, "token", 0, False), act_dtype=torch.float16, act_order=True),
    W4.replace(weight=types.uint3, zero="int", act=ActSpec(INT8, False, "tensor", 0, False), bias=True),
    W4.replace(weight=types.uint4, zero="int", act=ActSpec(INT8, True, "group", 32), act_dtype=torch.float32),
    W4.replace(act=ActSpec(E4M3)), MX4, MX4.replace(act_dtype=torch.float16, bias=True), NV4, NV4.replace(act_order=True),
    MX4.replace(weight=E4M3, act=ActSpec(E4M3, True, "group", 32, scale="e8m0")),
    FP8, FP8.replace(block=(33, 200), act=ActSpec(E4M3, False, "tensor"), bias=True),
    FP8.replace(block=(128, 128), act=ActSpec(E4M3, True, "group", 128)), FP8.replace(act=ActSpec(E4M3, True, "tensor")),
]  # fmt: skip
SCHEMES = [
    *(ActSpec(INT8, True, "token", 0, symmetric, limit=limit) for symmetric in (True, False) for limit in (0.0, 3.5)),
    *(ActSpec(INT8, True, "group", g, symmetric) for g in (32, 64) for symmetric in (True, False)),
    *(ActSpec(INT8, False, "tensor", 0, symmetric) for symmetric in (True, False)),
    ActSpec(types.int4), ActSpec(types.int4, True, "group", 32, False),
    *(ActSpec(kind, *how) for kind in (E4M3, types.float8_e5m2) for how in ((), (False, "tensor"), (True, "group", 128))),
    ActSpec(E4M3, True, "group", 64, limit=2.0),
    *(ActSpec(kind, True, "group", 32, scale="e8m0") for kind in (E2M1, E4M3, types.float8_e5m2)),
    *(ActSpec(kind, True, "group", 32, scale="e8m0") for kind in (types.float6_e2m3, types.float6_e3m2)),
    ActSpec(E2M1, True, "group", 16, scale="e4m3"),
]  # fmt: skip


@tiers
def test_under_the_interpreter(tier):
    run_interpreted(__file__, tier)


@needs_interpreter
@pytest.mark.parametrize("spec", thinned(SPECS, 14), ids=lambda s: s.scheme)
def test_conformance(spec):
    assert check_kernel(Kernel, [spec], Platform.detect("cpu")).passed


@needs_interpreter
@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16, torch.float32], 3))
@pytest.mark.parametrize("act", thinned(SCHEMES, 3), ids=str)
def test_fake_quantization_is_bit_exact(act, dtype):
    """Magnitudes from the smallest to the largest, ties between two codes, zeros; with and without a given scale."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(9, 392, generator=g) * 10.0 ** torch.linspace(-6, 4, 9)[:, None]
    x[1] = 0
    x[2, :32] = torch.arange(32) / 2 - 8
    x[3] = (torch.arange(392) - 200) / 4 * 0.01171875
    x[8, 16:40] = 1e-30
    x = x.to(dtype)
    empty, given = torch.empty(0), torch.tensor([0.01171875])
    points = (torch.tensor([5], dtype=torch.int32), empty) if not act.symmetric and not act.dynamic else (empty,)
    assert fake_quant_config(act, True, True) is not None
    for scale in (given,) if not act.dynamic else (given * 1000, empty) if act.scale == "e4m3" else (empty,):
        for zero in points:
            expected = fake_quantize(x, act, *(t if t.numel() else None for t in (scale, zero))).to(dtype)
            assert torch.equal(fake_quantize_fused(x, act, scale, zero), expected)


@needs_interpreter
def test_a_nan_stays_one():
    for act in (ActSpec(INT8), ActSpec(E4M3, True, "group", 32), MX4.act, NV4.act):
        x = torch.ones(2, 64)
        x[1, 40] = torch.nan
        out = fake_quantize_fused(x, act, torch.empty(0), torch.empty(0))
        assert out[1, 40].isnan() and not out[0].isnan().any() and torch.equal(out[0], fake_quantize(x[:1], act)[0])


def test_schemes_that_the_device_code_does_not_have():
    for act in (ActSpec(E4M3, True, "tensor"), ActSpec(INT8, True, "group", 32, scale="e8m0"),
                ActSpec(E2M1, True, "group", 16, scale="e5m3")):  # fmt: skip
        assert fake_quant_config(act, False, False) is None


def test_it_is_chosen_where_matrix_instructions_are_missing():
    """No activation scheme makes a kernel that dequantizes weights in memory the choice."""
    large = {"n": 4096, "k": 4096}
    for spec in (MX4, NV4.replace(scale2_block=(4096, 4096)), W4.replace(act=ActSpec(INT8, True, "group", 32)),
                 FP8.replace(block=(1, 4096))):  # fmt: skip
        for platform in ("cuda:sm80", "rocm:gfx90a", "rocm:gfx1100", "xpu"):
            choice = bitline.choose(spec.replace(**large), platform, Policy())
            assert choice.best.name == "TritonFakeQuantLinearKernel" and not choice.degraded
    refused = Kernel.can_implement(W4)
    assert "does not quantize activations" in refused.reason and refused.fix
    assert not Kernel.can_implement(MX4.replace(zero="int"))
