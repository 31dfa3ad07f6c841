"""The adapters of vllm-xpu-kernels against its recorded schemas; see fakes.py."""

import fakes
import pytest
import torch

import bitline
from bitline import Platform, types
from bitline.activations import fake_quantize
from bitline.kernels.providers import xpu
from bitline.select import Policy
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, random_weight
from bitline.types import ActSpec, LinearSpec

PLACE = Platform.parse("xpu:vllm_xpu_kernels")
W4 = LinearSpec(64, 256, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
HALF = {"act_dtype": torch.float16, "scale_dtype": torch.float16}
W4S = [
    spec
    for base in (W4, W4.replace(**HALF))
    for spec in (
        base, base.replace(bias=True), base.replace(n=33, k=96, block=(1, 32), bias=True), base.replace(weight=types.int4),
        base.replace(block=(1, 256)), base.replace(weight=types.uint4, zero="int"), base.replace(act_order=True),
        base.replace(weight=types.uint4, zero="int", n=13, k=64, block=(1, 64), act_order=True),
    )
]  # fmt: skip
E4M3 = types.float8_e4m3fn
MX8 = LinearSpec(64, 256, E4M3, (1, 32), scale_dtype=torch.float8_e8m0fnu, act=ActSpec(E4M3, True, "group", 32, scale="e8m0"))
MX8S = [MX8, MX8.replace(bias=True), MX8.replace(n=33, k=77), MX8.replace(n=7, k=130, act_dtype=torch.float16)]


@pytest.mark.parametrize(("kernel", "specs"), [(xpu.XPUwNa16LinearKernel, W4S), (xpu.XPUMxFp8LinearKernel, MX8S)])
def test_computes_what_the_spec_says(kernel, specs):
    with fakes.xpu():
        assert len(check_kernel(kernel, specs, PLACE).passed) == len(specs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [types.uint4b8, types.int4])
def test_w4a8_is_right_to_half_precision(dtype, weight):
    spec = W4.replace(weight=weight, act=ActSpec(types.int8), act_dtype=dtype, n=72, bias=True)
    kernel = xpu.XPUW4A8IntLinearKernel
    with fakes.xpu():
        data = random_weight(spec, 5)
        packed = list(kernel.pack(data).values())
        for m in (0, 1, 2, 17, 65):
            x = inputs(m, spec, m)
            y = kernel.apply(x, packed, data.bias, spec)
            expected = fake_quantize(x, spec.act) @ data.dequantize().T + data.bias.float()
            torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
            assert y.dtype == dtype


def test_w4a8_runs_only_where_it_is_asked_for():
    spec = W4.replace(act=ActSpec(types.int8))
    assert bitline.choose(spec, PLACE, Policy()).best.name != "XPUW4A8IntLinearKernel"
    assert bitline.choose(spec, PLACE, Policy(kernel="XPUW4A8IntLinearKernel")).best.name == "XPUW4A8IntLinearKernel"
    assert "pip install vllm-xpu-kernels" in xpu.XPUW4A8IntLinearKernel.is_supported(Platform.parse("xpu")).fix
    for bad in (W4.replace(k=264), W4.replace(k=96, block=(1, 48)), W4.replace(scale_dtype=torch.float32), spec):
        assert not xpu.XPUwNa16LinearKernel.can_implement(bad)
