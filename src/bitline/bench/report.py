"""What `bitline bench` reports and keeps in JSON. Times are seconds of one call, by M; sizes are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bitline.errors import InputError

SCHEMA = 1
_MAX_BYTES = 1 << 28

Times = dict[int, float]  # by M


class KernelResult(msgspec.Struct):
    """The part of a kernel, or of a baseline, in a problem.

    Attributes:
        kernel: Class name, or the baseline's name.
        status: "ok"; "failed", wrong results or an exception; "refused", it cannot take these values, or there is no memory;
            "unimplemented", it was asked for and cannot run the layer; "skipped", by --skip-impl.
        reason: Why it is not "ok".
        packed_bytes: Of its packed weight; 0 where it did not run.
        error: Largest absolute error on random data, a baseline's relative to the result's size; None where it was not checked.
        allowed: Allowed for that M.
        measured_seconds: Medians; empty where it was not timed.
        best_seconds: Of the same calls the least.
        sustained_seconds: After a while of the same load, on a GPU with --sustained.
        calls: Timed rounds. Kernels of ten times the fastest one's time have three.
        estimated_seconds: What selection estimates.
    """

    kernel: str
    status: str
    reason: str = ""
    packed_bytes: int = 0
    error: float | None = None
    allowed: float | None = None
    measured_seconds: Times = msgspec.field(default_factory=dict)
    best_seconds: Times = msgspec.field(default_factory=dict)
    sustained_seconds: Times = msgspec.field(default_factory=dict)
    calls: dict[int, int] = msgspec.field(default_factory=dict)
    estimated_seconds: Times = msgspec.field(default_factory=dict)


class ProblemResult(msgspec.Struct):
    """A problem's results.

    Attributes:
        problem: The problem as a line of a batch file.
        status: "passed"; "failed", a kernel did; "unimplemented", no kernel that was asked for can run it, the reference not
            counted unless it was asked for by name; "skipped", the same because of --skip-impl.
        line: Of the batch file; 0 for none.
        layers: Layers of a checkpoint that have this spec; 0 without a checkpoint.
        example: The name of one.
        scheme: As --scheme, or the spec's own.
        spec: For `LinearSpec.parse`.
        shape: N and K.
        m: Batch sizes.
        mode: "C", "P" or "CP".
        kernel: The kernel that selection chooses.
        weight_bytes: Of the weight as the checkpoint holds it.
        dense_dtype: Of `dense_seconds`.
        read_seconds: Reading weight, input and output once, at the rate of reads between the kernels' calls (CPU) or at
            `Report.bandwidth`.
        compute_seconds: The multiplications at `Report.matmul_rates`.
        dense_seconds: torch's linear of the dense weight.
        dense_sustained_seconds: The same under sustained load, on a GPU with --sustained.
        kernels: One for each kernel that was asked for.
        baselines: One for each baseline that has something for the layer. None of them changes the status.
    """

    problem: str
    status: str
    line: int
    layers: int
    example: str
    scheme: str
    spec: str
    shape: tuple[int, int]
    m: list[int]
    mode: str
    kernel: str
    weight_bytes: int
    dense_dtype: str
    read_seconds: Times = msgspec.field(default_factory=dict)
    compute_seconds: Times = msgspec.field(default_factory=dict)
    dense_seconds: Times = msgspec.field(default_factory=dict)
    dense_sustained_seconds: Times = msgspec.field(default_factory=dict)
    kernels: list[KernelResult] = msgspec.field(default_factory=list)
    baselines: list[KernelResult] = msgspec.field(default_factory=list)

    def limit(self, m: int) -> float:
        """The larger of the read and the compute limit, in seconds."""
        return max(self.read_seconds[m], self.compute_seconds[m])


class Report(msgspec.Struct):
    """A run's results.

    Attributes:
        machine: `bitline.bench.machine`.
        conditions: Threads, the system's load before and after, whether a GPU was timed under sustained load, baselines.
        problems: In their order.
        seconds: Time taken.
        bandwidth: Bytes per second of a large read; None where nothing was timed.
        matmul_rates: Operations per second of torch's matrix product, by type of the operands.
        path: The checkpoint or batch file; None for a shape.
        planned: Problems of the whole run: more than `problems` has while it runs, and where it was interrupted.
        schema: Of this JSON.
    """

    machine: dict[str, Any]
    conditions: dict[str, Any]
    problems: list[ProblemResult]
    seconds: float
    bandwidth: float | None = None
    matmul_rates: dict[str, float] = msgspec.field(default_factory=dict)
    path: str | None = None
    planned: int = 0
    schema: int = SCHEMA

    @property
    def ok(self) -> bool:
        """No problem failed or is unimplemented."""
        return not any(p.status in ("failed", "unimplemented") for p in self.problems)

    def count(self, status: str) -> int:
        """Problems of a status."""
        return sum(p.status == status for p in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values, with the number of problems of each status."""
        counts = {status: self.count(status) for status in ("passed", "failed", "unimplemented", "skipped")}
        head = {"tests": len(self.problems), **counts, "ok": self.ok}
        built: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return {"schema": self.schema, **head, **built}


def read_report(path: Path | str) -> Report:
    """A report from the JSON of `bitline bench --out` or `--json`.

    Raises:
        InputError: For a file that cannot be read, or is none.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError("cannot read the report", file=path, found=error.strerror or str(error)) from error
    if len(data) > _MAX_BYTES:
        raise InputError("the report is too large", file=path, expected=f"at most {_MAX_BYTES >> 20} MiB")
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InputError("not a report of `bitline bench`", file=path, found=str(error) or type(error).__name__) from error
    if report.schema != SCHEMA:
        raise InputError(
            "a report of another version of Bitline", file=path, field="schema", found=report.schema, expected=SCHEMA
        )
    return report
