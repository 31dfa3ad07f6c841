"""The Hopper kernels under compute-sanitizer's four tools, over a grid of small layers; needs an H100 or H200.

    PYTHONPATH=src python tests/gpu/sanitize.py --out benchmarks/results/h200_sanitizer.json

Each tool runs the grid in a process of its own, all at the same time. Weights and inputs are made and checked on the CPU, so that
nearly all that runs on the GPU is ours; torch's allocator is off, so that each tensor has an allocation whose ends are watched.
Two planted faults (a weight that is cut short, one that nobody wrote) show that memcheck and initcheck look where they should.
Fails where a tool reports anything about our kernels, does not finish, or misses its planted fault.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLANTED = {"memcheck": "short", "initcheck": "unwritten"}
OURS = ("decode", "wide")
ROOT = Path(__file__).parents[2]


def grid() -> list[tuple[str, Any, tuple[int, ...]]]:
    """(name, spec, rows): every scheme, with remainders of rows and columns or without."""
    from bitline import types
    from bitline.types import LinearSpec

    odd = LinearSpec(200, 520, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
    even = odd.replace(n=256, k=1024)
    e2m1 = even.replace(weight=types.float4_e2m1)
    rows = (1, 5, 16, 17, 90)
    return [
        ("u4", odd, rows), ("u4 even, bias", even.replace(bias=True), rows), ("u4 g32", odd.replace(block=(1, 32)), rows),
        ("u4 fp16", odd.replace(act_dtype=torch.float16, scale_dtype=torch.float16), rows),
        ("u4 padded", odd.replace(n=67, k=129), rows),
        ("z4", odd.replace(weight=types.uint4, zero="int", block=(1, 64)), rows),
        ("u8", odd.replace(weight=types.uint8b128), rows), ("z8", odd.replace(weight=types.uint8, zero="int"), rows),
        ("MXFP4", e2m1.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu), rows),
        ("NVFP4", e2m1.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 1024)), rows),
        ("FP8", odd.replace(weight=types.float8_e4m3fn, block=(1, 520)), rows),
        ("FP8 g128", odd.replace(weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=torch.float32), rows),
    ]  # fmt: skip


class Runner:
    """Runs layers on the GPU and compares with the reference on the CPU; counts launches."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()

    def layer(self, spec: Any, seed: int) -> tuple[Any, list[torch.Tensor], torch.Tensor | None]:
        from bitline.kernels.hopper.linear import GluonHopperLinearKernel
        from bitline.testing.generators import random_weight

        weight = random_weight(spec, seed)
        packed = [t.cuda() for t in GluonHopperLinearKernel.pack(weight).values()]
        return weight, packed, None if weight.bias is None else weight.bias.to(spec.act_dtype).cuda()

    def run(self, call: Any, weight: Any, m: int, name: str) -> None:
        from bitline.testing import check
        from bitline.testing.generators import inputs

        x = inputs(m, weight.spec, m)
        y = call(x.cuda())
        check(y.cpu(), x, weight)
        self.launches[name] += 1

    def all(self, only: int | None = None) -> None:
        from bitline.kernels.hopper import launch, tiles
        from bitline.kernels.hopper.linear import GluonHopperLinearKernel
        from bitline.kernels.hopper.scheme import Scheme, scheme_of

        cases = grid()
        for i, (name, spec, rows) in enumerate(cases):
            if only is not None and i != only:
                continue
            weight, packed, bias = self.layer(spec, i)
            scheme = scheme_of(spec)
            assert isinstance(scheme, Scheme)
            for m in rows:
                regime = "decode" if m <= launch.DECODE_ROWS else "wide"
                self.run(
                    lambda x, p=packed, b=bias, s=spec: GluonHopperLinearKernel.apply(x, p, b, s), weight, m, f"{regime} {name}"
                )
        for i, shape in enumerate(tiles._COSTS):  # every tile, whole and cut along K
            if only is not None and len(cases) + i != only:
                continue
            spec = cases[i % 2][1]
            weight, packed, bias = self.layer(spec, i)
            for programs in (1, 3):
                m = shape.bm + shape.bm2 - 5
                plan = launch._WidePlan(spec, scheme_of(spec), m, bias is not None, 132, shape._replace(p=programs))  # type: ignore[arg-type]
                cut = "cut" if plan.scratch else "whole"
                self.run(functools.partial(plan, packed=packed, bias=bias), weight, m, f"wide, each tile {cut}")
        if only is None:
            self.two_streams()

    def two_streams(self) -> None:
        """Cut tiles on two streams at once: each has its own flags."""
        from bitline.kernels.hopper import launch, tiles
        from bitline.kernels.hopper.scheme import scheme_of
        from bitline.testing import check
        from bitline.testing.generators import inputs

        weight, packed, _ = self.layer(grid()[0][1], 1)
        spec = weight.spec
        plan = launch._WidePlan(spec, scheme_of(spec), 30, False, 132, next(iter(tiles._COSTS))._replace(p=3))  # type: ignore[arg-type]
        assert plan.scratch
        xs = [inputs(30, spec, seed) for seed in (1, 2)]
        given = [x.cuda() for x in xs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in xs]
        found: list[list[torch.Tensor]] = [[], []]
        for _ in range(4):
            for stream, x, out in zip(streams, given, found, strict=True):
                with torch.cuda.stream(stream):
                    out.append(plan(x, packed, None))
        torch.cuda.synchronize()
        for x, out in zip(xs, found, strict=True):
            for y in out:
                check(y.cpu(), x, weight)
                self.launches["wide, two streams"] += 1

    def planted(self, fault: str) -> None:
        """A launch that a tool must complain about."""
        from bitline.kernels.hopper.linear import GluonHopperLinearKernel

        weight, packed, bias = self.layer(grid()[0][1], 0)
        packed[0] = packed[0][:-1].clone() if fault == "short" else torch.empty_like(packed[0])
        x = torch.ones(1, weight.spec.k, dtype=weight.spec.act_dtype).cuda()
        GluonHopperLinearKernel.apply(x, packed, bias, weight.spec)
        torch.cuda.synchronize()


_WHERE = re.compile(r"\b(?:at|in) (.+?)\+0x")
_SKIP = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Internal", "Target application")


def records(text: str) -> list[tuple[str, str]]:
    """(kernel, first line) of each finding in a tool's output; the kernel is "" where none is named."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if not line.startswith("========="):
            continue
        body = line[9:]
        if body.strip() and not body.startswith("  "):
            found.append((body.strip(), [body]))
        elif found:
            found[-1][1].append(body)
    out = []
    for head, lines in found:
        if not head.startswith(_SKIP):
            where = next((m[1].split("(")[0] for m in map(_WHERE.search, lines) if m), "")
            out.append((where, head))
    return out


def finished(text: str) -> bool:
    """Whether a tool came to its end."""
    return "SUMMARY:" in text


def start(tool: str, folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
    log = folder / f"{tool}{'-'.join(arguments)}.log"
    # Memory is watched in whole allocations, modules are loaded when they are used, API errors are torch's own questions.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "4"}
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--print-limit", "1000", "--log-file", str(log)]
    process = subprocess.Popen([*command, sys.executable, __file__, "--child", *arguments], env=environment,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    return process, log


def supervise(timeout: float) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from _machine import machine

    began = time.perf_counter()
    from bitline.kernels.hopper import tiles

    compiling = [subprocess.Popen([sys.executable, __file__, "--child", "--only", str(i)])
                 for i in range(len(grid()) + len(tiles._COSTS))]  # fmt: skip
    codes = [p.wait(timeout) for p in compiling]
    assert not any(codes), f"the grid fails without a tool: {codes}"
    print(f"{time.perf_counter() - began:.0f} s: compiled", flush=True)
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    report: dict[str, Any] = {"machine": machine("cuda"), "compute_sanitizer": version, "tools": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {(tool, ""): start(tool, folder) for tool in TOOLS}
        runs |= {(tool, fault): start(tool, folder, "--planted", fault) for tool, fault in PLANTED.items()}
        for (tool, fault), (process, log) in runs.items():
            left = max(1.0, timeout - (time.perf_counter() - began))
            try:
                output = process.communicate(timeout=left)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                output = (process.communicate()[0] or "") + "\nout of time"
            text = log.read_text() if log.exists() else ""
            found = records(text)
            ours = [f"{kernel}: {head}" for kernel, head in found if kernel in OURS or (fault == "" and not kernel)]
            row = report["tools"].setdefault(tool, {})
            print(f"{time.perf_counter() - began:.0f} s: {tool} {fault}", process.returncode, dict(Counter(found)), flush=True)
            if fault:
                row["planted"] = {"fault": fault, "reports": len(ours)}
                continue
            last = output.strip().splitlines()[-1:] or [""]
            launches = json.loads(last[0]) if last[0].startswith("{") else {}
            row |= {
                "finished": finished(text) and process.returncode == 0 and bool(launches), "reports": len(ours),
                "reports_elsewhere": dict(Counter(k for k, _ in found if k not in OURS)), "examples": ours[:20],
                "seconds": round(time.perf_counter() - began, 1), "launches": launches,
            }  # fmt: skip
            if not row["finished"]:
                print(output[-3000:], text[-3000:])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--only", type=int)
    parser.add_argument("--planted")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child:
        runner = Runner()
        with torch.inference_mode():
            if options.planted:
                runner.planted(options.planted)
            else:
                runner.all(options.only)
        print(json.dumps(runner.launches))
        return
    report = supervise(options.timeout)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    bad = [t for t, row in report["tools"].items()
           if not row["finished"] or row["reports"] or ("planted" in row and not row["planted"]["reports"])]  # fmt: skip
    sys.exit(f"found by, or not found by: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
