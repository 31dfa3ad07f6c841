"""The Hopper kernels with quantized activations compile for sm_90a into the instructions claimed of them. No GPU needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("step", [pytest.param(13, id="13th"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)])
def test_compiles(step, tmp_path):
    from bitline.kernels.hopper.linear import _triton_version

    if not _triton_version():
        pytest.skip(_triton_version().reason)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("hopper_scaled_targets.py")
    done = subprocess.run([sys.executable, script, str(step)], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "serialized" not in done.stderr + done.stdout, "ptxas serializes wgmma"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 110 // step
    for kernel in found:
        assert kernel["shared"] <= 227 * 1024, kernel
        want = "s32.s8.s8" if kernel["label"].startswith("int8") else "f32.e4m3.e4m3"
        assert kernel["wgmma"] == [want], kernel
        if "loop" not in kernel:
            continue  # Triton's package has no disassembler here
        assert kernel["mmas"] >= 4, kernel
        assert kernel["spills"] == 0, f"{kernel['label']} spills in its main loop"
        if kernel["kernel"] == "scaled_persistent":  # an addition per accumulator, or two instructions, and little else
            by_row = "offset" in kernel["label"] or "e8m0" in kernel["label"]  # a weight scale for each row, not one for all
            assert kernel["loop"] <= kernel["mmas"] // 4 * (2 * kernel["accumulators"] + (70 if by_row else 60)), kernel
        if kernel["kernel"] == "scaled_large_m":  # one instruction per accumulator
            assert kernel["loop"] <= kernel["mmas"] // 4 * (kernel["accumulators"] + 60), kernel
