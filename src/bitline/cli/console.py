"""The command's consoles: answers on stdout, progress and errors on stderr."""

from __future__ import annotations

from typing import NoReturn

from rich import console


class ClosedPipe(Exception):
    """The reader of the output has exited, as `| head` does. No OSError, of which typer would make an exit with 1."""


class Console(console.Console):
    """rich's console, which raises ClosedPipe instead of exiting with 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Called where the reader of the output has exited."""
        raise ClosedPipe


out = Console()
err = Console(stderr=True)
