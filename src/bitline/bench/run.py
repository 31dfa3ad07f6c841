"""Runs problems: every kernel against the reference, then its times beside the read limit, the compute limit and dense linear."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitline import timing
from bitline.bench.grid import Problem
from bitline.bench.machine import machine
from bitline.bench.report import KernelResult, ProblemResult, Report
from bitline.errors import InputError, OutOfMemoryError, summary_of
from bitline.kernels import registry
from bitline.platform import Platform, as_device
from bitline.select import Candidate, Choice, Policy, choose
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.testing.poison import poison
from bitline.testing.tolerance import Expected
from bitline.timing import Call, Clock, WrongResult
from bitline.types import LinearSpec, dtype_name
from bitline.weight import QuantizedWeight

DEFAULT_SECONDS = 1.0
_CHECKED_M = {"C": 256, "P": 16}  # rows of x that are compared, by mode
_CHECKED_N = {"C": 4096, "P": 512}  # rows of the weight, the first and the last half of them
_CHECKED_N_FP32 = 512  # whose baseline, one accumulator along K, takes long
_MAX_REASON = 300

Progress = Callable[[int, int], None]
_Calls = Sequence[Callable[[], Any]]


def run_problems(
    problems: Sequence[Problem],
    device: torch.device | str = "cpu",
    seconds: float = DEFAULT_SECONDS,
    *,
    sustained: bool = False,
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
        progress: Called with (problems done, problems in all).
        kernels: The kernels that there are; all registered ones by default.
        clock: Seconds.

    Raises:
        InputError: For `sustained` on another device than a CUDA GPU.
        OutOfMemoryError: Where there is no memory for a problem's weight, inputs or expected outputs.
        PlatformError: For a device that is not here.
        NoKernelError: As `choose`.
    """
    where = as_device(device)
    if sustained and where.type != "cuda":
        raise InputError("sustained load is measured on CUDA GPUs", found=str(where), fix="leave it out")
    started, load = clock(), _load()
    with torch.inference_mode(), timing.on(where):
        bench = _Bench(where, seconds, sustained, kernels, clock, timed=any("P" in p.options.mode for p in problems))
        results = []
        for i, problem in enumerate(problems):
            results.append(_with_memory(bench, problem))
            if progress is not None:
                progress(i + 1, len(problems))
    conditions = {
        "threads": torch.get_num_threads(), "load_before": load, "load_after": _load(), "sustained": sustained,
        "seconds_of_calls": seconds, "cache_bytes": timing.cache_bytes(where),
    }  # fmt: skip
    return Report(machine(where), conditions, results, clock() - started, bench.bandwidth, bench.rates)


def _with_memory(bench: _Bench, problem: Problem) -> ProblemResult:
    try:
        return bench.run(problem)
    except (MemoryError, RuntimeError) as error:  # torch's own for a GPU is a RuntimeError too
        if not _lacks_memory(error):
            raise
        raise OutOfMemoryError(
            f"no memory to run {problem}", found=summary_of(error), fix="give a smaller shape or M"
        ) from error  # fmt: skip


def _lacks_memory(error: Exception) -> bool:
    """Whether an exception says that there is no memory: Python's, torch's, or that of torch's CPU allocator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and "alloc" in str(error)


def _load() -> float | None:
    """Processes that ran or waited for a CPU, as the system's mean of the last minute."""
    with contextlib.suppress(OSError, AttributeError):  # Windows
        return os.getloadavg()[0]
    return None


class _Bench:
    """What all problems of a run share."""

    def __init__(
        self, device: torch.device, seconds: float, sustained: bool, kernels: Sequence[registry.Entry] | None, clock: Clock, *,
        timed: bool,
    ) -> None:  # fmt: skip
        self.device, self.seconds, self.sustained, self.kernels, self.clock = device, seconds, sustained, kernels, clock
        self.platform = Platform.detect(device)
        self.bandwidth = self._bandwidth() if timed else None
        self.rates: dict[str, float] = {}

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
        contenders = [_Contender(candidate, candidate.name in problem.options.skipped) for candidate in asked]
        if "C" in problem.options.mode:
            self._check_fully(spec, sizes, contenders)
        if "P" in problem.options.mode:
            self._time(spec, sizes, contenders, found)
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

    def _check_fully(self, spec: LinearSpec, sizes: Sequence[int], contenders: Sequence[_Contender]) -> None:
        """Mode C: each kernel on random and on lossless data."""
        for exact in (False, True):
            try:
                data = _Data(spec, sizes, self.device, "C", exact=exact)
            except ValueError:  # a codebook without 0 has no lossless weights
                return
            for contender in contenders:
                contender.attempt(partial(_check_one, contender, data))

    def _time(self, spec: LinearSpec, sizes: Sequence[int], contenders: Sequence[_Contender], found: ProblemResult) -> None:
        """Mode P: each kernel checked in part, then timed with the others."""
        data = _Data(spec, sizes, self.device, "P")
        nbytes = timing.cold_bytes(self.device, len(contenders) + 1)
        for contender in contenders:
            contender.attempt(partial(_enter, contender, data, nbytes))
        dense = timing.copies([data.moved.dequantize(spec.act_dtype)], nbytes)
        linear = torch.nn.functional.linear
        rate = self._rate(spec)
        for m in sizes:
            x = data.xs[m]
            total = spec.weight_bytes() + m * (spec.n + spec.k) * spec.act_dtype.itemsize
            calls: dict[str, _Calls] = {"dense": [partial(linear, x, w) for (w,) in dense]}
            calls |= {c.result.kernel: [partial(call, x) for call in c.calls] for c in contenders if c.runs}
            if self.device.type == "cpu":
                calls["read"] = timing.reads(total, nbytes)
                times = timing.in_turn(calls, self.device, self.seconds, self.clock, yardstick="read")
                found.read_seconds[m] = statistics.median(times["read"])
            else:
                times = self._gpu_times(calls, contenders, m)
                found.read_seconds[m] = total / (self.bandwidth or 1.0)
            found.compute_seconds[m] = 2 * m * spec.n * spec.k / rate
            found.dense_seconds[m] = statistics.median(times["dense"])
            for contender in contenders:
                if values := times.get(contender.result.kernel):
                    contender.record(m, values)

    def _gpu_times(self, calls: dict[str, _Calls], contenders: Sequence[_Contender], m: int) -> dict[str, list[float]]:
        """Times of each by itself: replays of a CUDA graph, or eager calls of what cannot be captured and on an XPU."""
        found: dict[str, list[float]] = {}
        by_name = {c.result.kernel: c for c in contenders}
        for name, variants in calls.items():
            contender = by_name.get(name)
            captured = self.device.type == "cuda" and (contender is None or contender.kernel.cuda_graph)
            work = partial(self._gpu_time, name, variants, self.seconds / len(calls), m, found, contender, captured=captured)
            work() if contender is None else contender.attempt(work)
        return found

    def _gpu_time(
        self, name: str, variants: _Calls, seconds: float, m: int, found: dict[str, list[float]], contender: _Contender | None, *,
        captured: bool,
    ) -> None:  # fmt: skip
        if captured and self.sustained:
            burst, later = timing.rested_seconds(variants, 0.15 if m >= 128 else 0.05)
            found[name] = [burst]
            if contender is not None:
                contender.result.sustained_seconds[m] = later
        elif captured:
            found[name] = timing.replay_seconds(variants, seconds / 5)
        else:
            found[name] = timing.in_turn({name: variants}, self.device, seconds, self.clock)[name]

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


class _Contender:
    """A kernel that takes part in a problem, with its result so far."""

    def __init__(self, candidate: Candidate, skipped: bool) -> None:
        self.kernel, self.calls = candidate.kernel, list[Call]()
        self.result = KernelResult(candidate.name, "ok")
        self.result.estimated_seconds = dict(zip(candidate.m, candidate.estimates, strict=False))
        if skipped:
            self._stop("skipped", "--skip-impl names it")
        elif not candidate.verdict:
            self._stop("unimplemented", candidate.verdict.reason)

    @property
    def runs(self) -> bool:
        return self.result.status == "ok"

    def attempt(self, work: Callable[[], None]) -> None:
        """Do some of its work, if it still takes part; what that raises ends its part."""
        if not self.runs:
            return
        try:
            work()
        except WrongResult as error:
            self._stop("failed", str(error))
        except InputError as error:  # the weight's values, a package's version
            self._stop("refused", summary_of(error))
        except Exception as error:  # third-party kernels raise anything
            self._stop("refused" if _lacks_memory(error) else "failed", summary_of(error))

    def note(self, found: tuple[float, float]) -> None:
        """Keep the worst error over what is allowed."""
        error, allowed = found
        if self.result.error is None or error * (self.result.allowed or 0.0) > self.result.error * allowed:
            self.result.error, self.result.allowed = error, allowed

    def record(self, m: int, values: Sequence[float]) -> None:
        self.result.measured_seconds[m], self.result.best_seconds[m] = statistics.median(values), min(values)
        self.result.calls[m] = len(values)

    def _stop(self, status: str, reason: str) -> None:
        result = self.result
        result.status, result.reason, self.calls = status, reason[:_MAX_REASON], []
        for times in (result.measured_seconds, result.best_seconds, result.sustained_seconds, result.calls):
            times.clear()


class _Data:
    """A weight, its inputs and the expected outputs of a problem, shared by all kernels.

    Raises ValueError where exact data is wanted and the weight type has none.
    """

    def __init__(self, spec: LinearSpec, sizes: Sequence[int], device: torch.device, mode: str, *, exact: bool = False) -> None:
        self.spec, self.exact = spec, exact
        self.weight = lossless_weight(spec, 1) if exact else random_weight(spec, 1)
        self.moved: QuantizedWeight = self.weight.to(device)
        make = lossless_inputs if exact else inputs
        self.xs = {m: make(m, spec, m, device) for m in sizes}
        most = min(_CHECKED_N[mode], _CHECKED_N_FP32 if spec.act_dtype == torch.float32 and not exact else 1 << 30)
        half = most // 2
        self.rows = [slice(0, spec.n)] if spec.n <= most else [slice(0, half), slice(spec.n - half, spec.n)]
        self.most_m = _CHECKED_M[mode]
        self.expected: dict[int, list[Expected]] = {}

    def check(self, y: Any, m: int) -> tuple[float, float]:
        """The largest error of a result and what is allowed. Raises WrongResult for more, and on exact data for any."""
        step = timing.row_step(m, self.spec, self.most_m)
        if m not in self.expected:
            x = self.xs[m][::step].cpu().contiguous()
            parts = [self.weight.narrow(0, rows.start, rows.stop) for rows in self.rows]
            self.expected[m] = [Expected.of(x, part) for part in parts]
        y = timing.require_form(y, self.xs[m], self.spec)[::step]
        worst = (0.0, 0.0)
        for rows, expected in zip(self.rows, self.expected[m], strict=True):
            out = y[:, rows].cpu()
            if self.exact:
                _require_exact(out, expected.exact, m)
                continue
            found = expected.compare(out)
            timing.require_close(found, m)
            worst = max(worst, (found.error, found.allowed))
        return worst


def _check_one(contender: _Contender, data: _Data) -> None:
    """Run a kernel at every M in poisoned memory, then check what it gave."""
    with poison():
        calls, contender.result.packed_bytes = timing.packed_calls(contender.kernel, data.moved, data.spec, 0)
        outputs = {m: calls[0](x) for m, x in data.xs.items()}
    for m, y in outputs.items():
        contender.note(data.check(y, m))


def _enter(contender: _Contender, data: _Data, nbytes: int) -> None:
    """Pack a kernel's weight in copies that no cache holds, and check a part of what it gives at every M."""
    contender.calls, contender.result.packed_bytes = timing.packed_calls(contender.kernel, data.moved, data.spec, nbytes)
    for m, x in data.xs.items():
        contender.note(data.check(contender.calls[0](x), m))


def _require_exact(out: Tensor, exact: Tensor, m: int) -> None:
    wrong = ~(out.double() == exact)
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise WrongResult(
            f"M={m} on lossless data: {int(wrong.sum())} of {wrong.numel()} elements differ, the first at [{row}, {column}] is "
            f"{float(out[row, column])!r}, not {float(exact[row, column])!r}"
        )


def _status(contenders: Sequence[_Contender], *, by_name: bool) -> str:
    """A problem's status from its kernels'."""
    statuses = [c.result.status for c in contenders]
    if "failed" in statuses:
        return "failed"
    if by_name and ("unimplemented" in statuses or "refused" in statuses):
        return "unimplemented"
    if any(c.runs and (by_name or not c.kernel.is_fallback) for c in contenders):
        return "passed"
    return "skipped" if "skipped" in statuses else "unimplemented"
