"""The DeepGEMM and FlashInfer block-scaled FP8 kernels on Hopper, where their packages are installed."""

import importlib.util

import pytest
import torch

from bitline import Platform, types
from bitline.kernels.providers.deep_gemm import (
    DeepGemmFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
)
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import ActSpec, LinearSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or Platform.detect("cuda").capability != 90, reason="both packages' kernels are for Hopper"
    ),
]
E4M3 = types.float8_e4m3fn
BLOCK = LinearSpec(256, 512, E4M3, (128, 128), scale_dtype=torch.float32, act=ActSpec(E4M3, True, "group", 128))
SPECS = [BLOCK, BLOCK.replace(bias=True, n=200, k=330), BLOCK.replace(n=33, k=128), BLOCK.replace(block_offset=(72, 0))]
PACKAGES = {DeepGemmFp8BlockScaledMMKernel: "deep_gemm", FlashInferFp8DeepGEMMDynamicBlockScaledKernel: "flashinfer"}
KERNELS = [
    pytest.param(kernel, marks=pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}"))
    for kernel, package in PACKAGES.items()
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
@pytest.mark.parametrize("kernel", KERNELS)
def test_conformance(kernel, spec):
    assert check_kernel(kernel, [spec], device="cuda").passed


@pytest.mark.parametrize("m", [1, 8, 16, 31, 32, 200, 1000])
@pytest.mark.parametrize("kernel", KERNELS)
def test_large_layers(kernel, m):
    for n, k in ((4096, 4096), (2112, 1024)):
        spec = BLOCK.replace(n=n, k=k)
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight, x = make(spec, 1, "cuda"), given(m, spec, m, "cuda")
            judge(kernel.apply(x, list(kernel.pack(weight).values()), None, spec), x, weight)
