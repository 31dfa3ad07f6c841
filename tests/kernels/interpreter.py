"""Tests of Triton kernels run under its interpreter, in a process of their own: the switch is read when Triton is imported."""

import os
import subprocess
import sys

import pytest

from bitline.testing import poison

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


def run_inside(file):
    """Run a test file's tests under the interpreter, once, from the process that has none."""
    if INTERPRETED:
        pytest.skip("this is the interpreted process")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def apply(kernel, weight, x, how=None, packed_bfloat=False):
    """The product, out of poisoned memory. how: None as the kernel itself chooses, "panels", or a tile of the fused kernel."""
    from bitline.kernels.triton import launch
    from bitline.kernels.triton.heuristics import Tile

    with poison():
        packed = list(kernel.pack(weight).values())
        bias = None if weight.bias is None else weight.bias.to(x.dtype)
        if how is None and not packed_bfloat:
            return kernel.apply(x, packed, bias, weight.spec)
        if how == "panels":
            return launch.by_panels(x, packed, bias, weight.spec)
        tile = how or Tile(2, 64, 16, 4, 2)
        return launch.fused(x, packed, bias, launch.Plan(weight.spec, tile, packed[0].shape[0], bias is not None, packed_bfloat))
