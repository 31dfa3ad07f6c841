"""How the command's tables look, in one place."""

from __future__ import annotations

from rich import box
from rich.table import Table


def table(*columns: str) -> Table:
    """A plain table that wraps instead of cutting words off."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        # Names and numbers stay whole; it is the last column, prose or an example, that gives way.
        grid.add_column(column, overflow="fold", no_wrap=column != columns[-1] and column != "layers")
    return grid


def size(count: float) -> str:
    """Bytes in MB (10**6) or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
