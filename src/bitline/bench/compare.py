"""What became slower between two reports of `bitline bench`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from bitline.bench.report import KernelResult, ProblemResult, Report
from bitline.errors import InputError

THRESHOLD = 1.1


@dataclass(frozen=True)
class Difference:
    """One kernel of a layer at one M in two reports.

    Attributes:
        scheme: The layer's.
        shape: N and K.
        kernel: Class name.
        m: M.
        before: Seconds in the first report.
        after: Seconds in the second one.
    """

    scheme: str
    shape: tuple[int, int]
    kernel: str
    m: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """Time after over time before."""
        return self.after / self.before


@dataclass(frozen=True)
class Comparison:
    """Two reports compared.

    Attributes:
        compared: Times that both have.
        slower: Those that take longer by more than the threshold, the worst first.
        faster: Those that take less by more than the threshold, the best first.
        broken: Kernels that were "ok" in the first report and are not in the second: (scheme, shape, kernel, reason).
        missing: Times that only the first report has, of kernels that did not break.
        machines: What differs between the machines: field, first, second.
    """

    compared: int
    slower: tuple[Difference, ...]
    faster: tuple[Difference, ...]
    broken: tuple[tuple[str, tuple[int, int], str, str], ...]
    missing: int
    machines: tuple[tuple[str, str, str], ...]

    @property
    def ok(self) -> bool:
        """Nothing is slower or broken."""
        return not self.slower and not self.broken


_Key = tuple[str, str]  # spec and kernel


def compare_reports(before: Report, after: Report, threshold: float = THRESHOLD) -> Comparison:
    """Compare the times of equal layers, kernels and M.

    Args:
        before: The first report.
        after: The second report.
        threshold: Ratio of times above which a time is slower, and below whose inverse it is faster; at least 1.

    Raises:
        InputError: For a threshold below 1, and reports without a result in common.
    """
    if not (math.isfinite(threshold) and threshold >= 1):
        raise InputError("a threshold is a ratio of times", found=threshold, expected="at least 1, as in 1.1")
    old, new = _kernels(before), _kernels(after)
    common = [key for key in old if key in new]
    if not common:
        raise InputError("these reports have no layer and kernel in common")
    differences, broken, missing = [], [], sum(len(old[key][1].measured_seconds) for key in old if key not in new)
    for key in common:
        (problem, was), (_, now) = old[key], new[key]
        if was.status == "ok" and now.status in ("failed", "refused", "unimplemented"):
            broken.append((problem.scheme, problem.shape, was.kernel, now.reason))
            continue
        missing += sum(m not in now.measured_seconds for m in was.measured_seconds)
        differences += [
            Difference(problem.scheme, problem.shape, was.kernel, m, seconds, now.measured_seconds[m])
            for m, seconds in was.measured_seconds.items()
            if m in now.measured_seconds
        ]
    slower = sorted((d for d in differences if d.ratio > threshold), key=lambda d: -d.ratio)
    faster = sorted((d for d in differences if d.ratio < 1 / threshold), key=lambda d: d.ratio)
    return Comparison(len(differences), tuple(slower), tuple(faster), tuple(broken), missing, _machines(before, after))


def _kernels(report: Report) -> dict[_Key, tuple[ProblemResult, KernelResult]]:
    """The results of a report by layer and kernel; those of repeated problems as one, the later time at the same M."""
    found: dict[_Key, tuple[ProblemResult, KernelResult]] = {}
    for problem in report.problems:
        for result in problem.kernels:
            key = problem.spec, result.kernel
            if key in found:
                times = found[key][1].measured_seconds | result.measured_seconds
                result = msgspec.structs.replace(result, measured_seconds=times)
            found[key] = problem, result
    return found


def _machines(before: Report, after: Report) -> tuple[tuple[str, str, str], ...]:
    fields = ("name", "threads", "platform", "python", "versions")
    pairs = ((field, str(before.machine.get(field)), str(after.machine.get(field))) for field in fields)
    return tuple(pair for pair in pairs if pair[1] != pair[2])
