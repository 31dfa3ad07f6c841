"""The Hopper kernels with 4-bit weights and 8-bit activations compile for sm_90a into the instructions claimed. No GPU needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("step", [pytest.param(7, id="7th"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)])
def test_compiles(step, tmp_path):
    from bitline.kernels.hopper.linear import _triton_version

    if not _triton_version():
        pytest.skip(_triton_version().reason)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("hopper_w4a8_targets.py")
    done = subprocess.run([sys.executable, script, str(step)], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "serialized" not in done.stderr + done.stdout, "ptxas serializes wgmma"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 75 // step
    for kernel in found:
        assert kernel["shared"] <= 227 * 1024, kernel
        assert kernel["wgmma"] == ["s32.s8.s8" if kernel["label"].startswith("int8") else "f32.e4m3.e4m3"], kernel
        if "loop" not in kernel:
            continue  # Triton's package has no disassembler here
        small = kernel["kernel"] == "w4a8_small_m"
        assert kernel["a_in_registers"] and kernel["mmas"] >= 4 * kernel["blocks"], kernel
        few_registers = "g32" not in kernel["label"] and "mxfp4" not in kernel["label"]
        assert kernel["spills"] <= (8 if few_registers else 64), f"{kernel['label']} spills in its main loop"
        # Of a thread's 64 codes: 32 instructions of the integer pipe where unpacked to odd numbers (E4M3, small M), else up to 56
        limit = 20 if kernel["label"].startswith("int8") else 56 if "mxfp4" in kernel["label"] or not small else 36
        assert kernel["integer"] <= kernel["blocks"] * (limit + (12 if kernel["blocks"] == 1 else 4)), kernel
