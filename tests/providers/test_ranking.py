"""How other providers' packages change the choice: a real kernel beats emulation, and the faster peer wins."""

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


@pytest.mark.parametrize("platform", [*PLATFORMS, *PACKAGED])
def test_no_scheme_is_emulated_where_a_kernel_computes_it(platform):
    """But for measured exceptions: at large M a CPU may be fastest with the weight dequantized once, and a GPU with
    fake-quantized activations and a packed weight."""
    m_values = [(1, 256)] if platform.startswith("cpu") else [(1, 256), (1,), (256,), (4096,)]
    for scheme, spec in SCHEMES.items():
        for m in m_values:
            choice = choose(spec, platform, Policy(m=m))
            real = [c.name for c in choice.candidates if c.verdict and not c.kernel.emulates and not c.kernel.batch_invariant]
            measured = choice.kernel.cost_basis(choice.platform) == "measured"
            assert not choice.kernel.emulates or measured or not real, (scheme, platform, m, choice.best.name, real)


@pytest.mark.parametrize(
    ("scheme", "platform", "best"),
    [
        # Measured on an H200 at 4096x4096, M=1: 3.8 us, humming 8.6 us.
        ("W4A16", "cuda:sm90,humming", "GluonHopperLinearKernel"),
        ("W3A16", "cuda:sm90,humming", "TritonW4A16LinearKernel"),  # humming is nondeterministic
        ("W4A8", "cuda:sm80,humming", "HummingInt8ScaledMMLinearKernel"),
        ("NVFP4", "cuda:sm120,flashinfer", "FlashInferB12xNvFp4LinearKernel"),
        ("MXFP4", "cuda:sm100,flashinfer", "FlashInferMxFp4LinearKernel"),
        ("W4A16", "xpu:vllm_xpu_kernels", "XPUwNa16LinearKernel"),
        ("FP8 dynamic", "xpu:vllm_xpu_kernels", "XPUFP8ScaledMMLinearKernel"),
        ("FP8 block", "xpu:vllm_xpu_kernels", "XPUFP8ScaledMMLinearKernel"),
        ("MXFP8", "xpu:vllm_xpu_kernels", "XPUMxFp8LinearKernel"),
        # zentorch repacks the weight in each call: 645 us at 4096x4096, M=1, on two cores of a Zen 5.
        ("W4A16", "cpu:avx512_bf16,avx512_vbmi,zen,zentorch", "CPUWNA16LinearKernel"),
    ],
)
def test_a_package_wins_where_it_should(scheme, platform, best):
    assert choose(SCHEMES[scheme], platform, Policy()).best.name == best
