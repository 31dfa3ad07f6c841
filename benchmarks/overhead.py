"""What a call of QuantLinear costs over its kernel, and what a kernel costs over torch's own operator.

python benchmarks/overhead.py --out benchmarks/results/NAME.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine import machine

import bitline


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int = 200, repeat: int = 50) -> dict[str, float]:
    """Microseconds per call: the median over rounds in which every call takes its turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter() - started) / repeat * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(n: int, k: int) -> dict[str, Any]:
    layer = bitline.QuantLinear(bitline.quantize(torch.randn(n, k), "W4A16", group_size=32), act_dtype=torch.bfloat16)
    x = torch.randn(1, k, dtype=torch.bfloat16)
    token = x.view(1, 1, k)
    apply, packed, spec = layer.choice.kernel.apply, layer._packed, layer.spec
    with torch.inference_mode():
        times = interleaved({
            "kernel": lambda: apply(x, packed, None, spec), "layer 2-D": lambda: layer(x), "layer 3-D": lambda: layer(token),
        })  # fmt: skip
    over = {name: round(times[name] - times["kernel"], 2) for name in ("layer 2-D", "layer 3-D")}
    return {"n": n, "k": k, "kernel": layer.choice.best.name, "microseconds": times, "over_the_kernel": over}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {"machine": machine(), "rows": [measure(n, k) for n, k in ((64, 64), (576, 576))]}
    for row in report["rows"]:
        print(row)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
