"""Resources of the compiled portable Triton kernels, without a GPU: registers, spills, shared memory, instructions per weight.

    python benchmarks/triton_resources.py        writes benchmarks/results/triton_resources.json

`usage` is [registers, bytes of spills] per thread, `loop` the instructions of the main loop over K, and `weights` the weights
that a thread dequantizes per iteration, if no two threads dequantize the same one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _machine import machine

ROOT = Path(__file__).parents[1]
TARGETS = ("sm_75", "sm_80", "sm_90", "sm_120", "gfx942", "gfx1100", "gfx1201")


def compiled(target: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": folder}
        script = ROOT / "tests" / "kernels" / "triton_targets.py"
        done = subprocess.run([sys.executable, script, target], env=env, cwd=folder, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    found = {target: compiled(target) for target in TARGETS}
    lines = ",\n".join(
        f' "{target}": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]" for target, rows in found.items()
    )
    text = f'{{\n "machine": {json.dumps(machine())},\n{lines}\n}}\n'
    (ROOT / "benchmarks" / "results" / "triton_resources.json").write_text(text)
