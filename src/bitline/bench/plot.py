"""The roofline of a report: operations per second over arithmetic intensity, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitline.bench.report import ProblemResult, Report
from bitline.errors import BitlineError, InputError
from bitline.select import short_name
from bitline.types import DTYPES, LinearSpec

_LIMIT, _DENSE = "#444444", "#9aa3ad"
_MARKS = "osD^vPX*<>"


def roofline(report: Report, path: Path | str) -> None:
    """Draw a report's times under the read and compute limits of its machine.

    A point is a kernel's median at one M: operations per byte of weight, input and output, and operations per second.

    Args:
        report: With times.
        path: The picture's file; its ending says the format (.png, .svg, .pdf).

    Raises:
        BitlineError: Without matplotlib.
        InputError: For a report without times, and a file that cannot be written.
    """
    series = points(report)
    if not any(series.values()) or report.bandwidth is None:
        raise InputError("nothing to draw: no kernel was timed", fix="run in mode P")
    figure = figure_class()(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    reach = [x for values in series.values() for x, _ in values]
    low, high = min(reach) / 2, max(reach) * 2
    for name, rate in report.matmul_rates.items():
        edge = rate / report.bandwidth
        xs = [low, edge, max(high, 2 * edge)] if low < edge else [low, high]
        axis.plot(xs, [min(report.bandwidth * x, rate) / 1e12 for x in xs], color=_LIMIT, linewidth=1)
        axis.annotate(f"{name}: {_tera(rate)} TFLOP/s", (xs[-1], rate / 1e12), fontsize=8, color=_LIMIT, ha="right", va="bottom")
    axis.annotate(
        f"{report.bandwidth / 1e9:.3g} GB/s", (low, report.bandwidth * low / 1e12), fontsize=8, color=_LIMIT, va="bottom"
    )
    for i, (name, values) in enumerate(series.items()):
        style = {"color": _DENSE, "marker": "^"} if name == "dense" else {"marker": _MARKS[i % len(_MARKS)]}
        label = "dense linear" if name == "dense" else short_name(name)
        axis.plot(*zip(*values, strict=True), linestyle="", label=label, markersize=4, alpha=0.75, **style)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte of weight, input and output")
    axis.set_ylabel("TFLOP/s")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    threads = f", threads: {report.machine.get('threads')}" if report.machine.get("device") == "cpu" else ""
    axis.set_title(f"{report.machine.get('name')}{threads}", fontsize=10)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError("cannot write the plot", file=path, found=str(error)) from error


def points(report: Report) -> dict[str, list[tuple[float, float]]]:
    """By kernel, and for dense linear by "dense": operations per byte, and 10**12 operations per second, of each timed call."""
    found: dict[str, list[tuple[float, float]]] = {}
    for problem in report.problems:
        spec = LinearSpec.parse(problem.spec)
        dense = spec.n * spec.k * DTYPES[problem.dense_dtype].itemsize
        for m, seconds in problem.dense_seconds.items():
            found.setdefault("dense", []).append(_point(problem, m, dense, seconds))
        for result in problem.kernels:
            for m, seconds in result.measured_seconds.items():
                found.setdefault(result.kernel, []).append(_point(problem, m, problem.weight_bytes, seconds))
    return found


def _point(problem: ProblemResult, m: int, weight_bytes: int, seconds: float) -> tuple[float, float]:
    n, k = problem.shape
    operations = 2 * m * n * k
    return operations / (weight_bytes + m * (n + k) * DTYPES[problem.dense_dtype].itemsize), operations / seconds / 1e12


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g}"


def figure_class() -> Any:
    """matplotlib's Figure, without pyplot, which would choose a window system. Raises BitlineError where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BitlineError("a plot needs matplotlib", found=str(error), fix="pip install 'bitline[plot]'") from error
    return Figure
