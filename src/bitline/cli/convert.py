"""`bitline convert`: a checkpoint in another format, and the proof that nothing changed."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bitline.cli.fetch import local_path
from bitline.cli.main import err, out
from bitline.cli.render import size, table
from bitline.conversion import LayerReport, convert


def convert_report(source: str, result: Path, to: str, lossy: bool, weights_only: bool, quiet: bool) -> dict[str, Any]:
    """Every figure of the command."""
    with contextlib.nullcontext() if quiet else _bars() as progress:
        report = convert(local_path(source), result, to=to, lossy=lossy, weights_only=weights_only, progress=progress)
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
    grid = table("layers", "N×K", "before", "after", "what was done")
    for kind in report["kinds"]:
        what = "; ".join(kind["changes"]) or "moved"
        if not kind["exact"]:
            what += f"; max error {kind['max_error']:.2e}, rms {kind['rms_error']:.2e}"
        n, k = kind["shape"]
        grid.add_row(str(kind["layers"]), f"{n}×{k}", kind["before"], kind["after"], what)
    out.print(grid)
    plain = f"{report['plain_tensors']} plain tensors, {size(report['plain_bytes'])}"
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
