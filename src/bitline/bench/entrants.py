"""What takes part in a problem: kernels and baselines, and the data on which they are checked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitline import timing
from bitline.bench.baselines import MAX_DEVIATION, Baseline, Maker
from bitline.bench.report import KernelResult
from bitline.errors import InputError, summary_of
from bitline.select import Candidate
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.testing.poison import poison
from bitline.testing.tolerance import Expected
from bitline.timing import Call, WrongResult
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

CHECKED_M = {"C": 256, "P": 16}  # rows of x that are compared, by mode
CHECKED_N = {"C": 4096, "P": 512}  # rows of the weight, the first and the last half of them
CHECKED_N_FP32 = 512  # whose baseline, one accumulator along K, takes long
MAX_REASON = 300

Calls = Sequence[Callable[[], Any]]


def lacks_memory(error: Exception) -> bool:
    """Whether an exception says that there is no memory: Python's, torch's, or that of torch's CPU allocator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and "alloc" in str(error)


class Data:
    """A weight, its inputs and the expected outputs of a problem, shared by all entrants.

    Raises ValueError where exact data is wanted and the weight type has none.
    """

    def __init__(self, spec: LinearSpec, sizes: Sequence[int], device: torch.device, mode: str, *, exact: bool = False) -> None:
        self.spec, self.exact = spec, exact
        self.weight = lossless_weight(spec, 1) if exact else random_weight(spec, 1)
        self.moved: QuantizedWeight = self.weight.to(device)
        make = lossless_inputs if exact else inputs
        self.xs = {m: make(m, spec, m, device) for m in sizes}
        most = min(CHECKED_N[mode], CHECKED_N_FP32 if spec.act_dtype == torch.float32 and not exact else 1 << 30)
        half = most // 2
        self.rows = [slice(0, spec.n)] if spec.n <= most else [slice(0, half), slice(spec.n - half, spec.n)]
        self.most_m = CHECKED_M[mode]
        self._expected: dict[int, list[Expected]] = {}

    def expected(self, m: int) -> list[Expected]:
        """For the rows of the weight that count, the outputs of the rows of x that do."""
        if m not in self._expected:
            x = self.xs[m][:: self._step(m)].cpu().contiguous()
            parts = [self.weight.narrow(0, rows.start, rows.stop) for rows in self.rows]
            self._expected[m] = [Expected.of(x, part) for part in parts]
        return self._expected[m]

    def _step(self, m: int) -> int:
        return timing.row_step(m, self.spec, self.most_m)

    def check(self, y: Any, m: int) -> tuple[float, float]:
        """The largest error of a result and what is allowed. Raises WrongResult for more, and on exact data for any."""
        y = timing.require_form(y, self.xs[m], self.spec)[:: self._step(m)]
        worst = (0.0, 0.0)
        for rows, expected in zip(self.rows, self.expected(m), strict=True):
            out = y[:, rows].cpu()
            if self.exact:
                _require_exact(out, expected.exact, m)
                continue
            found = expected.compare(out)
            timing.require_close(found, m)
            worst = max(worst, (found.error, found.allowed))
        return worst

    def check_nearly(self, y: Tensor, m: int) -> float:
        """The deviation of a baseline's result, root of the squared errors' share. Raises WrongResult above MAX_DEVIATION."""
        if y.dim() != 2 or y.shape[0] < m or y.shape[1] != self.spec.n:
            raise WrongResult(f"its result with M={m} is {list(y.shape)}, not [{m}, {self.spec.n}]")
        y = y[:m][:: self._step(m)].cpu().double()
        exact = torch.cat([expected.exact for expected in self.expected(m)], 1)
        error = float((torch.cat([y[:, rows] for rows in self.rows], 1) - exact).norm() / exact.norm().clamp(min=1e-30))
        if not error <= MAX_DEVIATION:  # a NaN too
            raise WrongResult(f"M={m}: its result differs by {error:.2g} of its size, allowed is {MAX_DEVIATION}")
        return error


class Entrant:
    """One that takes part, with its result so far: a kernel (Contender) or a baseline (Peer)."""

    kernel: Any = None
    cuda_graph = True

    def __init__(self, name: str) -> None:
        self.result = KernelResult(name, "ok")

    @property
    def runs(self) -> bool:
        """Nothing ended its part."""
        return self.result.status == "ok"

    def attempt(self, work: Callable[[], None]) -> None:
        """Do some of its work, if it still takes part; what that raises ends its part."""
        if not self.runs:
            return
        try:
            work()
        except WrongResult as error:
            self.stop("failed", str(error))
        except InputError as error:  # the weight's values, a package's version
            self.stop("refused", summary_of(error))
        except Exception as error:  # third-party kernels raise anything
            self.stop("refused" if lacks_memory(error) else "failed", summary_of(error))

    def enter(self, data: Data, nbytes: int) -> None:
        """Pack the weight in copies that no cache holds, `nbytes` in all, and check a part of the result at every M."""
        raise NotImplementedError

    def calls_at(self, x: Tensor) -> Calls:
        """What is timed for x, one call for each copy of the weight."""
        raise NotImplementedError

    def record(self, m: int, values: Sequence[float]) -> None:
        """Keep the times of calls."""
        self.result.measured_seconds[m], self.result.best_seconds[m] = statistics.median(values), min(values)
        self.result.calls[m] = len(values)

    def stop(self, status: str, reason: str) -> None:
        """End its part."""
        result = self.result
        result.status, result.reason = status, reason[:MAX_REASON]
        for times in (result.measured_seconds, result.best_seconds, result.sustained_seconds, result.calls):
            times.clear()


class Contender(Entrant):
    """A kernel."""

    def __init__(self, candidate: Candidate, skipped: bool) -> None:
        super().__init__(candidate.name)
        self.kernel, self.cuda_graph, self.calls = candidate.kernel, candidate.kernel.cuda_graph, list[Call]()
        self.result.estimated_seconds = dict(zip(candidate.m, candidate.estimates, strict=False))
        if skipped:
            self.stop("skipped", "--skip-impl names it")
        elif not candidate.verdict:
            self.stop("unimplemented", candidate.verdict.reason)

    def enter(self, data: Data, nbytes: int) -> None:
        """As the base class says."""
        self.calls, self.result.packed_bytes = timing.packed_calls(self.kernel, data.moved, data.spec, nbytes)
        for m, x in data.xs.items():
            self._note(data.check(self.calls[0](x), m))

    def check_one(self, data: Data) -> None:
        """Run at every M in poisoned memory, then check what that gave."""
        with poison():
            calls, self.result.packed_bytes = timing.packed_calls(self.kernel, data.moved, data.spec, 0)
            outputs = {m: calls[0](x) for m, x in data.xs.items()}
        for m, y in outputs.items():
            self._note(data.check(y, m))

    def calls_at(self, x: Tensor) -> Calls:
        """As the base class says."""
        return [partial(call, x) for call in self.calls]

    def stop(self, status: str, reason: str) -> None:
        """As the base class says; the copies are dropped."""
        super().stop(status, reason)
        self.calls = []

    def _note(self, found: tuple[float, float]) -> None:
        """Keep the worst error over what is allowed."""
        error, allowed = found
        if self.result.error is None or error * (self.result.allowed or 0.0) > self.result.error * allowed:
            self.result.error, self.result.allowed = error, allowed


class Peer(Entrant):
    """A baseline. It is left out (`applies` is false) where it has nothing for the layer."""

    def __init__(self, name: str, maker: Maker) -> None:
        super().__init__(name)
        self.maker, self.applies, self.copies = maker, True, list[list[Tensor]]()

    def enter(self, data: Data, nbytes: int) -> None:
        """As the base class says."""
        try:
            made = self.maker(data.moved)
        except ImportError as error:
            self.stop("refused", summary_of(error))
            return
        if made is None:
            self.applies = False
            self.stop("skipped", "not for such layers")
            return
        self.made: Baseline = made
        self.cuda_graph, self.result.packed_bytes = made.cuda_graph, sum(t.nbytes for t in made.tensors)
        self.result.allowed = MAX_DEVIATION
        for m, x in data.xs.items():
            entered = made.enter(x)
            deviation = data.check_nearly(made.leave(made.call(entered, *made.tensors), entered), m)
            self.result.error = max(self.result.error or 0.0, deviation)
        self.copies = timing.copies(made.tensors, nbytes)

    def calls_at(self, x: Tensor) -> Calls:
        """As the base class says."""
        entered = self.made.enter(x)
        return [partial(self.made.call, entered, *tensors) for tensors in self.copies]

    def stop(self, status: str, reason: str) -> None:
        """As the base class says; the copies are dropped."""
        super().stop(status, reason)
        self.copies = []


def _require_exact(out: Tensor, exact: Tensor, m: int) -> None:
    wrong = ~(out.double() == exact)
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise WrongResult(
            f"M={m} on lossless data: {int(wrong.sum())} of {wrong.numel()} elements differ, the first at [{row}, {column}] is "
            f"{float(out[row, column])!r}, not {float(exact[row, column])!r}"
        )
