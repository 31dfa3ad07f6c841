"""How the command's tables look, in one place."""

from __future__ import annotations

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


class Grid(Table):
    """A table whose cells are plain text: names out of a file must not be read as markup."""

    def add_row(self, *cells: RenderableType | None, **options: object) -> None:
        """Add a row; str cells are shown as they are, Text cells with their style."""
        super().add_row(*(Text(c) if isinstance(c, str) else c for c in cells), **options)  # type: ignore[arg-type]


def table(*columns: str) -> Grid:
    """A plain table that wraps instead of cutting words off."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        # Names and numbers stay whole; it is the last column, prose or an example, that gives way.
        grid.add_column(column, overflow="fold", no_wrap=column != columns[-1] and column != "layers")
    return grid


def size(count: float) -> str:
    """Bytes in MB (10**6) or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
