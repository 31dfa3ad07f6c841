"""The text of `bitline bench`: a table for each timed layer, one of all checked ones, and what became slower."""

from __future__ import annotations

from rich.markup import escape
from rich.text import Text

from bitline.bench.compare import Comparison, Difference
from bitline.bench.report import KernelResult, ProblemResult, Report
from bitline.cli.console import out
from bitline.cli.render import fitted, hanging, put, rate
from bitline.select import format_seconds, short_name
from bitline.types import DTYPES

_STYLES = {"passed": "green", "skipped": "yellow", "failed": "bold red", "unimplemented": "bold red"}
_SHOWN = 40  # faster times


def show(report: Report) -> None:
    """Print a report."""
    machine = report.machine
    threads = f", {machine['threads']} thread{'s' * (machine['threads'] != 1)}" if machine["device"] == "cpu" else ""
    what = escape(report.path or "layers of random weights")
    out.print(f"[bold]{what}[/] on {machine['device']}, {machine['name']}{threads}", highlight=False, soft_wrap=True)
    if report.bandwidth is not None:
        rates = "; ".join(f"{name} {rate(value, 'FLOP/s')}" for name, value in report.matmul_rates.items())
        put(hanging("limits", f"reads {rate(report.bandwidth, 'B/s')}; products of torch: {rates}"))
    for problem in report.problems:
        if problem.dense_seconds:
            _show_times(problem)
    checked = [problem for problem in report.problems if not problem.dense_seconds]
    if checked:
        _show_checks(checked)
    for problem in report.problems:
        for result in problem.kernels:
            if result.status in ("failed", "unimplemented"):
                where = f"{_line(problem)}{problem.scheme} {_shape(problem)}: {short_name(result.kernel)} {result.status}: "
                out.print(Text.assemble((where, "bold red"), result.reason), highlight=False, soft_wrap=True)
    counts = ", ".join(f"{report.count(status)} {status}" for status in ("passed", "skipped", "unimplemented", "failed"))
    style = "green" if report.ok else "bold red"
    tests = f"{len(report.problems)} {'test' if len(report.problems) == 1 else 'tests'}"
    out.print(f"[{style}]{tests}: {counts}[/], in {report.seconds:.1f} s", highlight=False)


def _line(problem: ProblemResult) -> str:
    return f"line {problem.line}: " if problem.line else ""


def _shape(problem: ProblemResult) -> str:
    return f"{problem.shape[0]}×{problem.shape[1]}"


def _show_times(problem: ProblemResult) -> None:
    head = f"{problem.layers} × {problem.example}, " if problem.layers > 1 else f"{problem.example}, " if problem.example else ""
    put(Text(f"\n{head}{problem.scheme} {_shape(problem)}, input {problem.dense_dtype}", "bold"))
    entrants = [*problem.kernels, *problem.baselines]
    sustained = any(result.sustained_seconds for result in entrants)
    columns = ("M, kernel", "time", *(("sustained",) if sustained else ()), "/limit", "/dense", "rate", "")
    lines: list[list[str | Text]] = []
    for m in problem.m:
        own = problem.dense_seconds.get(m)
        if own is None:
            continue
        limit, blank = problem.limit(m), [""] if sustained else []
        kind = "read limit" if problem.read_seconds[m] >= problem.compute_seconds[m] else "compute limit"
        lines.append([Text.assemble((f"M={m} ", "bold"), (kind, "dim")), format_seconds(limit), *blank, "", "", "", ""])
        rows: list[tuple[float, KernelResult | None]] = [(own, None)]
        rows += [(result.measured_seconds[m], result) for result in entrants if m in result.measured_seconds]
        for seconds, result in sorted(rows, key=lambda row: row[0]):
            lines.append(_cells(problem, m, seconds, result, sustained=sustained))
    put(fitted(columns, lines, drop=("", "rate", "/dense", "/limit", "sustained")))
    for result in problem.kernels:
        if result.status in ("refused", "skipped"):
            put(hanging(short_name(result.kernel), f"{result.status}: {result.reason}", "yellow"))
    for result in problem.baselines:
        if result.status != "ok":
            put(hanging(result.kernel, f"{result.status}: {result.reason}", "yellow"))


def _cells(problem: ProblemResult, m: int, seconds: float, result: KernelResult | None, *, sustained: bool) -> list[str | Text]:
    """A row of a table. result: None for dense linear."""
    (n, k), width = problem.shape, DTYPES[problem.dense_dtype].itemsize
    weight = n * k * width if result is None else problem.weight_bytes
    name = Text("  dense linear", "dim")
    if result is not None and any(result is baseline for baseline in problem.baselines):
        name = Text(f"  {result.kernel}", "dim")
    elif result is not None:
        mark = ("→ ", "green") if result.kernel == problem.kernel else "  "
        name = Text.assemble(mark, short_name(result.kernel))
    later = (problem.dense_sustained_seconds if result is None else result.sustained_seconds).get(m)
    extra = [format_seconds(later) if later is not None else ""] if sustained else []
    few = f"{result.calls[m]} calls" if result is not None and result.calls.get(m, 1 << 30) < 5 and not sustained else ""
    reads, operations = (weight + m * (n + k) * width) / seconds, 2 * m * n * k / seconds
    reached = rate(reads, "B/s") if problem.read_seconds[m] >= problem.compute_seconds[m] else rate(operations, "FLOP/s")
    ratios = [f"{seconds / problem.limit(m):.2f}", f"{seconds / problem.dense_seconds[m]:.2f}"]
    return [name, format_seconds(seconds), *extra, *ratios, reached, few]


def _show_checks(problems: list[ProblemResult]) -> None:
    lines = ("line",) if any(problem.line for problem in problems) else ()
    rows: list[list[str | Text]] = []
    for problem in problems:
        line = [str(problem.line)] if lines else []
        ran = [result for result in problem.kernels if result.status == "ok"]
        worst = max((result.error / result.allowed for result in ran if result.error is not None and result.allowed), default=0.0)
        sizes = ",".join(map(str, problem.m)) if len(problem.m) < 6 else f"{problem.m[0]}..{problem.m[-1]}"
        what = f"{problem.example or problem.scheme} {_shape(problem)} {problem.dense_dtype}"
        status = Text(problem.status, _STYLES[problem.status])
        rows.append([*line, what, sizes, str(len(ran)), f"{worst:.2f}" if ran else "-", status])
    put(fitted((*lines, "layers", "M", "kernels", "error", ""), rows, drop=("kernels", "error", "M")))


def show_comparison(found: Comparison, threshold: float) -> None:
    """Print what became slower, what broke, and what became faster."""
    for name, before, after in found.machines:
        put(hanging("machine", f"{name} differs: {before}, then {after}", "yellow"))
    if found.slower:
        _show_differences("slower", found.slower)
    for scheme, shape, kernel, reason in found.broken:
        where = f"{scheme} {shape[0]}×{shape[1]}: {short_name(kernel)} no longer runs: "
        out.print(Text.assemble((where, "bold red"), reason), highlight=False, soft_wrap=True)
    if found.faster:
        _show_differences("faster", found.faster[:_SHOWN])
    missing = f", {found.missing} only in the first report" if found.missing else ""
    counts = f"{len(found.slower)} slower and {len(found.faster)} faster by more than {threshold:g} times"
    style = "green" if found.ok else "bold red"
    broken = f", {len(found.broken)} kernels broken" if found.broken else ""
    out.print(f"[{style}]{found.compared} times compared: {counts}{broken}[/]{missing}", highlight=False)


def _show_differences(title: str, rows: tuple[Difference, ...]) -> None:
    lines = []
    for row in rows:
        shape = f"{row.scheme} {row.shape[0]}×{row.shape[1]}"
        cells = [format_seconds(row.before), format_seconds(row.after), f"{row.ratio:.2f}"]
        lines.append([shape, short_name(row.kernel), str(row.m), *cells])
    put(fitted(("layers", "kernel", "M", "before", "after", title), lines, drop=("before", "after")))
