"""Every CPU kernel on layers of small and large models, next to torch's own linear on the dense weight.

    python benchmarks/cpu_kernels.py [--quick] [--shape 4096x4096] [--scheme W4A16] [--m 1] [--out FILE]

A kernel is timed only after its output passed `bitline.testing.check`; one that fails is reported as failed. Calls of all
kernels of a row are interleaved, and each rotates to another copy of the packed weight, so that small layers are read from
memory (cold cache) as in a model. The minimum is reported: other work on the machine only adds time.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bitline import Platform, types
from bitline.kernels import registry
from bitline.select import Policy, choose
from bitline.testing import check
from bitline.testing.generators import inputs, random_weight
from bitline.types import ActSpec, LinearSpec

from _machine import machine  # isort: skip

SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576), (4096, 4096), (11008, 4096))
M = (1, 16, 256)
COLD = 96 << 20  # total bytes of a weight's copies: three times the last-level cache of the machine in the docs
RESULTS = Path(__file__).parent / "results" / "cpu_torch_ops.json"


def scheme(name: str, n: int, k: int) -> LinearSpec:
    """The spec of a named scheme. Groups are 128 columns where that divides K, else 64."""
    g = 128 if k % 128 == 0 else 64
    base = LinearSpec(n, k, types.uint4b8, (1, g), scale_dtype=torch.float16)
    return {
        "W4A16": base,
        "W4A16_ASYM": base.replace(weight=types.uint4, zero="int"),
        "Q8_0": base.replace(weight=types.int8, block=(1, 32)),
        "W8A16": base.replace(weight=types.int8, block=(1, k)),
        "W8A8": base.replace(weight=types.int8, block=(1, k), act=ActSpec(types.int8), scale_dtype=torch.float32),
        "MXFP4A16": base.replace(weight=types.float4_e2m1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
        "FP8A16": base.replace(weight=types.float8_e4m3fn, block=(1, k), scale_dtype=torch.float32),
        "W6A16_G16": base.replace(weight=types.uint6b32, block=(1, 16)),
        "W4A16_FP32": base.replace(act_dtype=torch.float32, scale_dtype=torch.float32),
    }[name]


SCHEMES = ("W4A16", "W4A16_ASYM", "Q8_0", "W8A16", "W8A8", "MXFP4A16", "FP8A16", "W6A16_G16", "W4A16_FP32")


def copies(packed: list[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    size = sum(t.nbytes for t in packed)
    return [packed] + [[t.clone() for t in packed] for _ in range(min(limit, COLD // size))]


def measure(calls: dict[str, list[Callable[[], Any]]], seconds: float, max_seconds: float) -> tuple[dict[str, float], float]:
    """Minimum seconds of each, and the smallest share of the machine that other processes used during a round.

    Calls of all kernels are interleaved, each takes the next copy. Rounds of `seconds` are repeated, for at most
    `max_seconds`, until one had the machine to itself: under other load two threads wait for each other for milliseconds.
    """
    best, other_load = dict.fromkeys(calls, math.inf), math.inf
    start = time.perf_counter()
    while True:
        round_start, cpu_start, own_start, iteration = time.perf_counter(), total_cpu_seconds(), time.process_time(), 0
        while iteration < 6 or (time.perf_counter() - round_start < seconds and iteration < 300):
            for name, variants in calls.items():
                call = variants[iteration % len(variants)]
                before = time.perf_counter()
                call()
                if iteration:
                    best[name] = min(best[name], time.perf_counter() - before)
            iteration += 1
        elapsed = time.perf_counter() - round_start
        others = total_cpu_seconds() - cpu_start - (time.process_time() - own_start)
        other_load = min(other_load, max(0.0, others / elapsed / (os.cpu_count() or 1)))
        if other_load < 0.05 or time.perf_counter() - start > max_seconds:
            return best, round(other_load, 3)
        time.sleep(seconds)


def total_cpu_seconds() -> float:
    """CPU seconds of all processes together, 0 where the system does not report them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, irq, soft, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def benchmark_layer(name: str, n: int, k: int, m_values: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """One scheme and shape at several M."""
    spec = scheme(name, n, k)
    platform = Platform.detect("cpu")
    weight = random_weight(spec)
    bias = None
    state: dict[str, Any] = {}
    for entry in registry.entries():
        kernel = entry.kernel
        offered = "cpu" in entry.platforms and spec.act_dtype in kernel.act_dtypes
        if offered and kernel.is_supported(platform) and kernel.can_implement(spec):
            packed = list(kernel.pack(weight).values())
            state[entry.name] = (kernel, copies(packed, 200))
    dense = [weight.dequantize(spec.act_dtype)]
    dense += [dense[0].clone() for _ in range(min(60, COLD // dense[0].nbytes))]
    found = []
    for m in m_values:
        x = inputs(m, spec)
        choice = choose(spec, platform, Policy(m=(m,)))
        calls, failed = {"F.linear": [partial(torch.nn.functional.linear, x, w) for w in dense]}, {}
        for kernel_name, (kernel, variants) in state.items():
            try:
                check(kernel.apply(x, variants[-1], bias, spec), x, weight)
            except AssertionError as error:
                failed[kernel_name] = str(error)
                continue
            calls[kernel_name] = [partial(kernel.apply, x, p, bias, spec) for p in variants]
        measured, other_load = measure(calls, seconds, 40 * seconds)
        found.append(
            {
                "scheme": name, "n": n, "k": k, "m": m, "chosen": choice.best.name, "failed": failed, "other_work": other_load,
                "torch_linear_s": measured.pop("F.linear"),
                "kernels": {
                    key: {"measured_s": value, "predicted_s": state[key][0].cost(spec, platform, m)}
                    for key, value in measured.items()
                },
            }
        )  # fmt: skip
        print(line(found[-1]), flush=True)
    return found


def line(r: dict[str, Any]) -> str:
    text = f"{r['scheme']:11} {r['n']:5}x{r['k']:<5} M={r['m']:<4} F.linear {us(r['torch_linear_s'])}"
    best = min(r["kernels"], key=lambda name: r["kernels"][name]["measured_s"], default="")
    for name, kernel in sorted(r["kernels"].items(), key=lambda item: item[1]["measured_s"]):
        ratio = kernel["predicted_s"] / kernel["measured_s"]
        text += f" | {short(name)} {us(kernel['measured_s'])} (x{ratio:.2f})"
    if r["chosen"] != best:
        text += f" | CHOSE {short(r['chosen'])}"
    text += f" | other work {r['other_work']:.0%}" if r["other_work"] > 0.05 else ""
    return text + "".join(f" | {short(name)} FAILED: {why}" for name, why in r["failed"].items())


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def short(name: str) -> str:
    return name.removesuffix("LinearKernel")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--shape", action="append", help="NxK, repeatable")
    parser.add_argument("--scheme", action="append", choices=SCHEMES)
    parser.add_argument("--m", type=int, action="append")
    parser.add_argument("--out", type=Path, help=f"where to write the result, {RESULTS.name} by convention")
    args = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in args.shape or ()] or SHAPES
    seconds = 0.1 if args.quick else 0.6
    rows = []
    for n, k in shapes:
        for name in args.scheme or SCHEMES:
            rows += benchmark_layer(name, n, k, tuple(args.m or M), seconds)
    ratios = [v["predicted_s"] / v["measured_s"] for r in rows for v in r["kernels"].values()]
    within = sum(0.5 <= x <= 2 for x in ratios)
    wrong = [r for r in rows if loss(r) > 1.1]
    failed = [r for r in rows if r["failed"]]
    print(f"{within} of {len(ratios)} predictions within a factor of two; {len(wrong)} of {len(rows)} choices lose over 10 %; "
          f"{len(failed)} rows with a failed kernel")  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "cold_bytes": COLD, "rows": rows}, indent=1) + "\n")
    return 1 if failed else 0


def loss(r: dict[str, Any]) -> float:
    """The chosen kernel's time relative to the best one's."""
    measured = {name: v["measured_s"] for name, v in r["kernels"].items()}
    return measured.get(r["chosen"], math.inf) / min(measured.values()) if measured else 1.0


if __name__ == "__main__":
    raise SystemExit(main())
