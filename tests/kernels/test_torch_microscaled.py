"""NVFP4 and MXFP8 by `torch._scaled_mm`, which runs on Blackwell alone.

Here its operands go through torch's own checks of shapes, strides and dtypes (its meta function), and are then dequantized.
"""

import sys
from pathlib import Path

import pytest
import torch

from bitline import types
from bitline.kernels.torch.microscaled import CutlassNvFp4LinearKernel, TorchMxfp8LinearKernel, TorchNvFp4LinearKernel
from bitline.testing.conformance import check_kernel
from bitline.types import ActSpec, LinearSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "providers"))
import fakes

E2M1, E4M3, E8M0 = types.float4_e2m1, types.float8_e4m3fn, torch.float8_e8m0fnu
torch_scaled_mm = torch._scaled_mm


def fake_scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None):
    meta = torch_scaled_mm(*(t.to("meta") for t in (a, b, scale_a, scale_b)), out_dtype=out_dtype)
    fp4 = a.dtype == torch.float4_e2m1fn_x2
    columns, kind = (16, "e4m3") if fp4 else (32, "e8m0")
    values = [fakes.e2m1(t.view(torch.uint8)) if fp4 else t.double() for t in (a, b.t())]
    values = [
        fakes.scaled(v, fakes.tiles(s, v.shape[0], v.shape[1] // columns), columns, kind)
        for v, s in zip(values, (scale_a, scale_b), strict=True)
    ]
    y = (values[0] @ values[1].T).to(out_dtype)
    assert y.shape == meta.shape and y.dtype == meta.dtype
    return y


@pytest.mark.parametrize("kernel", [CutlassNvFp4LinearKernel, TorchNvFp4LinearKernel, TorchMxfp8LinearKernel])
def test_computes_what_the_spec_says(kernel, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", fake_scaled_mm)
    nv = LinearSpec(256, 256, E2M1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 256),
                    act=ActSpec(E2M1, True, "group", 16, scale="e4m3"))  # fmt: skip
    mx = LinearSpec(256, 256, E4M3, (1, 32), scale_dtype=E8M0, act=ActSpec(E4M3, True, "group", 32, scale="e8m0"))
    specs = []
    for n, k in ((256, 256), (48, 208), (33, 77), (1, 16), (130, 1040)):
        spec = nv.replace(n=n, k=k, scale2_block=(n, k)) if kernel is not TorchMxfp8LinearKernel else mx.replace(n=n, k=k)
        specs += [spec, spec.replace(bias=True), spec.replace(act_dtype=torch.float16)]
    assert len(check_kernel(kernel, specs, "cuda:sm100").passed) == len(specs)
