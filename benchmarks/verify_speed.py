"""Time of `bitline verify` on the packaged model, start of the process included.

    python benchmarks/verify_speed.py --out benchmarks/results/cpu_verify.json

Each run is a process of its own with the file in page cache. `seconds` is the whole process, `verifying` the command's own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _machine import machine

CASES = {"every layer": (), "--sample 20": ("--sample", "20")}
RUNS = 3


def run(words: tuple[str, ...]) -> dict[str, Any]:
    """One run of the command."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "bitline", "verify", "smollm2", "--device", "cpu", "--json", *words]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {"seconds": time.perf_counter() - started, "verifying": report["seconds"], "layers": report["layers"],
            "m": report["m"], "activations": report["activations"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "model": "smollm2", "runs": {}}
    for name, words in CASES.items():
        result["runs"][name] = [run(words) for _ in range(RUNS)]
        print(name, [f"{one['seconds']:.1f} s, {one['verifying']:.1f} s" for one in result["runs"][name]])
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
