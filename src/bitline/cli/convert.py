"""`bitline convert` and `bitline quantize`: a checkpoint written in a format, verified by reading it back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from bitline.cli.console import out
from bitline.cli.fetch import local_path
from bitline.cli.progress import progress_bars
from bitline.cli.render import put, size, table
from bitline.conversion import TARGETS, ConversionReport, LayerReport, convert, quantize_checkpoint
from bitline.rtn import SCHEMES


def target_of(name: str) -> str:
    """The format of --to, in any case."""
    if name.lower() not in TARGETS:
        raise typer.BadParameter(f"unknown format {name!r}; it is one of {', '.join(TARGETS)}", param_hint="--to")
    return name.lower()


def convert_report(source: str, result: Path, to: str, lossy: bool, weights_only: bool, quiet: bool) -> dict[str, Any]:
    """The report of `convert` as JSON-compatible values."""
    with _exit_on_signals(), _progress_bars(quiet) as progress:
        return _report(
            convert(local_path(source), result.expanduser(), to=to, lossy=lossy, weights_only=weights_only, progress=progress)
        )


def quantize_report(
    source: str, result: Path, to: str, scheme: str, group_size: int | None, ignore: list[str], quiet: bool
) -> dict[str, Any]:
    """The report of `quantize` as JSON-compatible values."""
    if scheme.upper() not in SCHEMES:
        raise typer.BadParameter(f"unknown scheme {scheme!r}; it is one of {', '.join(SCHEMES)}", param_hint="--scheme")
    with _exit_on_signals(), _progress_bars(quiet) as progress:
        report = quantize_checkpoint(local_path(source), result.expanduser(), scheme=scheme, group_size=group_size, to=to,
                                     ignore=ignore, progress=progress)  # fmt: skip
    return _report(report)


def _report(report: ConversionReport) -> dict[str, Any]:
    kinds: dict[Any, list[LayerReport]] = defaultdict(list)
    for layer in report.layers:
        kinds[(layer.format, layer.before, layer.after, layer.changes, layer.shape, layer.exact)].append(layer)
    return report.to_dict() | {"kinds": [_kind(members) for members in kinds.values()]}


def _kind(members: list[LayerReport]) -> dict[str, Any]:
    first = members[0]
    return {
        "layers": len(members), "example": first.name, "shape": list(first.shape), "format": first.format,
        "before": first.before, "after": first.after, "changes": list(first.changes), "exact": first.exact,
        "nbytes": sum(m.nbytes for m in members), "nbytes_after": sum(m.nbytes_after for m in members),
        "max_error": max(m.max_error for m in members), "rms_error": max(m.rms_error for m in members),
    }  # fmt: skip


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the unfinished result is removed as after Ctrl-C."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        for number in (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
            before[number] = signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _progress_bars(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """One bar for writing and one for verification."""
    with progress_bars(quiet=quiet) as show_step:
        yield lambda stage, done, total: show_step({"prove": "verify"}.get(stage, stage), done, total)


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    path, result = escape(report["source"]), escape(report["result"])
    out.print(
        f"[bold]{path}[/] ({report['source_format']}) to [bold]{result}[/] ({report['to']})", highlight=False, soft_wrap=True
    )
    errors = () if report["exact"] else ("max error", "rms error")
    grid = table("layers", "N×K", "before", "after", *errors, "changes")
    for kind in report["kinds"]:
        n, k = kind["shape"]
        figures = ["-" if kind["exact"] else f"{kind[key]:.2g}" for key in ("max_error", "rms_error")] if errors else []
        changes = ("; ".join(kind["changes"]) or "repacked") if kind["exact"] else "rounded"
        grid.add_row(str(kind["layers"]), f"{n}×{k}", kind["before"], kind["after"], *figures, changes)
    put(grid)
    if errors:
        out.print("max error: over the layer's largest weight; rms error: over the weights' root mean square", highlight=False)
    count = report["plain_tensors"]
    unquantized = f"{count} unquantized tensors, {size(report['plain_bytes'])}" if count else "no unquantized tensors"
    out.print(f"layers {size(report['nbytes'])} before, {size(report['nbytes_after'])} after; {unquantized}")
    if report["copied"]:
        out.print(f"copied: {escape(', '.join(report['copied']))}", highlight=False)
    if report["left"]:
        out.print(f"left out: {escape(', '.join(report['left']))}", highlight=False)
    for note in report["notes"]:
        out.print(f"[yellow]note[/]: {escape(note)}", highlight=False)
    rounded, count = sum(not layer["exact"] for layer in report["layers"]), len(report["layers"])
    if rounded:
        others = "; every other layer is bit-exact" if rounded < count else ""
        out.print(f"[yellow]{rounded} of {count} layers were rounded[/]{others}", highlight=False)
    else:
        out.print(f"[green]every layer is bit-exact[/]: {count} of {count} read back and compared", highlight=False)
