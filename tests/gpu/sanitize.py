"""The Hopper kernels under compute-sanitizer's four tools, over a grid of small layers; needs an H100 or H200.

    PYTHONPATH=src python tests/gpu/sanitize.py --out benchmarks/results/h200_sanitizer.json

Each tool runs the grid in a process of its own, all at the same time. Weights and inputs are made and checked on the CPU, so that
nearly all that runs on the GPU is ours; torch's caching allocator is off, so that each tensor is an allocation with checked
bounds. Two planted faults (a weight that is too short, one that was never written) show that memcheck and initcheck look where
they should. A report whose lines are all a kernel's definition or its `warp_specialize` is about the prologue that Triton
generates for warp specialization; such ones are counted apart, beside what the same tool reports of `specialized`, which does
nothing else. Fails where a tool reports anything else about our kernels, does not finish, or misses its planted fault.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLANTED = {"memcheck": "short", "initcheck": "unwritten"}
ROOT = Path(__file__).parents[2]
DEVICE = ROOT / "src" / "bitline" / "kernels" / "hopper" / "device"
OURS = {name: DEVICE / f"{name}.py" for name in ("gemv_mma", "small_m_pipelined", "wgmma_persistent")}  # kernel -> its file
OURS["specialized"] = Path(__file__).with_name("specialized.py")
BEGAN = time.perf_counter()


def grid() -> list[tuple[str, Any, tuple[int, ...]]]:
    """(name, spec, values of M): every scheme, with remainders of N and K or without."""
    from bitline import types
    from bitline.types import LinearSpec

    odd = LinearSpec(200, 520, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
    even = odd.replace(n=256, k=1024)
    e2m1 = even.replace(weight=types.float4_e2m1)
    batches = (1, 5, 16, 17, 90)
    return [
        ("u4", odd, batches), ("u4 even, bias", even.replace(bias=True), batches),
        ("u4 g32", odd.replace(block=(1, 32)), batches),
        ("u4 fp16", odd.replace(act_dtype=torch.float16, scale_dtype=torch.float16), batches),
        ("u4 padded", odd.replace(n=67, k=129), batches),
        ("z4", odd.replace(weight=types.uint4, zero="int", block=(1, 64)), batches),
        ("u8", odd.replace(weight=types.uint8b128), batches), ("z8", odd.replace(weight=types.uint8, zero="int"), batches),
        ("MXFP4", e2m1.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu), batches),
        ("NVFP4", e2m1.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 1024)), batches),
        ("FP8", odd.replace(weight=types.float8_e4m3fn, block=(1, 520)), batches),
        ("FP8 g128", odd.replace(weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=torch.float32), batches),
    ]  # fmt: skip


def small_m_configs() -> list[tuple[int, Any]]:
    """(M, config): every config for M up to 8, 16, 24 and 32 that W4A16 takes on layers of many shapes."""
    from bitline.kernels.hopper import heuristics, layout
    from bitline.kernels.hopper.scheme import dequant_scheme

    found = set()
    for n in (1024, 2176, 4096, 5120, 6144, 8192, 13656, 28672, 57344):
        for k in (4096, 4160, 8192, 14336):
            n16_tiles, columns = layout.padded_shape(n, k)
            scheme = dequant_scheme(grid()[0][1].replace(n=n, k=k))
            for m in (5, 13):
                found.add((m, heuristics.small_m_config(m, n16_tiles, columns // 64, scheme, k % 128 == 0)))  # type: ignore[arg-type]
            for m in (20, 30):
                config = heuristics.small_m_config_if_faster(m, n16_tiles, n, k, scheme)  # type: ignore[arg-type]
                found |= {(m, config)} if config else set()
    return sorted(found)


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
        print(f"{time.perf_counter() - BEGAN:.1f} s: {name} M={m}", flush=True)

    def all(self, only: int | None = None) -> None:
        from bitline.kernels.hopper import runtime, workspace
        from bitline.kernels.hopper.heuristics import WGMMA_COSTS

        workspace.CAPTURED_LAUNCHES = 16  # nothing is captured, and a tool would track each flag
        # initcheck does not see TMA stores, and would call y uninitialized when it is copied to the CPU.
        runtime.fast_empty = lambda: lambda shape, strides, dtype: torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        calls = [functools.partial(self.run_case, i) for i in range(len(grid()))]
        calls += [functools.partial(self.run_wgmma_config, i) for i in range(len(WGMMA_COSTS))]
        calls += [functools.partial(self.run_small_m_config, i) for i in range(len(small_m_configs()))]
        for call in calls if only is None else [calls[only]]:
            call()
        if only is None:
            self.two_streams()

    def run_case(self, i: int) -> None:
        """A scheme, with the configs that calls take."""
        from bitline.kernels.hopper.launch import SMALL_M
        from bitline.kernels.hopper.linear import GluonHopperLinearKernel

        name, spec, batches = grid()[i]
        weight, packed, bias = self.layer(spec, i)
        for m in batches:
            kernel = "mma.sync" if m <= SMALL_M else "wgmma"
            self.run(lambda x: GluonHopperLinearKernel.apply(x, packed, bias, spec), weight, m, f"{kernel} {name}")

    def run_wgmma_config(self, i: int) -> None:
        """A config with whole tiles and with stream-K tiles."""
        from bitline.kernels.hopper.heuristics import WGMMA_COSTS
        from bitline.kernels.hopper.plans import WgmmaPlan
        from bitline.kernels.hopper.scheme import dequant_scheme

        config, spec = list(WGMMA_COSTS)[i], grid()[i % 2][1]
        weight, packed, bias = self.layer(spec, i)
        for num_ctas in (1, 3):
            m = config.cta_m - 5
            plan = WgmmaPlan(spec, dequant_scheme(spec), m, bias is not None, 132, config._replace(num_ctas=num_ctas))  # type: ignore[arg-type]
            tiles = "stream-K" if plan.workspace_size else "whole"
            self.run(functools.partial(plan, packed=packed, bias=bias), weight, m, f"wgmma, each config, {tiles} tiles")

    def run_small_m_config(self, i: int) -> None:
        """A config with remainders and without."""
        from bitline.kernels.hopper.plans import SmallMPlan
        from bitline.kernels.hopper.scheme import dequant_scheme

        m, config = small_m_configs()[i]
        for spec in (grid()[0][1], grid()[1][1].replace(bias=False)):
            if config.stages == 0 and spec.k % 64:
                continue  # `launch.run` pads x for gemv_mma
            spec = spec.replace(n=max(spec.n, 16 * config.n16_per_cta + 8))  # a CTA's rows at least
            weight, packed, _ = self.layer(spec, i)
            plan = SmallMPlan(spec, dequant_scheme(spec), m, False, config)  # type: ignore[arg-type]
            name = "pipelined" if config.stages else "gemv"
            self.run(functools.partial(plan, packed=packed, bias=None), weight, m, f"{name}, each config")

    def two_streams(self) -> None:
        """Stream-K on two streams at once: each has its own flags."""
        from bitline.kernels.hopper.heuristics import WGMMA_COSTS
        from bitline.kernels.hopper.plans import WgmmaPlan
        from bitline.kernels.hopper.scheme import dequant_scheme
        from bitline.testing import check
        from bitline.testing.generators import inputs

        weight, packed, _ = self.layer(grid()[0][1], 1)
        spec = weight.spec
        plan = WgmmaPlan(spec, dequant_scheme(spec), 30, False, 132, next(iter(WGMMA_COSTS))._replace(num_ctas=3))  # type: ignore[arg-type]
        assert plan.workspace_size
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
                self.launches["wgmma, two streams"] += 1

    def control(self) -> None:
        """A warp-specialized kernel that does nothing else."""
        sys.path.insert(0, str(Path(__file__).parent))
        from specialized import specialized  # type: ignore[import-not-found]

        out = torch.zeros(3, dtype=torch.int32).cuda()
        specialized[(1,)](out, num_warps=4)
        assert out.tolist() == [1, 2, 3]

    def planted(self, fault: str) -> None:
        """A launch that a tool must report."""
        from bitline.kernels.hopper.linear import GluonHopperLinearKernel

        weight, packed, bias = self.layer(grid()[0][1], 0)
        packed[0] = packed[0][:-1].clone() if fault == "short" else torch.empty_like(packed[0])
        x = torch.ones(1, weight.spec.k, dtype=weight.spec.act_dtype).cuda()
        GluonHopperLinearKernel.apply(x, packed, bias, weight.spec)
        torch.cuda.synchronize()


_WHERE = re.compile(r"\b(?:at|in) (.+?)\+0x")
_LINE = re.compile(r" in (\S+\.py:\d+)")
_SKIP = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Internal", "Target application")


class Record(NamedTuple):
    """A report: its kernel ("" where none is named), its first line and the source lines that it names."""

    kernel: str
    head: str
    lines: tuple[str, ...]


def records(text: str) -> list[Record]:
    """The reports in a tool's output."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("========="):
            body = line[9:]
            if body.strip() and not body.startswith("  "):
                found.append([body.strip()])
            elif found:
                found[-1].append(body)
    out = []
    for lines in found:
        if not lines[0].startswith(_SKIP):
            where = next((m[1].split("(")[0] for m in map(_WHERE.search, lines) if m), "")
            out.append(Record(where, lines[0], tuple(dict.fromkeys(_LINE.findall("\n".join(lines))))))
    return out


def prologue_lines(kernel: str) -> set[str]:
    """FILE:LINE of what the compiler adds to a kernel: its definition, and its `warp_specialize` statements."""
    file = OURS[kernel]
    lines = file.read_text().splitlines()
    start = next(i for i, line in enumerate(lines, 1) if line.startswith(f"def {kernel}("))
    calls = [i for i, line in enumerate(lines, 1) if i > start and "warp_specialize(" in line]
    return {f"{file.name}:{i}" for i in (start, *(range(calls[0] - 1, len(lines) + 1) if calls else ()))}


def generated(record: Record) -> bool:
    """Whether a report is about what Triton adds to a warp-specialized kernel alone."""
    return record.kernel in OURS and bool(record.lines) and set(record.lines) <= prologue_lines(record.kernel)


def finished(text: str) -> bool:
    """Whether a tool finished."""
    return "SUMMARY:" in text


class Run:
    """A process with the grid, the control kernel or a planted fault, under a tool."""

    def __init__(self, tool: str, folder: Path, *arguments: str) -> None:
        self.tool, self.what, self.began = tool, arguments[-1] if arguments else "", time.perf_counter()
        self.log, self.output = folder / f"{tool}{self.what}.log", folder / f"{tool}{self.what}.txt"
        # Each tensor is an allocation, modules are loaded lazily, API errors are torch's own probes.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "3"}
        command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--show-backtrace", "no"]
        command += ["--print-limit", "200", "--log-file", str(self.log), sys.executable, __file__, "--child", *arguments]
        with self.output.open("w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)

    def result(self, deadline: float) -> dict[str, Any]:
        """What it found; where it has not finished by the deadline, how far it came."""
        while self.process.poll() is None and time.perf_counter() < deadline:
            time.sleep(0.2)
        late = self.process.poll() is None
        if late:
            os.killpg(self.process.pid, signal.SIGKILL)  # the tool starts the program as a process of its own
            self.process.wait()
        text = self.log.read_text() if self.log.exists() else ""
        said = self.output.read_text().strip().splitlines()
        launches = json.loads(said[-1]) if said and said[-1].startswith("{") else {}
        found = records(text)
        ours = [r for r in found if r.kernel in OURS or not r.kernel]
        row = {
            "finished": not late and self.process.returncode == 0 and finished(text) and bool(launches),
            "seconds": round(time.perf_counter() - self.began, 1), "launches": launches,
            "reports": sum(not generated(r) for r in ours), "generated": sum(map(generated, ours)),
            "examples": list(dict.fromkeys(f"{r.kernel}: {r.head} {' '.join(r.lines)}" for r in ours))[:10],
            "elsewhere": dict(Counter(r.kernel for r in found if r not in ours)),
        }  # fmt: skip
        print(f"{self.tool} {self.what}", row, flush=True)
        if not row["finished"]:
            print(f"late: {late}", self.process.returncode, *said[-8:], text[-1500:], sep="\n", flush=True)
        return row


def supervise(timeout: float) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from _machine import machine

    from bitline.kernels.hopper.heuristics import WGMMA_COSTS

    deadline = time.perf_counter() + timeout
    compiling = [subprocess.Popen([sys.executable, __file__, "--child", "--only", str(i)], stdout=subprocess.DEVNULL)
                 for i in range(len(grid()) + len(WGMMA_COSTS) + len(small_m_configs()))]  # fmt: skip
    codes = [p.wait(timeout) for p in compiling]
    assert not any(codes), f"the grid fails without a tool: {codes}"
    print(f"compiled, {deadline - time.perf_counter():.0f} s left", flush=True)
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    report: dict[str, Any] = {"machine": machine("cuda"), "compute_sanitizer": version, "tools": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [Run(tool, folder) for tool in TOOLS] + [Run(tool, folder, "--special", "control") for tool in TOOLS]
        runs += [Run(tool, folder, "--special", fault) for tool, fault in PLANTED.items()]
        for run in sorted(runs, key=lambda run: not run.what):  # the short ones first
            row = run.result(deadline)
            report["tools"].setdefault(run.tool, {})[run.what or "grid"] = row
    return report


def complaints(report: dict[str, Any]) -> list[str]:
    """What fails in a report."""
    bad = []
    for tool, runs in report["tools"].items():
        grid = runs["grid"]
        bad += [f"{tool}: {name} did not finish" for name in ("grid", "control") if not runs[name]["finished"]]
        bad += [f"{tool}: {grid['reports']} reports"] * bool(grid["reports"])
        bad += [f"{tool}: the planted fault was missed"] * bool(tool in PLANTED and not runs[PLANTED[tool]]["reports"])
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--only", type=int)
    parser.add_argument("--special")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child:
        runner = Runner()
        with torch.inference_mode():
            if options.special == "control":
                runner.control()
            elif options.special:
                runner.planted(options.special)
            else:
                runner.all(options.only)
        print(json.dumps(runner.launches or {"special": 1}))
        return
    report = supervise(options.timeout)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    bad = complaints(report)
    sys.exit("\n".join(bad) if bad else 0)


if __name__ == "__main__":
    main()
