"""The table of `bitline explain`: under each scheme its layers, with shard, estimated time at each M, packed size and kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from bitline.cli.console import out
from bitline.cli.render import hanging, layer_names, put, size
from bitline.select import format_seconds, short_name

_MIN_NAMES_WIDTH = 20  # terminal columns for the names of layers


class _Row(NamedTuple):
    """cells: of all columns but the first, the kernel last. scheme: "" for a row of totals."""

    scheme: str
    layers: str
    cells: list[str]
    style: str


class PlanTable:
    """Lays the report's plans out in the terminal's width.

    Where the kernels' names do not fit into a column, they are printed on the scheme's line if all its layers have one kernel,
    else under the names of the layers.
    """

    def __init__(self, report: dict[str, Any], schemes: dict[str, list[dict[str, Any]]]) -> None:
        self.schemes = schemes
        sharded = report["tp"] > 1
        self.header = ["layers", "N×K", *(["shard"] if sharded else []), *(f"M={m}" for m in report["m"]), "packed", "kernel"]
        self.rows = [*_plan_rows(report, schemes), *_total_rows(report)]
        self.text_columns = {0, 1, len(self.header) - 1} | ({2} if sharded else set())  # left-justified, the others right
        self.widths, self.has_kernel_column = self._fit()

    def _fit(self) -> tuple[list[int], bool]:
        """The columns' widths, and whether the kernel's column fits."""
        widths = [max(cell_len(row.cells[i]) for row in self.rows) for i in range(len(self.header) - 1)]
        widths = [max(w, cell_len(h)) for w, h in zip(widths, self.header[1:], strict=True)]
        names = max(_MIN_NAMES_WIDTH, max(cell_len(row.layers) for row in self.rows))
        remaining = lambda: out.width - sum(widths) - 2 * len(widths)
        fits = remaining() >= min(names, _MIN_NAMES_WIDTH)
        if not fits:
            widths.pop()
        return [min(names, remaining()), *widths], fits

    def print(self) -> None:
        """Print the table."""
        grid, scheme, kernel_on_scheme_line = self._grid(), "", False
        grid.add_row(*(Text(h, "dim") for h in self.header[: len(self.widths)]))
        for row in self.rows:
            if row.scheme and row.scheme != scheme:
                put(grid)
                kernels = {short_name(p["kernel"]) for p in self.schemes[row.scheme]}
                kernel_on_scheme_line = not self.has_kernel_column and len(kernels) == 1
                put(Text(row.scheme + (f" → {kernels.pop()}" if kernel_on_scheme_line else ""), "bold"))
                grid, scheme = self._grid(), row.scheme
            under = "" if self.has_kernel_column or kernel_on_scheme_line or not row.scheme else f"\n→ {row.cells[-1]}"
            cells = row.cells if self.has_kernel_column else row.cells[:-1]
            grid.add_row(Text(row.layers + under), *(Text(cell, row.style) for cell in cells))
        put(grid)

    def _grid(self) -> Table:
        """An empty grid of the table's widths; the first column folds."""
        grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        for i, width in enumerate(self.widths):
            justify = "left" if i in self.text_columns else "right"
            grid.add_column(width=width, no_wrap=i > 0, overflow="fold", justify=justify)  # type: ignore[arg-type]
        return grid


def _plan_rows(report: dict[str, Any], schemes: dict[str, list[dict[str, Any]]]) -> list[_Row]:
    ms, tp = [str(m) for m in report["m"]], report["tp"]
    rows = []
    for scheme, plans in schemes.items():
        for p in plans:
            times = [format_seconds(p["cost_seconds"][m]) if m in p["cost_seconds"] else "-" for m in ms]
            shard = [_shard(p, tp)] if tp > 1 else []
            cells = ["{}×{}".format(*p["shape"]), *shard, *times, size(p["packed_bytes"]), short_name(p["kernel"])]
            rows.append(_Row(scheme, p["names"], cells, "yellow" if p["degraded"] or p["note"] else ""))
    return rows


def _total_rows(report: dict[str, Any]) -> list[_Row]:
    rows = []
    for dim, total in report["totals"].items():
        name = f"all, sharded along {dim}" if dim else f"all {report['layers']} layers"
        times = [format_seconds(total["cost_seconds"][str(m)]) for m in report["m"]]
        cells = ["", *([""] if report["tp"] > 1 else []), *times, size(total["packed_bytes"]), ""]
        rows.append(_Row("", name, cells, "bold"))
    return rows


def _shard(plan: dict[str, Any], tp: int) -> str:
    """`K/4`, or `K/4 ranks 0, 2-3` where only these ranks get the kernel."""
    ranks = "" if len(plan["ranks"]) == tp else f" rank{'s' * (len(plan['ranks']) > 1)} {rank_spans(plan['ranks'])}"
    return f"{plan['cut']}/{tp}{ranks}" if plan["cut"] else f"whole{ranks}"


def show_ranks(facts: dict[str, Any]) -> None:
    """What ranks hold and exchange, below the table."""
    if not facts["planned"]:
        put(hanging("ranks", f"each layer is listed sharded both ways, since there is no model to plan for: {facts['why']}"))
        return
    same: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for rank, of_rank in enumerate(facts["ranks"]):
        same.setdefault(tuple(of_rank.items()), []).append(rank)
    for items, numbers in same.items():
        who = "each rank" if len(same) == 1 else f"rank{'s' * (len(numbers) > 1)} {rank_spans(numbers)}"
        put(hanging("holds", f"{who}: {_held(dict(items))}"))
    if facts["whole"]:
        put(hanging("whole", f"on every rank: {layer_names(facts['whole'], short=True)}"))
    exchanges = facts["exchanges"]
    if exchanges:
        count, total = (sum(e[key] for e in exchanges) for key in ("count", "bytes"))
        parts = "; ".join(f"{e['what']} of {e['names']}: {e['count']}, {size(e['bytes'])}" for e in exchanges)
        put(hanging("token", f"{count} collective operations, {size(total)} to each rank: {parts}"))


def _held(of_rank: dict[str, Any]) -> str:
    """A rank's bytes and heads."""
    text = f"{size(of_rank['packed_bytes'])} packed, {size(of_rank['unquantized_bytes'])} unquantized"
    if of_rank["query_heads"]:
        text += f"; heads: {of_rank['query_heads']} query, {of_rank['kv_heads']} key-value"
    if of_rank["kv_heads_on_ranks"] > 1:
        text += f", which {of_rank['kv_heads_on_ranks']} ranks have"
    return text


def rank_spans(ranks: list[int]) -> str:
    """`0, 2-5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
