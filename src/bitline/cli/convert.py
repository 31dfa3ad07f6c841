"""`bitline convert`: a checkpoint in another format, and the proof that nothing changed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bitline.cli.console import err, out
from bitline.cli.fetch import local_path
from bitline.cli.render import put, size, table
from bitline.conversion import LayerReport, convert


def convert_report(source: str, result: Path, to: str, lossy: bool, weights_only: bool, quiet: bool) -> dict[str, Any]:
    """Every figure of the command."""
    with _stopped_by_signals(), _bars() if err.is_terminal and not quiet else contextlib.nullcontext() as progress:
        report = convert(
            local_path(source), result.expanduser(), to=to, lossy=lossy, weights_only=weights_only, progress=progress
        )
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
def _stopped_by_signals() -> Iterator[None]:
    """Leave nothing behind when the terminal is closed or the process is told to end, as after Ctrl-C."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may set them
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
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for writing and one for reading back."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield progress


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    path, result = escape(report["source"]), escape(report["result"])
    out.print(
        f"[bold]{path}[/] ({report['source_format']}) to [bold]{result}[/] ({report['to']})", highlight=False, soft_wrap=True
    )
    errors = () if report["exact"] else ("max error", "rms error")
    grid = table("layers", "N×K", "before", "after", *errors, "what was done")
    for kind in report["kinds"]:
        n, k = kind["shape"]
        far = ["-" if kind["exact"] else f"{kind[which]:.2g}" for which in ("max_error", "rms_error")] if errors else []
        what = ("; ".join(kind["changes"]) or "moved") if kind["exact"] else "rounded"
        grid.add_row(str(kind["layers"]), f"{n}×{k}", kind["before"], kind["after"], *far, what)
    put(grid)
    if errors:
        out.print("max error: relative to the layer's largest weight; rms error: to the root mean square of all", highlight=False)
    count = report["plain_tensors"]
    plain = f"{count} plain tensors, {size(report['plain_bytes'])}" if count else "no plain tensors"
    out.print(f"layers {size(report['nbytes'])} before, {size(report['nbytes_after'])} after; {plain}")
    if report["copied"]:
        out.print(f"copied: {escape(', '.join(report['copied']))}", highlight=False)
    if report["left"]:
        out.print(f"left out: {escape(', '.join(report['left']))}", highlight=False)
    for note in report["notes"]:
        out.print(f"[yellow]note[/]: {escape(note)}", highlight=False)
    rounded, count = sum(not layer["exact"] for layer in report["layers"]), len(report["layers"])
    if rounded:
        others = "; every other layer bit-equal" if rounded < count else ""
        out.print(f"[yellow]{rounded} of {count} layers were rounded[/]{others}", highlight=False)
    else:
        out.print(f"[green]every layer bit-equal[/]: {count} of {count} read back and compared", highlight=False)
