"""Reports in files: written while a run goes on, so that an interrupted one loses nothing, and taken up again."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from bitline.bench.grid import Problem
from bitline.bench.report import ProblemResult, Report
from bitline.errors import InputError
from bitline.timing import Clock

_SHARE = 10  # the time between two writes is at least so many times that of a write
_SAME_MACHINE = ("platform", "device", "name", "threads", "python", "versions", "commit")
_SAME_CONDITIONS = ("sustained", "seconds_of_calls", "baselines")


def write_report(report: Report, path: Path | str) -> None:
    """Write a report's JSON. A reader finds the old file or the new one, never a part. Raises InputError."""
    path = Path(path)
    content = msgspec.json.format(msgspec.json.encode(report.to_dict()), indent=1) + b"\n"
    try:
        if _is_no_file(path):  # before links are followed: /dev/stdout may lead to a pipe, which has no path
            path.write_bytes(content)
            return
        target = path.resolve()
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(content)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InputError("cannot write the report", file=path, found=error.strerror or str(error)) from error


def _is_no_file(path: Path) -> bool:
    """A pipe, a terminal, /dev/null."""
    return path.exists() and not path.is_file()


class Keeper:
    """Writes the report of a run that goes on: after every problem, less often where problems take less time than writing.

    As a context it writes once more at the end, whatever ended it. To what is no file, such as /dev/stdout, it writes only then.
    """

    def __init__(self, path: Path | str, clock: Clock = time.perf_counter) -> None:
        self.path, self.clock = path, clock
        self._last: Report | None = None
        self._next = float("inf") if _is_no_file(Path(path)) else float("-inf")

    def __call__(self, report: Report) -> None:
        """Keep the report so far."""
        self._last = report
        started = self.clock()
        if started >= self._next:
            write_report(report, self.path)
            self._next = self.clock() + _SHARE * (self.clock() - started)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *error: object) -> None:
        if self._last is not None:
            write_report(self._last, self.path)


class Unfinished:
    """The results of a run that was interrupted.

    Args:
        earlier: Its report.
        now: The report of the run that takes it up; machine and conditions count.

    Raises:
        InputError: Where those differ, and where the commit does not say which code ran.
    """

    def __init__(self, earlier: Report, now: Report) -> None:
        facts = [(name, earlier.machine.get(name), now.machine.get(name)) for name in _SAME_MACHINE]
        facts += [(name, earlier.conditions.get(name), now.conditions.get(name)) for name in _SAME_CONDITIONS]
        different = [f"{name} was {before}, is {after}" for name, before, after in facts if before != after]
        if different:
            raise InputError("the earlier results are of another machine, commit or options", found="; ".join(different),
                             fix="give the same options there, or write to a new file")  # fmt: skip
        if str(now.machine.get("commit")).endswith("+"):
            raise InputError("the earlier results may be of other code", found=f"commit {now.machine['commit']}, with changes",
                             expected="a clone without changes", fix="commit them, or write to a new file")  # fmt: skip
        self._results = defaultdict[str, list[ProblemResult]](list)
        for result in earlier.problems:
            self._results[result.problem].append(result)

    def take(self, problem: Problem) -> ProblemResult | None:
        """The result of a problem, once for each time that the earlier report has it; None where it has to run."""
        found = self._results[str(problem)]
        if not found:
            return None
        layers = problem.layers
        return msgspec.structs.replace(
            found.pop(0), line=problem.line, layers=len(layers), example=layers[0] if layers else ""
        )  # fmt: skip
