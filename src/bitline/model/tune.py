"""Timing of kernels on this machine, for the measured costs that `choose` prefers (`bitline.tuning`).

Each kernel that can run a layer packs one random weight of its spec, its results are checked against the reference, and its calls
are timed in turn with the other kernels'. Where the last-level cache would hold the packed weight, each call reads another copy,
as in a model whose other layers run in between.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bitline import tuning
from bitline.checkpoint import Checkpoint
from bitline.errors import InputError, summary_of
from bitline.kernels import registry
from bitline.model.expert_names import expert_number
from bitline.model.merged_specs import may_differ, merged_kinds
from bitline.platform import Platform, as_device
from bitline.select import Candidate, Choice, Policy, choose
from bitline.testing.generators import inputs, random_weight
from bitline.timing import GPU_CALLS, SLOW, Call, Clock, WrongResult, check_result, cold_bytes, on, packed_calls, seconds_of
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

DEFAULT_SECONDS = 60.0
_ROUNDS = 50
_CHECKED_N, _CHECKED_M = 256, 16  # rows and columns of y that are compared with the reference
_KEPT_BYTES = 1 << 31  # of all kernels' packed weights that wait for the rounds
_MAX_REASON = 300

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class KernelTimes:
    """One kernel's times for a layer, in seconds of one call by M.

    Attributes:
        kernel: Class name.
        status: "measured"; "slow", measured with few calls since it took ten times the fastest kernel's time at every M;
            "failed"; "skipped", it could not be timed; "partly", at some M; "not reached", the time was up before.
        reason: Why it failed or was skipped.
        seconds: Measured.
        estimate: Estimated.
    """

    kernel: str
    status: str
    reason: str
    seconds: dict[int, float]
    estimate: dict[int, float]


@dataclass(frozen=True)
class TunedLayer:
    """A layer's times.

    Attributes:
        spec: The layer, without `input_multiplier`.
        status: "measured"; "known", measured earlier; "partly" and "not reached" where the time was up. What was not measured
            keeps its estimates.
        before: The kernel chosen without these times.
        kernel: The kernel chosen with them.
        kernels: Every kernel that can run it, in the order of their estimates.
    """

    spec: LinearSpec
    status: str
    before: str
    kernel: str
    kernels: tuple[KernelTimes, ...]


@dataclass(frozen=True)
class TuningReport:
    """What `tune` did. seconds: how long it took. file: where the times are kept, None where they could not be written."""

    layers: tuple[TunedLayer, ...]
    seconds: float
    file: Path | None


def specs_of(checkpoint: Checkpoint, act_dtype: torch.dtype) -> dict[LinearSpec, list[str]]:
    """The distinct specs of a checkpoint's quantized layers, with the layers' names."""
    found: dict[LinearSpec, list[str]] = {}
    for record in checkpoint.layers():
        found.setdefault(record.spec.replace(act_dtype=act_dtype, input_multiplier=False), []).append(record.name)
    return found


def specs_to_run(
    checkpoint: Checkpoint,
    act_dtype: torch.dtype,
    device: torch.device | str,
    policy: Policy | str | None = None,
    merge: bool | None = None,
) -> dict[LinearSpec, list[str]]:
    """`specs_of` the layers that `load_model` makes: those that it packs as one in the place of their parts.

    No weight is read. Where values decide whether parts are merged (`may_differ`), the parts are there too.

    Args:
        checkpoint: The layers.
        act_dtype: Of their inputs.
        device: Where they run.
        policy: As in `load_model`.
        merge: As in `load_model`.
    """
    found, device = specs_of(checkpoint, act_dtype), as_device(device)
    if merge is False or (merge is None and device.type == "cpu"):
        return found
    plain = [record for record in checkpoint.layers() if expert_number(record.name) is None]
    spec_of = {record.name: record.spec.replace(act_dtype=act_dtype) for record in plain}
    merged: set[str] = set()
    for kind in merged_kinds(spec_of, Platform.detect(device), Policy.of(policy)):
        found.setdefault(kind.spec.replace(input_multiplier=False), []).extend(kind.merged_names())
        if not any(map(may_differ, kind.parts)):
            merged.update(*kind.names)
    left = {spec: [name for name in names if name not in merged] for spec, names in found.items()}
    return {spec: names for spec, names in left.items() if names}


def tune(
    specs: Mapping[LinearSpec, int],
    device: torch.device | str = "cpu",
    policy: Policy | str | None = None,
    seconds: float = DEFAULT_SECONDS,
    *,
    again: bool = True,
    progress: Progress | None = None,
    kernels: Sequence[registry.Entry] | None = None,
    clock: Clock = time.perf_counter,
) -> TuningReport:
    """Time the kernels that can run these layers at the policy's M, and keep the times for `choose`.

    Times are kept layer by layer, so that an interruption loses one layer's. A layer gets an equal share of the time that is left
    to those not yet tuned; only a call that has begun exceeds it.

    Args:
        specs: Layers, with how many of each there are: those with the most weights in all come first.
        device: Where they run.
        policy: Gives M, and which kernels are allowed; the environment's by default.
        seconds: Limit of the whole.
        again: Whether to measure layers again that were measured at all of these M.
        progress: Called with (kernels done, kernels in all).
        kernels: The kernels to time; all registered ones by default.
        clock: Seconds, for the limit and the times.

    Raises:
        InputError: For a limit that is not positive.
        NoKernelError, PlatformError: As `choose`.
    """
    if not (isinstance(seconds, int | float) and seconds > 0 and math.isfinite(seconds)):
        raise InputError("a time limit is a positive number of seconds", found=repr(seconds))
    started = clock()
    device, policy = as_device(device), Policy.of(policy)
    platform = Platform.detect(device)
    chooser = partial(choose, platform=platform, policy=policy, kernels=kernels)
    order = sorted(specs, key=lambda spec: -spec.n * spec.k * specs[spec])
    estimated = {spec: chooser(spec, measured={}) for spec in order}
    total, done = sum(len(_able(choice)) for choice in estimated.values()), 0
    earlier = dict(tuning.load(platform))
    report, file = [], tuning.path_of(platform) if earlier else None
    for i, (spec, choice) in enumerate(estimated.items()):
        able, key = _able(choice), tuning.key_of(spec)
        known = earlier.get(key, tuning.UNTIMED)
        if not again and any(known.of(c.name, policy.m) for c in able):
            status, rows = "known", [_row(c, known, policy.m) for c in able]
        else:
            now = clock()
            limit = now + (started + seconds - now) / (len(order) - i)
            step = None if progress is None else partial(_step, progress, done, total)
            rows = _Bench(choice.spec, device, policy.m, clock, limit, able).run(step)
            status = _status(rows)
            new = tuning.LayerTimes(
                {row.kernel: row.seconds for row in rows if row.seconds},
                {row.kernel: row.reason for row in rows if row.status == "failed"},
            )
            if _favours_a_guess(choice, chooser(spec, measured={key: known.updated(new)})):
                new = tuning.LayerTimes(failed=new.failed)
            if new != tuning.UNTIMED:
                file = tuning.save(platform, {key: new})
                known = known.updated(new)
        after = chooser(spec, measured={key: known})
        report.append(TunedLayer(choice.spec, status, choice.best.name, after.best.name, tuple(rows)))
        done += len(able)
        if progress is not None:
            progress(done, total)
    return TuningReport(tuple(report), clock() - started, file)


def _able(choice: Choice) -> list[Candidate]:
    return [c for c in choice.candidates if c.verdict]


def _favours_a_guess(before: Choice, after: Choice) -> bool:
    """Whether incomplete times move the choice to a kernel that was not measured, whose estimate may be optimistic."""
    return after.best.name != before.best.name and not after.best.measured_here


def _step(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _status(rows: Sequence[KernelTimes]) -> str:
    if not any(row.seconds or row.status == "failed" for row in rows):
        return "not reached"
    return "partly" if any(row.status in ("partly", "not reached") for row in rows) else "measured"


def _row(candidate: Candidate, known: tuning.LayerTimes, sizes: Sequence[int]) -> KernelTimes:
    """A kernel's row of a layer that was tuned earlier."""
    times = {m: t for m, t in known.seconds.get(candidate.name, {}).items() if m in sizes}
    failed = known.failed.get(candidate.name, "")
    status = "failed" if failed else "measured" if len(times) == len(set(sizes)) else "partly" if times else "not reached"
    return KernelTimes(candidate.name, status, failed, times, _estimate(candidate))


def _estimate(candidate: Candidate) -> dict[int, float]:
    return dict(zip(candidate.m, candidate.costs, strict=True))


# ---- one layer -----------------------------------------------------------------------------------------------------------


@dataclass
class _Contender:
    """A kernel that is timed: its calls, one for each packed copy of the weight, and its best time by M."""

    candidate: Candidate
    calls: list[Call] = field(default_factory=list)
    next_call: int = 1  # the copy that was written first, after the one that is checked
    best: dict[int, float] = field(default_factory=dict)
    status: str = "not reached"
    reason: str = ""

    def stop(self, status: str, reason: str) -> None:
        """End its part for a reason; what was timed of a failed kernel does not count."""
        self.status, self.reason, self.calls = status, reason[:_MAX_REASON], []
        if status == "failed":
            self.best = {}


class _Bench:
    """Times the kernels of one layer. limit: on the clock."""

    def __init__(
        self, spec: LinearSpec, device: torch.device, sizes: Sequence[int], clock: Clock, limit: float,
        candidates: Sequence[Candidate],
    ) -> None:  # fmt: skip
        self.spec, self.device, self.sizes, self.clock, self.limit = spec, device, sorted(set(sizes)), clock, limit
        self.contenders = [_Contender(c) for c in candidates]
        self.repeats = 1 if device.type == "cpu" else GPU_CALLS
        self.copy_bytes = cold_bytes(device, len(candidates))
        self.kept_bytes = 0

    def run(self, step: Callable[[int], None] | None) -> list[KernelTimes]:
        """Check and time each kernel by itself, then those that are not slow in turn."""
        if self.clock() < self.limit:
            with torch.inference_mode(), on(self.device):
                weight = random_weight(self.spec)
                moved = weight.to(self.device)
                xs = {m: inputs(m, self.spec, m, self.device) for m in self.sizes}
                for i, contender in enumerate(self.contenders):
                    if self.clock() < self.limit:
                        self._enter(contender, weight, moved, xs)
                    if step is not None:
                        step(i + 1)
                self._rounds(xs)
        return [self._row(c) for c in self.contenders]

    def _enter(self, contender: _Contender, weight: QuantizedWeight, moved: QuantizedWeight, xs: dict[int, Tensor]) -> None:
        """Pack, check and time one kernel. It keeps its calls if it takes part in the rounds."""
        try:
            nbytes = self._prepare(contender, moved)
            for m in self.sizes:
                if self.clock() + contender.best.get(self._next_smaller(m), 0.0) >= self.limit:
                    break  # a call takes at least as long as one of the next smaller M
                check_result(contender.calls[0](xs[m]), xs[m], weight, _CHECKED_M, _CHECKED_N)
                if self.clock() >= self.limit:
                    break
                self._time(contender, m, xs[m])
            if contender.best:
                contender.status = "measured" if len(contender.best) == len(self.sizes) else "partly"
            if all(self._is_slow(contender, m) for m in contender.best) or self.kept_bytes + nbytes > _KEPT_BYTES:
                contender.calls = []
            else:
                self.kept_bytes += nbytes
        except WrongResult as error:
            contender.stop("failed", str(error))
        except (InputError, MemoryError, torch.OutOfMemoryError) as error:  # the weight's values, a package's version, no memory
            contender.stop("skipped", summary_of(error))
        except Exception as error:  # third-party kernels raise anything
            contender.stop("skipped" if type(error) is RuntimeError and "alloc" in str(error) else "failed", summary_of(error))

    def _prepare(self, contender: _Contender, weight: QuantizedWeight) -> int:
        """Pack the weight, in as many copies as the cache cannot hold. Returns their bytes."""
        contender.calls, nbytes = packed_calls(contender.candidate.kernel, weight, self.spec, self.copy_bytes)
        return nbytes * len(contender.calls)

    def _row(self, contender: _Contender) -> KernelTimes:
        times, status = contender.best, contender.status
        if status == "measured" and all(self._is_slow(contender, m) for m in times):
            status = "slow"
        return KernelTimes(contender.candidate.name, status, contender.reason, times, _estimate(contender.candidate))

    def _is_slow(self, contender: _Contender, m: int) -> bool:
        return contender.best[m] > SLOW * min(c.best[m] for c in self.contenders if m in c.best)

    def _next_smaller(self, m: int) -> int:
        """The next smaller M, 0 for none."""
        return max((size for size in self.sizes if size < m), default=0)

    def _rounds(self, xs: dict[int, Tensor]) -> None:
        """Call the kernels in turn, so that what else the machine does slows all of them, and keep each one's best time."""
        for i, m in enumerate(self.sizes):
            racing = [c for c in self.contenders if c.calls and m in c.best and not self._is_slow(c, m)]
            slice_end = self.clock() + (self.limit - self.clock()) / (len(self.sizes) - i)
            shuffler = random.Random(m)  # a kernel is slower after one that has evicted its input and code, so the order changes
            for _ in range(_ROUNDS if len(racing) > 1 else 0):
                if self.clock() + self.repeats * sum(c.best[m] for c in racing) > slice_end:
                    break
                for contender in shuffler.sample(racing, len(racing)):
                    self._time(contender, m, xs[m])

    def _time(self, contender: _Contender, m: int, x: Tensor) -> None:
        calls, first = contender.calls, contender.next_call
        contender.next_call += self.repeats
        batch = [partial(calls[(first + i) % len(calls)], x) for i in range(self.repeats)]
        contender.best[m] = min(seconds_of(batch, self.device, self.clock), contender.best.get(m, math.inf))
