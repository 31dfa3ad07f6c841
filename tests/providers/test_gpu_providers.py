"""The AITER, FBGEMM and DeepGEMM adapters against their recorded signatures; see fakes.py."""

import fakes
import pytest
import torch

from bitline import Platform, types
from bitline.errors import InputError
from bitline.kernels.providers import aiter, deep_gemm, fbgemm
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import random_weight
from bitline.types import ActSpec, LinearSpec

E4M3, E2M1 = types.float8_e4m3fn, types.float4_e2m1
W8 = LinearSpec(64, 256, types.int8, (1, 256), scale_dtype=torch.float32, act=ActSpec(types.int8))
W8S = [
    W8, W8.replace(bias=True), W8.replace(n=16, k=16, block=(1, 16)), W8.replace(block=(64, 256)),
    W8.replace(act=ActSpec(types.int8, False, "tensor")), W8.replace(act=ActSpec(types.int8, True, "tensor")),
    W8.replace(act_dtype=torch.float16, block=(64, 256), act=ActSpec(types.int8, False, "tensor")), W8.replace(act_order=True),
]  # fmt: skip
NV = LinearSpec(64, 256, E2M1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(64, 256),
                act=ActSpec(E2M1, True, "group", 16, scale="e4m3"))  # fmt: skip
NVS = [NV.replace(n=n, k=k, scale2_block=(n, k), bias=b) for n, k in ((64, 256), (33, 77), (130, 1040)) for b in (False, True)]
F8 = LinearSpec(256, 256, E4M3, (128, 128), scale_dtype=torch.float32, act=ActSpec(E4M3, True, "group", 128))
F8S = [F8, F8.replace(bias=True), F8.replace(n=200, k=1000), F8.replace(n=48, k=72), F8.replace(n=130, block_offset=(60, 0))]
CASES = [
    (aiter.AiterInt8ScaledMMLinearKernel, fakes.aiter, "rocm:gfx942,aiter", W8S),
    (fbgemm.FbgemmNvFp4LinearKernel, fakes.fbgemm, "cuda:sm100,fbgemm_gpu", NVS),
    (fbgemm.FbgemmNvFp4LinearKernel, fakes.mslk, "cuda:sm103,mslk", NVS),
    (deep_gemm.DeepGemmFp8BlockScaledMMKernel, fakes.deep_gemm, "cuda:sm90,deep_gemm", F8S),
]


@pytest.fixture(autouse=True)
def clear_caches():
    for cached in (aiter._gemm_a8w8, fbgemm._ops, deep_gemm._deep_gemm):
        cached.cache_clear()


@pytest.mark.parametrize(("kernel", "package", "platform", "specs"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_computes_what_the_spec_says(kernel, package, platform, specs):
    with package():
        assert len(check_kernel(kernel, specs, platform).passed) == len(specs)
    bare = Platform.parse(platform.partition(",")[0])
    assert "pip install" in kernel.is_supported(bare).fix


def test_dispatch_on_m(monkeypatch):
    """FlashInfer for M < 32, DeepGEMM from M = 32 on; both read one packed weight."""
    kernel, calls = deep_gemm.FlashInferFp8DeepGEMMDynamicBlockScaledKernel, []
    large = deep_gemm.DeepGemmFp8BlockScaledMMKernel._multiply
    monkeypatch.setattr(deep_gemm, "installed_packages", lambda: {"deep_gemm": "2"})
    monkeypatch.setattr(
        deep_gemm.DeepGemmFp8BlockScaledMMKernel, "_multiply", lambda a, s, m, *rest: calls.append(m) or large(a, s, m, *rest)
    )
    with fakes.flashinfer_fp8(), fakes.deep_gemm():
        assert len(check_kernel(kernel, F8S, "cuda:sm90,flashinfer,deep_gemm").passed) == len(F8S)
        packed = list(kernel.pack(random_weight(F8, 1)).values())
        calls.clear()
        for m in (1, 31, 32, 33):
            kernel.apply(torch.randn(m, 256).bfloat16(), packed, None, F8)
    assert calls == [32, 33]


def test_a_package_of_the_same_name_is_refused():
    with fakes.module("aiter"), pytest.raises(InputError, match="amd-aiter"):
        aiter.AiterInt8ScaledMMLinearKernel.pack(random_weight(W8, 1))
    with fakes.module("deep_gemm"), pytest.raises(InputError, match="deepseek-ai/DeepGEMM"):
        deep_gemm.DeepGemmFp8BlockScaledMMKernel.pack(random_weight(F8, 1))


def test_fbgemm_under_both_package_names():
    """MSLK where it is installed, else FBGEMM's former package; a refusal names both, and that PyPI's `mslk` is a placeholder."""
    kernel = fbgemm.FbgemmNvFp4LinearKernel
    assert all(kernel.is_supported(Platform.parse(f"cuda:sm100,{name}")) for name in ("mslk", "fbgemm_gpu"))
    missing = kernel.is_supported(Platform.parse("cuda:sm100"))
    assert all(part in missing.fix for part in ("pip install mslk-cuda", "fbgemm-gpu-genai", "placeholder"))
    with fakes.fbgemm(), fakes.mslk():
        assert fbgemm._ops() is torch.ops.mslk
