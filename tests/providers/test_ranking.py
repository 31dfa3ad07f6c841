"""What other providers' packages change in the choice: a real kernel always beats emulation, and a peer wins where it should."""

import sys
from pathlib import Path

import pytest

from bitline.select import Policy, choose

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_choices import PLATFORMS, SCHEMES

PACKAGED = [
    "cuda:sm80,humming", "cuda:sm89,humming", "cuda:sm90,humming,flashinfer,deep_gemm", "cuda:sm100,humming,flashinfer,mslk",
    "cuda:sm103,flashinfer,fbgemm_gpu", "cuda:sm120,humming,flashinfer", "rocm:gfx90a,aiter", "rocm:gfx942,aiter",
    "rocm:gfx950,aiter", "xpu:vllm_xpu_kernels", "cpu:avx512_bf16,avx512_vbmi,zen,zentorch", "cpu:amx,auto_round_kernel",
]  # fmt: skip


@pytest.mark.parametrize("place", [*PLATFORMS, *PACKAGED])
def test_no_scheme_is_emulated_where_a_kernel_computes_it(place):
    """On a CPU many rows alone may be fastest with the weight dequantized once, and on a GPU the rounded input beside a packed
    weight: where that is measured."""
    rows = [(1, 256)] if place.startswith("cpu") else [(1, 256), (1,), (256,), (4096,)]
    for scheme, spec in SCHEMES.items():
        for m in rows:
            choice = choose(spec, place, Policy(m=m))
            real = [c.name for c in choice.candidates if c.verdict and not c.kernel.emulates and not c.kernel.batch_invariant]
            measured = choice.kernel.cost_basis(choice.platform) == "measured"
            assert not choice.kernel.emulates or measured or not real, (scheme, place, m, choice.best.name, real)


@pytest.mark.parametrize(
    ("scheme", "place", "best"),
    [
        # Measured on an H200 at 4096x4096: 3.8 us with one row and 8.6.
        ("W4A16", "cuda:sm90,humming", "GluonHopperLinearKernel"),
        ("W3A16", "cuda:sm90,humming", "TritonW4A16LinearKernel"),  # humming adds in no fixed order
        ("W4A8", "cuda:sm80,humming", "HummingInt8ScaledMMLinearKernel"),
        ("NVFP4", "cuda:sm120,flashinfer", "FlashInferB12xNvFp4LinearKernel"),
        ("MXFP4", "cuda:sm100,flashinfer", "FlashInferMxFp4LinearKernel"),
        ("W4A16", "xpu:vllm_xpu_kernels", "XPUwNa16LinearKernel"),
        ("FP8 dynamic", "xpu:vllm_xpu_kernels", "XPUFP8ScaledMMLinearKernel"),
        ("FP8 block", "xpu:vllm_xpu_kernels", "XPUFP8ScaledMMLinearKernel"),
        ("MXFP8", "xpu:vllm_xpu_kernels", "XPUMxFp8LinearKernel"),
        # zentorch re-lays the weight in each call: 645 us with one row at 4096x4096 on two cores of a Zen 5.
        ("W4A16", "cpu:avx512_bf16,avx512_vbmi,zen,zentorch", "CPUWNA16LinearKernel"),
    ],
)
def test_a_package_wins_where_it_should(scheme, place, best):
    assert choose(SCHEMES[scheme], place, Policy()).best.name == best
