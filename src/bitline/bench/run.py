"""Runs problems: every kernel against the reference, then its times beside the read limit, the compute limit and dense linear."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from bitline import timing
from bitline.bench.baselines import Maker
from bitline.bench.entrants import Calls, Contender, Data, Entrant, Peer, lacks_memory
from bitline.bench.grid import Problem
from bitline.bench.keep import Unfinished
from bitline.bench.machine import machine
from bitline.bench.report import ProblemResult, Report
from bitline.errors import InputError, OutOfMemoryError, summary_of
from bitline.kernels import registry
from bitline.platform import Platform, as_device
from bitline.select import Candidate, Choice, Policy, choose
from bitline.timing import Clock
from bitline.types import LinearSpec, dtype_name

DEFAULT_SECONDS = 1.0

Progress = Callable[[int, int], None]


def run_problems(
    problems: Sequence[Problem],
    device: torch.device | str = "cpu",
    seconds: float = DEFAULT_SECONDS,
    *,
    sustained: bool = False,
    baselines: Mapping[str, Maker] | None = None,
    earlier: Report | None = None,
    keep: Callable[[Report], None] | None = None,
    progress: Progress | None = None,
    kernels: Sequence[registry.Entry] | None = None,
    clock: Clock = time.perf_counter,
) -> Report:
    """Check, and time in mode P, the kernels of each problem on a device.

    Mode C runs each kernel on random data, within the tolerance of `bitline.testing.compare`, and on lossless data, where results
    must be equal bit for bit, both in poisoned memory. Mode P checks a part of each kernel's result at each M, then times it. The
    weight is random, and each call reads another copy of it where a cache would hold one.

    Args:
        problems: From `parse_grid` or made by hand.
        device: Where to run.
        seconds: Time for the calls of all kernels of a problem at one M, checks and warm-up not counted.
        sustained: On a CUDA GPU also time each kernel under sustained load, which lowers its clocks.
        baselines: By name, what is timed beside the kernels in mode P: functions of the weight, as `read_baselines` gives them.
        earlier: A report of the same run that was interrupted: its results are taken, and only the other problems run.
        keep: Called with the report so far after every problem, and once before the first.
        progress: Called with (problems done, problems in all).
        kernels: The kernels that there are; all registered ones by default.
        clock: Seconds.

    Raises:
        InputError: For `sustained` on another device than a CUDA GPU; and for an earlier report of another machine, commit or
            conditions.
        OutOfMemoryError: Where there is no memory for a problem's weight, inputs or expected outputs.
        PlatformError: For a device that is not here.
        NoKernelError: As `choose`.
    """
    where = as_device(device)
    if sustained and where.type != "cuda":
        raise InputError("sustained load is measured on CUDA GPUs", found=str(where), fix="leave it out")
    started = clock()
    conditions = {
        "threads": torch.get_num_threads(), "load_before": _load(), "load_after": None, "sustained": sustained,
        "seconds_of_calls": seconds, "cache_bytes": timing.cache_bytes(where), "baselines": list(baselines or {}),
    }  # fmt: skip
    report = Report(machine(where), conditions, [], 0.0, planned=len(problems))
    unfinished = Unfinished(earlier, report) if earlier is not None else None
    with torch.inference_mode(), timing.on(where):
        timed = any("P" in p.options.mode for p in problems)
        bench = _Bench(where, seconds, sustained, baselines or {}, kernels, clock, timed=timed, earlier=earlier)
        before = earlier.seconds if earlier is not None else 0.0
        report.bandwidth, report.matmul_rates = bench.bandwidth, bench.rates
        for i, problem in enumerate(problems):
            if keep is not None:
                keep(report)
            known = unfinished.take(problem) if unfinished is not None else None
            report.problems.append(_with_memory(bench, problem) if known is None else known)
            report.seconds = before + clock() - started
            if progress is not None:
                progress(i + 1, len(problems))
    conditions["load_after"] = _load()
    if keep is not None:
        keep(report)
    return report


def _with_memory(bench: _Bench, problem: Problem) -> ProblemResult:
    try:
        return bench.run(problem)
    except (MemoryError, RuntimeError) as error:  # torch's own for a GPU is a RuntimeError too
        if not lacks_memory(error):
            raise
        raise OutOfMemoryError(
            f"no memory to run {problem}", found=summary_of(error), fix="give a smaller shape or M"
        ) from error  # fmt: skip


def _load() -> float | None:
    """Processes that ran or waited for a CPU, as the system's mean of the last minute."""
    with contextlib.suppress(OSError, AttributeError):  # Windows
        return os.getloadavg()[0]
    return None


class _Bench:
    """What all problems of a run share."""

    def __init__(
        self, device: torch.device, seconds: float, sustained: bool, baselines: Mapping[str, Maker],
        kernels: Sequence[registry.Entry] | None, clock: Clock, *, timed: bool, earlier: Report | None,
    ) -> None:  # fmt: skip
        self.device, self.seconds, self.sustained, self.kernels, self.clock = device, seconds, sustained, kernels, clock
        self.baselines, self.platform = baselines, Platform.detect(device)
        self.bandwidth = earlier.bandwidth if earlier is not None else None
        self.rates: dict[str, float] = dict(earlier.matmul_rates) if earlier is not None else {}
        if timed and self.bandwidth is None:
            self.bandwidth = self._bandwidth()

    def run(self, problem: Problem) -> ProblemResult:
        """One problem: choose, check, time, judge."""
        spec = problem.spec.replace(input_multiplier=False)
        sizes = sorted(problem.options.sizes)
        choice, asked = self._asked(problem, spec)
        found = ProblemResult(
            str(problem), "", problem.line, len(problem.layers), problem.layers[0] if problem.layers else "",
            problem.scheme or spec.scheme, spec.key, (spec.n, spec.k), sizes, problem.options.mode, choice.best.name,
            spec.weight_bytes(), dtype_name(spec.act_dtype),
        )  # fmt: skip
        contenders = [Contender(candidate, candidate.name in problem.options.skipped) for candidate in asked]
        if "C" in problem.options.mode:
            self._check_fully(spec, sizes, contenders)
        if "P" in problem.options.mode:
            peers = [Peer(name, maker) for name, maker in self.baselines.items()]
            self._time(spec, sizes, [*contenders, *peers], found)
            found.baselines = [peer.result for peer in peers if peer.applies]
        found.kernels = [c.result for c in contenders]
        found.status = _status(contenders, by_name=bool(problem.options.kernels))
        return found

    def _asked(self, problem: Problem, spec: LinearSpec) -> tuple[Choice, list[Candidate]]:
        """The choice of the layer, and the candidates to run: those that were named, or all that can run it."""
        policy = replace(Policy.from_env(), m=tuple(sorted(problem.options.sizes)), strict=False)
        choice = choose(spec, self.platform, policy, kernels=self.kernels)
        if not problem.options.kernels:
            return choice, [c for c in choice.candidates if c.verdict]
        named = []
        for name in problem.options.kernels:
            own = choose(spec, self.platform, replace(policy, kernel=name), kernels=self.kernels)
            named.append(next(c for c in own.candidates if c.name == name))
        return choice, named

    def _check_fully(self, spec: LinearSpec, sizes: Sequence[int], contenders: Sequence[Contender]) -> None:
        """Mode C: each kernel on random and on lossless data."""
        for exact in (False, True):
            try:
                data = Data(spec, sizes, self.device, "C", exact=exact)
            except ValueError:  # a codebook without 0 has no lossless weights
                return
            for contender in contenders:
                contender.attempt(partial(contender.check_one, data))

    def _time(self, spec: LinearSpec, sizes: Sequence[int], entrants: Sequence[Entrant], found: ProblemResult) -> None:
        """Mode P: each entrant checked in part, then timed with the others."""
        data = Data(spec, sizes, self.device, "P")
        nbytes = timing.cold_bytes(self.device, len(entrants) + 1)
        for entrant in entrants:
            entrant.attempt(partial(entrant.enter, data, nbytes))
        dense = timing.copies([data.moved.dequantize(spec.act_dtype)], nbytes)
        linear = torch.nn.functional.linear
        rate = self._rate(spec)
        for m in sizes:
            x = data.xs[m]
            total = spec.weight_bytes() + m * (spec.n + spec.k) * spec.act_dtype.itemsize
            calls: dict[Entrant | None, Calls] = {None: [partial(linear, x, w) for (w,) in dense]}
            calls |= {e: e.calls_at(x) for e in entrants if e.runs}
            if self.device.type == "cpu":
                self._time_cpu(calls, m, timing.reads(total, nbytes), found)
            else:
                self._time_gpu(calls, m, found)
                found.read_seconds[m] = total / (self.bandwidth or 1.0)
            found.compute_seconds[m] = 2 * m * spec.n * spec.k / rate

    def _time_cpu(self, calls: Mapping[Entrant | None, Calls], m: int, reads: Calls, found: ProblemResult) -> None:
        """All take turns, and so do reads of as many bytes."""
        named = {"dense" if e is None else f"entrant {i}": variants for i, (e, variants) in enumerate(calls.items())}
        times = timing.in_turn(named | {"read": reads}, self.device, self.seconds, self.clock, yardstick="read")
        found.read_seconds[m] = statistics.median(times.pop("read"))
        for entrant, values in zip(calls, times.values(), strict=True):
            if entrant is None:
                found.dense_seconds[m] = statistics.median(values)
            else:
                entrant.record(m, values)

    def _time_gpu(self, calls: Mapping[Entrant | None, Calls], m: int, found: ProblemResult) -> None:
        """Each by itself: replays of a CUDA graph, or eager calls of what cannot be captured and on an XPU."""
        for entrant, variants in calls.items():
            captured = self.device.type == "cuda" and (entrant is None or entrant.cuda_graph)
            seconds = self.seconds / len(calls)
            if entrant is None:
                values, later = self._gpu_times(variants, seconds, m, captured=captured)
                found.dense_seconds[m] = statistics.median(values)
                found.dense_sustained_seconds |= later
            else:
                entrant.attempt(partial(self._time_entrant, entrant, variants, seconds, m, captured=captured))

    def _time_entrant(self, entrant: Entrant, variants: Calls, seconds: float, m: int, *, captured: bool) -> None:
        values, later = self._gpu_times(variants, seconds, m, captured=captured)
        entrant.record(m, values)
        entrant.result.sustained_seconds |= later

    def _gpu_times(self, variants: Calls, seconds: float, m: int, *, captured: bool) -> tuple[list[float], dict[int, float]]:
        """Times after a rest, and with --sustained by M the one under load."""
        if captured and self.sustained:
            burst, later = timing.rested_seconds(variants, 0.15 if m >= 128 else 0.05)
            return [burst], {m: later}
        if captured:
            return timing.replay_seconds(variants, seconds / 5), {}
        return timing.in_turn({"it": variants}, self.device, seconds, self.clock)["it"], {}

    def _bandwidth(self) -> float:
        """Bytes per second of a read far larger than the caches."""
        wanted = max(1 << 27, 4 * timing.cache_bytes(self.device)) if self.device.type == "cpu" else 1 << 31
        return timing.read_bandwidth(self.device, wanted)

    def _rate(self, spec: LinearSpec) -> float:
        """Operations per second of the fastest product that torch has here for the layer's operands.

        A CPU may multiply 16-bit inputs in float32. Where torch has no product of the quantized type, the input's dtype counts.
        """
        dtypes = [torch.bfloat16, torch.float32] if self.device.type == "cpu" else [spec.act_dtype]
        if spec.act is not None and spec.act.dtype.name == "int8":
            dtypes.append(torch.int8)
        elif spec.act is not None and self.device.type == "cuda":
            dtypes.append(torch.float8_e4m3fn)
        for dtype in dtypes:
            if dtype_name(dtype) not in self.rates:
                with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
                    self.rates[dtype_name(dtype)] = timing.matmul_rate(self.device, dtype)
        return max(self.rates.get(dtype_name(dtype), 1.0) for dtype in dtypes)


def _status(contenders: Sequence[Contender], *, by_name: bool) -> str:
    """A problem's status from its kernels'."""
    statuses = [c.result.status for c in contenders]
    if "failed" in statuses:
        return "failed"
    if by_name and ("unimplemented" in statuses or "refused" in statuses):
        return "unimplemented"
    if any(c.runs and (by_name or not c.kernel.is_fallback) for c in contenders):
        return "passed"
    return "skipped" if "skipped" in statuses else "unimplemented"
