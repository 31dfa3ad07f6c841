"""The vllm-xpu-kernels adapters against its recorded schemas, checks and layouts; see fakes_xpu.py."""

import fakes_xpu
import pytest
import torch

import bitline
from bitline import Platform, types
from bitline.act_quant import fake_quantize
from bitline.errors import InputError
from bitline.kernels.providers import xpu, xpu_fp8
from bitline.select import Policy
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, random_weight
from bitline.types import ActSpec, LinearSpec

PLATFORM = Platform.parse("xpu:vllm_xpu_kernels")
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
F8 = LinearSpec(64, 256, E4M3, (1, 256), scale_dtype=torch.float32, act=ActSpec(E4M3))
F8B = LinearSpec(256, 384, E4M3, (128, 128), scale_dtype=torch.float32, act=ActSpec(E4M3, True, "group", 128))
F8S = [
    F8, F8.replace(bias=True, act_dtype=torch.float16), F8.replace(n=33, k=77, act_order=True), F8.replace(n=1, k=40),
    F8.replace(block=(64, 256), act=ActSpec(E4M3, False, "tensor")), F8.replace(scale_dtype=torch.bfloat16, bias=True),
    F8.replace(act=ActSpec(E4M3, True, "tensor")), F8.replace(block=(16, 256), block_offset=(5, 0)),
    F8B, F8B.replace(bias=True, act_dtype=torch.float16), F8B.replace(n=128, k=256),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "specs"),
    [(xpu.XPUwNa16LinearKernel, W4S), (xpu_fp8.XPUMxFp8LinearKernel, MX8S), (xpu_fp8.XPUFP8ScaledMMLinearKernel, F8S)],
)
def test_computes_what_the_spec_says(kernel, specs):
    with fakes_xpu.xpu():
        assert len(check_kernel(kernel, specs, PLATFORM).passed) == len(specs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [types.uint4b8, types.int4])
@pytest.mark.parametrize(("k", "group"), [(256, 128), (96, 32), (40, 40)])
def test_w4a8_is_right_to_half_precision(dtype, weight, k, group, caplog):
    spec = W4.replace(weight=weight, act=ActSpec(types.int8), act_dtype=dtype, n=72, k=k, block=(1, group), bias=True)
    kernel = xpu.XPUW4A8IntLinearKernel
    assert kernel.can_implement(spec)
    with fakes_xpu.xpu():
        data = random_weight(spec, 5)
        packed = list(kernel.pack(data).values())
        assert packed[1].dtype == torch.float16 and ("beyond 65504" in caplog.text) == (dtype == torch.bfloat16)
        for m in (0, 1, 2, 17, 65):
            x = inputs(m, spec, m)
            y = kernel.apply(x, packed, data.bias, spec)
            expected = fake_quantize(x, spec.act) @ data.dequantize().T + data.bias.float()
            torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
            assert y.dtype == dtype


def test_w4a8_runs_only_where_it_is_asked_for():
    spec = W4.replace(act=ActSpec(types.int8))
    assert bitline.choose(spec, PLATFORM, Policy()).best.name != "XPUW4A8IntLinearKernel"
    assert bitline.choose(spec, PLATFORM, Policy(kernel="XPUW4A8IntLinearKernel")).best.name == "XPUW4A8IntLinearKernel"
    assert "pip install vllm-xpu-kernels" in xpu.XPUW4A8IntLinearKernel.is_supported(Platform.parse("xpu")).fix
    for bad in (spec.replace(n=71), spec.replace(k=100, block=(1, 100)), spec.replace(act_order=True), W4,
                spec.replace(weight=types.uint4, zero="int"), spec.replace(k=96, block=(1, 48))):  # fmt: skip
        assert not xpu.XPUW4A8IntLinearKernel.can_implement(bad)
    for bad in (W4.replace(k=264), W4.replace(k=96, block=(1, 48)), W4.replace(scale_dtype=torch.float32), spec):
        assert not xpu.XPUwNa16LinearKernel.can_implement(bad)


def test_w4a8_reports_a_scale_that_overflows_float16():
    data = random_weight(W4.replace(act=ActSpec(types.int8)), 5)
    data.scale[3, 1] = 1e6
    with fakes_xpu.xpu(), pytest.raises(InputError, match="too large for this kernel's float16"):
        xpu.XPUW4A8IntLinearKernel.pack(data)


def test_the_fakes_refuse_other_layouts():
    """Each recorded layout is enforced: the adapter's call passes, and a call with one change fails."""
    with fakes_xpu.xpu():
        data, x = random_weight(W4, 1), inputs(2, W4)
        codes_int4, scale, zero, _ = xpu.XPUwNa16LinearKernel.pack(data).values()
        call = lambda b=codes_int4.t(), s=scale, z=zero: torch.ops._xpu_C.int4_gemm_w4a16(x, b, None, s, z, 128, None)
        assert call().shape == (2, 64)
        with pytest.raises(RuntimeError, match="NT format"):
            call(codes_int4.t().contiguous())
        with pytest.raises(RuntimeError, match="B_scale must be contiguous"):
            call(s=scale.t().contiguous().t())
        for bad in ({"s": scale.t().contiguous()}, {"z": zero.int()}, {"s": scale.float()}):
            with pytest.raises(AssertionError):
                call(**bad)
        codes, token = torch.zeros(2, 256, dtype=torch.int8), torch.ones(2, 1).half()
        w4a8 = lambda a=token, s=scale.half(): torch.ops._xpu_C.int4_gemm_w4a8(
            codes, a, torch.zeros(2, 1).int(), codes_int4.t(), s, zero, 128, None, None
        )
        assert w4a8().dtype == torch.float16
        with pytest.raises(RuntimeError, match="per-token"):
            w4a8(token.view(1, 2))
        with pytest.raises(AssertionError):
            w4a8(s=scale)  # bfloat16: read wrongly


def test_fp8_blocks_that_the_operator_would_misread_are_refused():
    kernel = xpu_fp8.XPUFP8ScaledMMLinearKernel
    for bad in (F8B.replace(k=128), F8B.replace(n=200), F8B.replace(k=330), F8B.replace(act_order=True), F8.replace(act=None),
                F8.replace(block=(1, 64)), F8B.replace(block_offset=(5, 0)), MX8):  # fmt: skip
        assert not kernel.can_implement(bad) and kernel.can_implement(bad).fix
    for spec in (F8, F8B.replace(n=4096, k=4096)):
        assert bitline.choose(spec, PLATFORM, Policy()).best.name == "XPUFP8ScaledMMLinearKernel"
