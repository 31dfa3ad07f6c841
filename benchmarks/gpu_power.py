"""Clock and power of a GPU while it multiplies 8-bit codes without a pause: whether a layer is bound by the card's power.

    pip install nvidia-ml-py
    python benchmarks/gpu_power.py [--shape 18432x7168] [--m 4096] [--seconds 1] --out FILE

Of Bitline's kernel and torch's operator, on the same codes: microseconds of a product (without quantizing x) in the first
milliseconds after a rest and under sustained load, and there the median SM clock, the power of the second half, energy of a
product, and SM cycles beside those of the tensor cores at their full rate (4,096 multiply-adds a cycle and SM).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import torch
from _machine import machine

from bitline.kernels.registry import kernel_by_name
from bitline.quantized_input import reference_input
from bitline.testing.generators import inputs, random_weight
from bitline.types import ActSpec, LinearSpec, float8_e4m3fn, int8

Call = Callable[[int], torch.Tensor]
COPIES = 2  # of W


def specs(n: int, k: int) -> dict[str, LinearSpec]:
    """By scheme."""
    token = LinearSpec(n, k, float8_e4m3fn, (1, k), scale_dtype=torch.float32, act=ActSpec(float8_e4m3fn))
    blocks = token.replace(block=(128, 128), act=ActSpec(float8_e4m3fn, True, "group", 128))
    return {"FP8 per token": token, "FP8 in blocks": blocks, "W8A8": token.replace(weight=int8, act=ActSpec(int8))}


def calls(spec: LinearSpec, m: int) -> dict[str, Call]:
    """The products of a layer by name."""
    assert spec.act is not None
    weights = [random_weight(spec, seed, "cuda") for seed in range(COPIES)]
    x = reference_input(inputs(m, spec, 1, "cuda"), spec.act)
    kernel = kernel_by_name("GluonHopperScaledMMLinearKernel")
    packed = [list(kernel.pack(w).values()) for w in weights]
    found: dict[str, Call] = {"Bitline": lambda i: kernel.apply_quantized(*x, packed[i % COPIES], None, spec)}
    dtype = torch.int8 if spec.weight == int8 else torch.float8_e4m3fn
    codes = [w.unpacked().view(dtype) for w in weights]
    if spec.weight == int8:
        found["torch _int_mm"] = lambda i: torch._int_mm(x.codes, codes[i % COPIES].t())
    elif spec.act.granularity == "token":
        scales = [w.scales().float().view(1, -1).contiguous() for w in weights]
        by_token = x.scales.view(-1, 1)
        for name, fast in (("torch _scaled_mm", False), ("torch _scaled_mm, use_fast_accum", True)):
            found[name] = lambda i, fast=fast: torch._scaled_mm(  # type: ignore[misc]
                x.codes, codes[i % COPIES].t(), by_token, scales[i % COPIES], out_dtype=torch.bfloat16, use_fast_accum=fast
            )
    return found


def measured(call: Call, m: int, spec: LinearSpec, seconds: float) -> dict[str, Any]:
    """A product's times, clock, power and cycles."""
    device = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    call(0)
    torch.cuda.synchronize()
    time.sleep(0.3)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    marks[0].record()
    for i in range(4):
        call(i)
    marks[1].record()
    marks[1].synchronize()
    burst = marks[0].elapsed_time(marks[1]) / 4 * 1e3
    launches, clocks, watts = int(seconds * 1e6 / burst), [], []
    marks[1].record()
    for i in range(launches):
        call(i)
    marks[2].record()
    while not marks[2].query():
        clocks.append(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))
        watts.append(pynvml.nvmlDeviceGetPowerUsage(device) / 1e3)
        time.sleep(0.02)
    us, mhz = marks[1].elapsed_time(marks[2]) / launches * 1e3, statistics.median(clocks)
    power = statistics.median(watts[len(watts) // 2 :])
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    cycles = {"kilocycles": us * mhz / 1e3, "tensor_kilocycles": m * spec.n * spec.k / sms / 4096 / 1e3}
    rounded = {name: round(count) for name, count in cycles.items()}
    times = {"us": round(burst, 1), "sustained_us": round(us, 1)}
    return {**times, "mhz": mhz, "watts": round(power), "joule": round(us * power / 1e6, 4), **rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="18432x7168", help="NxK")
    parser.add_argument("--m", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1.0, help="of load")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pynvml.nvmlInit()
    n, k = map(int, options.shape.split("x"))
    report: dict[str, Any] = {"machine": machine("cuda"), "rows": []}
    report["power_limit_watts"] = pynvml.nvmlDeviceGetEnforcedPowerLimit(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1e3
    for scheme, spec in specs(n, k).items():
        for name, call in calls(spec, options.m).items():
            row = {
                "scheme": scheme,
                "kernel": name,
                "n": n,
                "k": k,
                "m": options.m,
                **measured(call, options.m, spec, options.seconds),
            }
            print(json.dumps(row), flush=True)
            report["rows"].append(row)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
