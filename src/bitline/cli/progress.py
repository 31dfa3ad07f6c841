"""Progress bars on stderr, one for each stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bitline.cli.console import err


@contextlib.contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A function of a stage's name, the steps done and all its steps, that shows one bar for each stage.

    It shows nothing if quiet, and where stderr is no terminal.
    """
    if quiet or not err.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)

        yield progress
