"""FP8 on AMD's gfx942, which reads the fnuz variant of E4M3: codes convert exactly, and `_scaled_mm` gets only such operands."""

import pytest
import torch

from bitline import types
from bitline.kernels.torch import fp8
from bitline.testing.conformance import check_kernel
from bitline.types import ActSpec, LinearSpec

E4M3 = types.float8_e4m3fn
SPEC = LinearSpec(64, 256, E4M3, (1, 256), scale_dtype=torch.float32, act=ActSpec(E4M3))
SPECS = [
    SPEC, SPEC.replace(bias=True, n=33, k=77), SPEC.replace(act_dtype=torch.float16, act_order=True),
    SPEC.replace(block=(64, 256), act=ActSpec(E4M3, False, "tensor")),
    SPEC.replace(block=(64, 256), act=ActSpec(E4M3, True, "tensor")),
]  # fmt: skip


def test_conversion_to_fnuz_is_exact():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    converted = fp8.to_fnuz(codes)
    assert converted.dtype == torch.float8_e4m3fnuz
    torch.testing.assert_close(2 * converted.float(), codes.float(), rtol=0, atol=0, equal_nan=True)


def scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None):
    """As torch's on a gfx942: float8_e4m3fnuz operands, b a transposed view, per-tensor or row-wise scales."""
    assert a.dtype == b.dtype == torch.float8_e4m3fnuz and a.is_contiguous() and b.stride(0) == 1
    assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0 and scale_a.dtype == scale_b.dtype == torch.float32
    if scale_a.numel() > 1 or scale_b.numel() > 1:
        assert out_dtype == torch.bfloat16 and scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
    y = (a.float().double() @ b.float().double()) * scale_a.double() * scale_b.double()
    return (y if bias is None else y + bias.double()).to(out_dtype)


@pytest.mark.parametrize(
    "kernel",
    [
        fp8.PerTensorTorchFP8ScaledMMLinearKernel, fp8.RowWiseTorchFP8ScaledMMLinearKernel,
        fp8.ChannelWiseTorchFP8ScaledMMLinearKernel, fp8.ROCmFP8ScaledMMLinearKernel,
    ],
)  # fmt: skip
def test_computes_what_the_spec_says(kernel, monkeypatch):
    monkeypatch.setattr(fp8, "_uses_fnuz", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    assert len(check_kernel(kernel, SPECS, "rocm:gfx942").passed) >= 2
