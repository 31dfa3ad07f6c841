"""Running tests of Triton kernels under Triton's interpreter, in a process of its own: the switch is read at Triton's import."""

import os
import subprocess
import sys

import pytest

from bitline.testing import poison

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
# The tiers of a file's interpreted tests: the sample that `make test` runs, and the rest.
tiers = pytest.mark.parametrize(
    "tier", [pytest.param("not exhaustive", id="sample"), pytest.param("exhaustive", id="rest", marks=pytest.mark.exhaustive)]
)


def run_interpreted(file, tier):
    """Run a test file's `needs_interpreter` tests of a tier, once, from the process that has no interpreter."""
    if INTERPRETED:
        pytest.skip("this is the interpreted process")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", tier, file]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def apply(kernel, weight, x, path=None, has_bf16x2=False):
    """The layer's output, computed in poisoned memory.

    path: None as the kernel itself chooses, "panels" for dequantized panels, or a GemmConfig of the fused kernel.
    """
    from bitline.kernels.triton import launch
    from bitline.kernels.triton.heuristics import GemmConfig

    with poison():
        packed = list(kernel.pack(weight).values())
        bias = None if weight.bias is None else weight.bias.to(x.dtype)
        if path is None and not has_bf16x2:
            return kernel.apply(x, packed, bias, weight.spec)
        if path == "panels":
            return launch.dequantize_then_matmul(x, packed, bias, weight.spec)
        config = path or GemmConfig(2, 64, 16, 4, 2)
        plan = launch.LaunchPlan(weight.spec, config, packed[0].shape[0], bias is not None, has_bf16x2)
        return launch.fused_gemm(x, packed, bias, plan)
