"""The Triton kernels compile for every kind of GPU, within its shared memory and without register spills. No GPU needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SPILLS = {("sm_80", "3 bits zero M=64"): 48}  # bytes per thread
STEPS = [pytest.param(48, id="48th"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]  # of the variants


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_120", "gfx942", "gfx1100", "gfx1201"])
def test_compiles(target, step, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("triton_targets.py")
    done = subprocess.run([sys.executable, script, target, str(step)], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 35 // step
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        if kernel["usage"] is not None:
            assert kernel["usage"][1] <= SPILLS.get((target, kernel["kernel"]), 16), f"spills: {kernel}"
