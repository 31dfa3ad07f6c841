"""Host overhead of a QuantLinear call over its kernel, beside F.linear, and the first call in a process.

    python benchmarks/overhead.py --out benchmarks/results/NAME.json
    python benchmarks/overhead.py --device cuda --shapes 1024x1024 --rows 1,16,17,64,300 --out benchmarks/results/NAME.json

On a GPU only the time until the call returns counts: the device is synchronized between rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine import machine

import bitline
from bitline.linear import OP


def interleaved(
    calls: dict[str, Callable[[], Any]], wait: Callable[[], Any], rounds: int = 200, repeat: int = 50
) -> dict[str, float]:
    """Microseconds per call, the median over rounds that run every call in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter() - started) / repeat * 1e6)
            wait()
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def measure(n: int, k: int, batch_sizes: list[int], device: str) -> list[dict[str, Any]]:
    w = torch.randn(n, k).to(device, torch.bfloat16)
    layer = bitline.QuantLinear(bitline.quantize(w, "W4A16", group_size=32 if device == "cpu" else 128))
    apply, packed, spec = layer.choice.kernel.apply, layer._packed, layer.spec
    found = []
    for m in batch_sizes:
        x = torch.randn(m, k).to(device, torch.bfloat16)
        batch = x.view(1, m, k)
        with torch.inference_mode():
            times = interleaved({
                "kernel": lambda x=x: apply(x, packed, None, spec), "operator": lambda x=x: OP(x, packed, *layer._op_arguments),
                "layer 2-D": lambda x=x: layer(x), "layer 3-D": lambda x=batch: layer(x),
                "F.linear": lambda x=x: torch.nn.functional.linear(x, w),
            }, torch.cuda.synchronize if device != "cpu" else lambda: None)  # fmt: skip
        over = {name: round(times[name] - times["kernel"], 2) for name in ("layer 2-D", "layer 3-D")}
        row = {"n": n, "k": k, "m": m, "kernel": layer.choice.best.name, "microseconds": times, "over_the_kernel": over}
        found.append(row)
        print(row, flush=True)
    return found


FIRST = """
import json, sys, time
import torch
device, n, k, group = sys.argv[1], *map(int, sys.argv[2:5])
w = torch.randn(n, k).to(device, torch.bfloat16)
torch.nn.functional.linear(w, w)
wait = torch.cuda.synchronize if device != "cpu" else (lambda: None)
seconds = {}
def timed(name, call):
    wait()
    started = time.perf_counter()
    made = call()
    wait()
    seconds[name] = round(1e3 * (time.perf_counter() - started), 2)
    return made
bitline = timed("import bitline", lambda: __import__("bitline"))
weight = timed("quantize", lambda: bitline.quantize(w, "W4A16", group_size=group))
layer = timed("first layer", lambda: bitline.QuantLinear(weight))
timed("second layer", lambda: bitline.QuantLinear(weight))
for m in (1, 16, 64, 300):
    x = torch.randn(m, k).to(device, torch.bfloat16)
    timed(f"first call, M={m}", lambda: layer(x))
    timed(f"second call, M={m}", lambda: layer(x))
print(json.dumps(seconds))
"""


def first_call(device: str, n: int, k: int) -> list[dict[str, float]]:
    """Milliseconds of each step in three fresh processes: the first with an empty Triton cache, the others with its cache."""
    command = [sys.executable, "-c", FIRST, device, str(n), str(k), "32" if device == "cpu" else "128"]
    found = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        for _ in range(3):
            out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
            found.append(json.loads(out.splitlines()[-1]))
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", default="64x64,576x576")
    parser.add_argument("--rows", default="1", help="batch sizes (M)")
    parser.add_argument("--first", default="", help="NxK of the layer whose first call in a process is timed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    batch_sizes = [int(m) for m in options.rows.split(",")]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    report: dict[str, Any] = {"machine": machine(options.device)}
    report["rows"] = [row for n, k in shapes for row in measure(n, k, batch_sizes, options.device)]
    if options.first:
        report["first_call_ms"] = first_call(options.device, *map(int, options.first.split("x")))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
