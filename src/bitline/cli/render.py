"""Tables, texts and numbers in one style for all commands."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from bitline.cli.console import out

_MAX_LEAF_NAMES = 8  # kinds of layers named in one row
_LEAST_NAME = 10  # cells of a part of a module's name: self_attn.
_SEPARATOR = 3  # cells between two columns of a table


class Grid(Table):
    """A table whose cells are plain text: names from a file must not be interpreted as markup."""

    def add_row(self, *cells: RenderableType | None, **options: object) -> None:
        """Add a row; str cells are shown verbatim, Text cells with their style."""
        super().add_row(*(Text(c) if isinstance(c, str) else c for c in cells), **options)  # type: ignore[arg-type]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Wrap the widest columns, one after the other, until the table fits; rich alone would cut them off."""
        for column in sorted(self.columns, key=_width, reverse=True):
            if sum(map(_least_width, self.columns)) + _SEPARATOR * (len(self.columns) - 1) <= options.max_width:
                break
            column.no_wrap = False
        room = options.max_width - sum(map(_least_width, self.columns[1:])) - _SEPARATOR * (len(self.columns) - 1)
        if room < _least_width(self.columns[0]):
            self.columns[0]._cells = [_after_dots(cell, max(room, _LEAST_NAME)) for cell in self.columns[0]._cells]
        yield from super().__rich_console__(console, options)


def _width(column: Column) -> int:
    return max((cell_len(_plain(cell)) for cell in (column.header, *column.cells)), default=0)


def _least_width(column: Column) -> int:
    """That of the longest word where it is wrapped. rich measures so whether or not it is, and gives an empty column 1."""
    words = (word for cell in (column.header, *column.cells) for word in _plain(cell).split())
    return max(1, _width(column) if column.no_wrap else max(map(cell_len, words), default=0))


def _after_dots(cell: RenderableType, width: int) -> RenderableType:
    """A cell whose words, names of modules, go on in a new line after a dot where they are wider than this."""
    lines = [""]
    for part in re.split(r"(?<=\.)", _plain(cell)):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    text = "\n".join(lines)
    return Text(text, cell.style) if isinstance(cell, Text) and not cell.spans else text if isinstance(cell, str) else cell


def _plain(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def table(*columns: str) -> Grid:
    """A table that wraps instead of truncating."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        # Only layer names and the last column, which is prose, are wrapped.
        grid.add_column(column, overflow="fold", no_wrap=column != columns[-1] and column != "layers")
    return grid


def fitted(columns: Sequence[str], rows: Sequence[Sequence[RenderableType]], drop: Sequence[str]) -> Grid:
    """A table without the first columns of `drop`, as many as it takes to fit into the terminal's width."""
    for count in range(len(drop) + 1):
        kept = [i for i, column in enumerate(columns) if column not in drop[:count]]
        grid = table(*(columns[i] for i in kept))
        grid.columns[-1].no_wrap = kept[-1] != len(columns) - 1
        for row in rows:
            grid.add_row(*(row[i] for i in kept))
        if sum(map(_least_width, grid.columns)) + _SEPARATOR * (len(kept) - 1) <= out.width:
            break
    return grid


def put(renderable: RenderableType) -> None:
    """Print, in a file or a pipe without the trailing blanks of a table's lines."""
    if out.is_terminal:
        out.print(renderable)
        return
    with out.capture() as caught:
        out.print(renderable)
    out.print("\n".join(line.rstrip() for line in caught.get().splitlines()), markup=False, highlight=False, soft_wrap=True)


def hanging(label: str, text: str, style: str = "") -> Table:
    """A label and a text with a hanging indent."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(f"  {label}" if label else " ", style), Text(text))
    return grid


def facts() -> Table:
    """A grid of names and texts with a hanging indent."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def at_commas(text: str, width: int) -> str:
    """A comma-separated list without blanks, in lines of at most `width` that end at a comma."""
    lines = [""]
    for item in text.replace(",", ",\n").splitlines():
        if lines[-1] and cell_len(lines[-1] + item) > max(width, 20):
            lines.append("")
        lines[-1] += item
    return "\n".join(lines)


def rate(value: float, unit: str) -> str:
    """`790 Top/s`, `17.0 GB/s`: a rate with the largest prefix that it reaches."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            digits = value / factor
            return f"{digits:.0f} {prefix}{unit}" if digits >= 100 else f"{digits:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def size(count: float) -> str:
    """Bytes as kB (10**3), MB or GB."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 or count == 0 else f"{count / 1e3:.1f} kB"


def layer_names(names: Sequence[str], *, short: bool = False) -> str:
    """`60 × q_proj, o_proj`: a count and the leaf names of layers. A single layer's full name, or `1 × lm_head` if `short`."""
    leaves = list(dict.fromkeys(map(leaf_name, names)))
    shown = ", ".join(leaves[:_MAX_LEAF_NAMES]) + (", …" if len(leaves) > _MAX_LEAF_NAMES else "")
    return f"{len(names)} × {shown}" if len(names) > 1 or short else names[0]


def leaf_name(name: str) -> str:
    """A module name's last component that is not an index: `down_proj` of `experts.3.down_proj` and `experts.down_proj.3`."""
    while (part := name.rpartition("."))[2].isdigit() and part[1]:
        name = part[0]
    return part[2]
