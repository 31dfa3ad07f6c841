"""The FlashInfer adapters against its recorded signatures; see fakes.py."""

import fakes
import pytest
import torch

from bitline import Platform, types
from bitline.act_quant import fake_quantize
from bitline.kernels import microscaled
from bitline.kernels.providers import flashinfer
from bitline.testing.conformance import check_kernel
from bitline.types import ActSpec, LinearSpec

E2M1, E4M3, E8M0 = types.float4_e2m1, types.float8_e4m3fn, torch.float8_e8m0fnu
NV = LinearSpec(256, 256, E2M1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 256),
                act=ActSpec(E2M1, True, "group", 16, scale="e4m3"))  # fmt: skip
MX4 = LinearSpec(256, 256, E2M1, (1, 32), scale_dtype=E8M0, act=ActSpec(E2M1, True, "group", 32, scale="e8m0"))
MX8 = MX4.replace(weight=E4M3, act=ActSpec(E4M3, True, "group", 32, scale="e8m0"))


def shaped(spec, *shapes):
    specs = []
    for n, k in shapes:
        sized = spec.replace(n=n, k=k, scale2_block=(n, k) if spec.scale2_block else None)
        specs += [sized, sized.replace(bias=True), sized.replace(act_dtype=torch.float16)]
    return specs + ([specs[0].replace(scale2_block=None)] if spec.scale2_block else [])


SHAPES = ((256, 256), (48, 208), (33, 77), (1, 16), (130, 1040))
CASES = [
    (flashinfer.FlashInferCutlassNvFp4LinearKernel, "cuda:sm100,flashinfer", shaped(NV, *SHAPES)),
    (flashinfer.FlashInferTrtllmNvFp4LinearKernel, "cuda:sm103,flashinfer", shaped(NV, *SHAPES)),
    (flashinfer.FlashInferCudnnNvFp4LinearKernel, "cuda:sm120,flashinfer", shaped(NV, *SHAPES)),
    (flashinfer.FlashInferB12xNvFp4LinearKernel, "cuda:sm121,flashinfer", shaped(NV, *SHAPES)),
    (flashinfer.FlashInferMxFp4LinearKernel, "cuda:sm100,flashinfer", shaped(MX4, *SHAPES)),
    (flashinfer.FlashInferCutlassMxfp8LinearKernel, "cuda:sm100,flashinfer", shaped(MX8, (128, 128), (133, 160), (200, 1056))),
]


@pytest.mark.parametrize(("kernel", "platform", "specs"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_computes_what_the_spec_says(kernel, platform, specs):
    with fakes.flashinfer():
        report = check_kernel(kernel, specs, platform)
    refused = [s for s in specs if s.act_dtype not in kernel.act_dtypes]
    assert len(report.passed) == len(specs) - len(refused) > 0, report.refused


@pytest.mark.parametrize("fmt", [microscaled.NVFP4, microscaled.MXFP4, microscaled.MXFP8], ids=lambda m: m.family)
def test_the_input_is_quantized_as_defined(fmt):
    torch.manual_seed(3)
    x = (torch.randn(9, 128) * torch.logspace(-4, 3, 9)[:, None]).bfloat16()
    x[4] = 0
    act = ActSpec(types.SCALAR_TYPES[fmt.weight], True, "group", fmt.sf_vec_size, scale=fmt.act_scale)
    global_scale = torch.tensor([7.5]) if fmt.act_scale == "e4m3" else None
    codes, scales = microscaled.quantize_microscaled(x, fmt, global_scale)
    values = fakes.e2m1(codes) if fmt.codes_per_byte == 2 else codes.double()
    read = fakes.scaled(values, scales, fmt.sf_vec_size, fmt.act_scale) / (1.0 if global_scale is None else global_scale.double())
    assert torch.allclose(read, fake_quantize(x, act, global_scale).double(), rtol=1e-6, atol=0)


def test_refusals_name_the_fix():
    kernel = flashinfer.FlashInferCutlassMxfp8LinearKernel
    for n, k in ((127, 256), (256, 96), (256, 144)):
        assert "128" in kernel.can_implement(MX8.replace(n=n, k=k)).fix
    missing = kernel.is_supported(Platform.parse("cuda:sm100"))
    assert not missing and "pip install flashinfer-python" in missing.fix
    assert "sm90" in kernel.is_supported(Platform.parse("cuda:sm90,flashinfer")).reason
    for spec in (NV.replace(act=None), NV.replace(block_offset=(0, 3)), MX4, NV.replace(act=ActSpec(E2M1, True, "group", 16))):
        assert not flashinfer.FlashInferCutlassNvFp4LinearKernel.can_implement(spec)
