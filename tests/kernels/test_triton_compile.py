"""The Triton kernels compile for every kind of GPU, within its shared memory and without register spills. No GPU needed."""

import pytest
from compile_targets import reports

pytest.importorskip("triton")

SPILLS = {("sm_80", "3 bits zero M=64"): 48}  # bytes per thread
STEPS = [pytest.param(48, id="48th"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]  # of the variants


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_120", "gfx942", "gfx1100", "gfx1201"])
def test_compiles(target, step, tmp_path):
    found = reports("triton_targets.py", tmp_path, target, step)
    assert len(found) >= 35 // step
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        if kernel["usage"] is not None:
            assert kernel["usage"][1] <= SPILLS.get((target, kernel["kernel"]), 16), f"spills: {kernel}"
