"""The Hopper kernels compile ahead of time for sm_90a, and the machine code is what is claimed of it. No GPU needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Instructions of the inner loop for each weight of a thread, at most: what the kernels had when they were measured.
FEW_ROWS = {"g128": 2.8, "odd g128": 3.0, "odd bias g128": 3.0, "int8": 3.3, "g64 zero": 3.8, "uint8 zero": 4.0, "FP8": 3.1}
RING = {8: 2.0, 16: 3.0, 24: 3.5, 32: 4.0}  # by rows of x
MANY_ROWS = {"g128": 3.1, "int8": 2.5, "uint8 zero": 3.1, "FP8": 3.2}


def bound(label, m):
    if " ring " in label:
        return RING[m]
    table, most = (FEW_ROWS, 3.3) if m <= 16 else (MANY_ROWS, 3.5)
    return max((v for name, v in table.items() if label.endswith(name)), default=most)


def test_compiles(tmp_path):
    from bitline.kernels.hopper.linear import _version

    if not _version():
        pytest.skip(_version().reason)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("hopper_targets.py")
    done = subprocess.run([sys.executable, script], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "serialized" not in done.stderr + done.stdout, "ptxas orders wgmma one after the other"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 80
    for kernel in found:
        label, m = kernel["kernel"].split(" M=")
        assert kernel["shared"] <= 227 * 1024, kernel
        assert kernel["register_a"], f"{kernel['kernel']}: operand A is not in registers"
        if "loop" not in kernel:
            continue  # Triton's package brings no disassembler here
        assert kernel["products"] > 0, kernel
        assert kernel["loop"] <= bound(label, int(m)) * kernel["weights"], kernel
        most = 8 if int(m) > 256 and "g128" not in label else 4 if " ring 7 " in label and int(m) == 24 else 0
        assert kernel["spills"] <= most, f"{kernel['kernel']} spills in its loop"
