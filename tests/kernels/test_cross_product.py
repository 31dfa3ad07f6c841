"""Every kernel runs and matches on every layer of the grid (tests/kernels/layer_grid.py) that it accepts.

Kernels of this machine run as they are. Adapters run on fakes of their packages, which accept what the packages' recorded
signatures and checks accept (tests/providers); `torch._scaled_mm` runs through its own meta checks; Triton kernels
run under its interpreter. The real ARK and zentorch go through the same grid in tests/providers/real_*.py.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from layer_grid import FORMATS, check_grid
from test_torch_microscaled import fake_scaled_mm, torch_scaled_mm

from bitline import Platform
from bitline.kernels import registry
from bitline.kernels.hopper.scaled_linear import GluonHopperScaledMMLinearKernel
from bitline.kernels.providers import aiter, deep_gemm, fbgemm, humming
from thinning import thinned

sys.path.insert(0, str(Path(__file__).parents[1] / "providers"))
import fakes
import fakes_humming
import fakes_xpu

HERE = Platform.detect("cpu")
BUILT_IN = [e for e in registry.entries() if e.source == "bitline"]
OURS = [(e.kernel, HERE) for e in BUILT_IN if "cpu" in e.platforms and e.kernel.is_supported(HERE)]
PLATFORMS = (
    "cuda:sm90,flashinfer,deep_gemm,humming", "cuda:sm100,flashinfer,mslk", "cuda:sm120,flashinfer", "rocm:gfx942,aiter",
    "xpu:vllm_xpu_kernels",
)  # fmt: skip
COMPILED = (
    "gluon",
    "marlin",
    "machete",
    "exllama",
    "conch",
    "triton",
    "rdna",
)  # run on GPUs; the Triton kernels interpreted, below


def runs_on_gpus(kernel):
    """Whether a kernel is Triton or Gluon code of Bitline's, maybe under another name."""
    return kernel.backend in COMPILED or issubclass(kernel, GluonHopperScaledMMLinearKernel)


ADAPTERS = {
    e.kernel: Platform.parse(name)
    for name in reversed(PLATFORMS) for e in BUILT_IN
    if not runs_on_gpus(e.kernel) and e.kernel not in dict(OURS) and Platform.parse(name).vendor in e.platforms
    and e.kernel.is_supported(Platform.parse(name))
}  # fmt: skip


def scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None, **more):
    """A float64 GEMM of the dequantized operands, after torch's own checks. torch's CPU GEMM does not stand in for it, since
    oneDNN, which runs it on CPUs with AMX, takes no row-wise scales."""
    if scale_a.dtype != torch.float32:
        return fake_scaled_mm(a, b, scale_a, scale_b, bias, out_dtype)
    if scale_a.dim() == 2 and scale_a.shape[1] > 1:
        assert scale_a.stride(0) == 1 and scale_b.shape == (b.shape[0] // 128, b.shape[1] // 128) and a.shape[0] % 4 == 0
        return (fakes.blocks(a, scale_a, 1) @ fakes.blocks(b.t(), scale_b.t(), 128).T).to(out_dtype)
    meta = [None if t is None else t.to("meta") for t in (a, b, scale_a, scale_b, bias)]
    checked = torch_scaled_mm(*meta[:4], bias=meta[4], out_dtype=out_dtype, **more)
    y = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
    y = (y if bias is None else y + bias.double()).to(out_dtype)
    assert y.shape == checked.shape and y.dtype == checked.dtype
    return y


@pytest.fixture
def packages(monkeypatch):
    """Fakes of every package."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(deep_gemm, "installed_packages", lambda: {"deep_gemm": "2"})
    cached = (aiter._gemm_a8w8, fbgemm._ops, deep_gemm._deep_gemm, humming._layer_config)
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


@pytest.mark.parametrize("name", thinned(FORMATS, 12))
def test_every_kernel_of_this_machine(name):
    accepted = check_grid(name, OURS)
    assert accepted["ReferenceLinearKernel"] == accepted["BatchInvariantLinearKernel"] == max(accepted.values()) > 150


@pytest.mark.parametrize("name", thinned(FORMATS, 12, start=6))
def test_every_adapter(name, packages):
    check_grid(name, ADAPTERS.items())


# Every `parts`-th format from `part` on: one format, and the whole grid in four processes.
INTERPRETED = [(1, 35), *(pytest.param((part, 4), marks=pytest.mark.exhaustive) for part in range(4))]


@pytest.mark.parametrize("part_of", INTERPRETED, ids=lambda pair: f"{pair[0]} of {pair[1]}")
def test_every_triton_kernel_interpreted(part_of):
    pytest.importorskip("triton")
    command = [sys.executable, Path(__file__).with_name("interpreted_grid.py"), *map(str, part_of)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 5


def test_no_kernel_is_missing_from_the_grid():
    run = {*ADAPTERS, *dict(OURS)}
    others = [e for e in BUILT_IN if e.kernel not in run and not runs_on_gpus(e.kernel)]
    missing = [e.name for e in others if e.kernel.backend not in ("ark", "zentorch")]
    assert not missing, "kernels that the grid never runs"
