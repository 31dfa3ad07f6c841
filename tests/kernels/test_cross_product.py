"""Every accepted pair of kernel and layer runs and matches, over the whole product of tests/kernels/product.py.

Kernels of this machine run as they are. Adapters run on stand-ins of their packages, which take what the packages' recorded
signatures and checks take (tests/providers), torch's scaled products as its CPU or its own checks have them, Triton's kernels
under its interpreter. ARK's and zentorch's real kernels go through the same product in tests/providers/inside_*.py.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from product import FORMATS, check_product
from test_torch_micro import checked
from test_torch_micro import product as micro_product

from bitline import Platform
from bitline.kernels import registry
from bitline.kernels.providers import aiter, deep_gemm, fbgemm, humming

sys.path.insert(0, str(Path(__file__).parents[1] / "providers"))
import fakes
import fakes_humming
import fakes_xpu

HERE = Platform.detect("cpu")
BUILT_IN = [e for e in registry.entries() if e.source == "bitline"]
OURS = [(e.kernel, HERE) for e in BUILT_IN if "cpu" in e.platforms and e.kernel.is_supported(HERE)]
ELSEWHERE = (
    "cuda:sm90,flashinfer,deep_gemm,humming", "cuda:sm100,flashinfer,mslk", "cuda:sm120,flashinfer", "rocm:gfx942,aiter",
    "xpu:vllm_xpu_kernels",
)  # fmt: skip
NOT_HERE = ("gluon", "marlin", "triton", "rdna")  # compiled; or interpreted, below
ADAPTERS = {
    e.kernel: Platform.parse(place)
    for place in reversed(ELSEWHERE) for e in BUILT_IN
    if e.kernel.backend not in NOT_HERE and e.kernel not in dict(OURS) and Platform.parse(place).vendor in e.platforms
    and e.kernel.is_supported(Platform.parse(place))
}  # fmt: skip


def scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None, **more):
    """torch's own on a CPU where it has the scales; micro-scaled and block-scaled ones by decoding."""
    if scale_a.dtype != torch.float32:
        return micro_product(a, b, scale_a, scale_b, bias, out_dtype)
    if scale_a.dim() == 2 and scale_a.shape[1] > 1:
        assert scale_a.stride(0) == 1 and scale_b.shape == (b.shape[0] // 128, b.shape[1] // 128) and a.shape[0] % 4 == 0
        return (fakes.blocks(a, scale_a, 1) @ fakes.blocks(b.t(), scale_b.t(), 128).T).to(out_dtype)
    return checked(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, **more)


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins of every package."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(deep_gemm, "installed_packages", lambda: {"deep_gemm": "2"})
    cached = (aiter._product, fbgemm._ops, deep_gemm._deep_gemm, humming._config)
    with ExitStack() as stack:
        gemm = {"mm_fp4": fakes.mm_fp4, "mm_mxfp8": fakes.mm_mxfp8, "fp8_blockscale_gemm_sm90": fakes.fp8_blockscale}
        stack.enter_context(fakes.module("flashinfer.gemm", **gemm))
        for package in (fakes_xpu.xpu, fakes.aiter, fakes.mslk, fakes.deep_gemm, fakes_humming.humming):
            stack.enter_context(package())
        for function in cached:
            function.cache_clear()
        yield
        for function in cached:
            function.cache_clear()


@pytest.mark.parametrize("name", FORMATS)
def test_every_kernel_of_this_machine(name):
    taken = check_product(name, OURS)
    assert taken["ReferenceLinearKernel"] == taken["BatchInvariantLinearKernel"] == max(taken.values()) > 150


@pytest.mark.parametrize("name", FORMATS)
def test_every_adapter(name, packages):
    check_product(name, ADAPTERS.items())


@pytest.mark.parametrize("part", range(4))
def test_every_triton_kernel_interpreted(part):
    pytest.importorskip("triton")
    command = [sys.executable, Path(__file__).with_name("inside_triton.py"), str(part), "4"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 50


def test_every_adapter_is_one_of_them():
    run = {*ADAPTERS, *dict(OURS)}
    left = [e.name for e in BUILT_IN if e.kernel not in run and e.kernel.backend not in (*NOT_HERE, "ark", "zentorch")]
    assert not left, "kernels that no product runs"
