"""The Hopper kernels under compute-sanitizer's four tools, on the layers of `sanitized_layers`; needs an H100 or H200.

    PYTHONPATH=src python tests/gpu/sanitize.py --out benchmarks/results/h200_sanitizer.json

Each tool runs the grid in a process of its own, all at the same time, with torch's caching allocator off, so that each tensor is
an allocation with checked bounds. Two planted faults (a weight that is too short, one that was never written) show that memcheck
and initcheck look where they should. A report whose lines are all a kernel's definition or its `warp_specialize` is about the
prologue that Triton generates for warp specialization; such ones are counted apart, beside what the same tool reports of
`specialized`, which does nothing else. Fails where a tool reports anything else about our kernels, does not finish, or misses its
planted fault.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).parent))
from sanitized_layers import Runner

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLANTED = {"memcheck": "short", "initcheck": "unwritten"}
ROOT = Path(__file__).parents[2]
DEVICE = ROOT / "src" / "bitline" / "kernels" / "hopper" / "device"
KERNELS = (
    "gemv_mma", "small_m_pipelined", "wgmma_persistent", "scaled_small_m", "scaled_persistent", "scaled_large_m", "w4a8_small_m",
    "w4a8_persistent", "experts_small_m", "experts_persistent",
)  # fmt: skip
OURS = {name: DEVICE / f"{name}.py" for name in KERNELS}  # kernel -> its file
OURS["quantize_x"] = DEVICE / "quantize.py"
OURS["specialized"] = Path(__file__).with_name("specialized.py")

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

    deadline = time.perf_counter() + timeout
    cases, jobs = len(Runner().cases()), os.cpu_count() or 1
    parts = [",".join(map(str, range(i, cases, jobs))) for i in range(min(jobs, cases))]
    compiling = [subprocess.Popen([sys.executable, __file__, "--child", "--only", p], stdout=subprocess.DEVNULL) for p in parts]
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
    parser.add_argument("--only", default="")
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
                runner.all([int(i) for i in options.only.split(",") if i])
        print(json.dumps(runner.launches or {"special": 1}))
        return
    report = supervise(options.timeout)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    bad = complaints(report)
    sys.exit("\n".join(bad) if bad else 0)


if __name__ == "__main__":
    main()
