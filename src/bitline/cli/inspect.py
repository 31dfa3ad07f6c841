"""`bitline inspect`: what a checkpoint holds, from its headers; of the data only scales are read, where they are small."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from bitline.checkpoint import open_checkpoint
from bitline.cli import oddities
from bitline.cli.console import out
from bitline.cli.fetch import local_path
from bitline.cli.render import layer_names, size, table
from bitline.cli.scheme import inputs_text
from bitline.formats.base import LayerRecord
from bitline.types import ActSpec, LinearSpec, dtype_name


def inspect_report(path: Path, scales: bool | None = None) -> dict[str, Any]:
    """Every figure of the command. scales: whether to read the scales; None does where they are small."""
    checkpoint = open_checkpoint(local_path(str(path)))
    records = checkpoint.layers()
    groups: dict[Any, list[LayerRecord]] = defaultdict(list)
    orders: dict[str, list[LayerRecord]] = defaultdict(list)
    for record in records:
        order = oddities.column_order(record)
        orders[order].append(record)
        groups[record.format, record.spec, order].append(record)
    kinds = sorted((_kind(checkpoint.format, members) for members in groups.values()), key=lambda k: -k["nbytes"])
    dense = [checkpoint.source.tensors[n] for n in checkpoint.dense_names()]
    odd = [
        *oddities.of_layers(orders), *oddities.of_lists(checkpoint, records), *oddities.of_left_alone(checkpoint, records)
    ]  # fmt: skip
    return {
        "path": str(checkpoint.path), "format": checkpoint.format, "layers": len(records), "kinds": kinds,
        "nbytes": sum(k["nbytes"] for k in kinds), "dense_tensors": len(dense), "dense_bytes": sum(t.nbytes for t in dense),
        "oddities": [o.to_dict() for o in odd], "scales": oddities.check_scales(checkpoint, records, scales),
    }  # fmt: skip


def _kind(format_: str, members: list[LayerRecord]) -> dict[str, Any]:
    first, spec = members[0], members[0].spec
    nbytes = sum(r.nbytes for r in members)
    weights = len(members) * spec.n * spec.k
    names = layer_names([r.name for r in members], short=True)
    return {
        "layers": len(members), "names": names, "example": first.name, "format": first.format,
        "layout": first.format.removeprefix(format_).strip() or first.format, "scheme": spec.scheme, "shape": [spec.n, spec.k],
        "bits": spec.weight.bits, "type": spec.weight.name, "block": list(spec.block), "scale_block": scale_block(spec),
        "scale_dtype": dtype_name(spec.scale_dtype), "scale2_block": list(spec.scale2_block) if spec.scale2_block else None,
        "zero": spec.zero, "act_order": spec.act_order, "columns": oddities.column_order(first),
        "activations": str(spec.act) if spec.act else None, "input_multiplier": spec.input_multiplier, "bias": spec.bias,
        "nbytes": nbytes, "bits_per_weight": 8 * nbytes / weights, "bytes_per_weight": nbytes / weights,
        "oddities": sorted({text for r in members for text in r.oddities})[:_MOST_ODDITIES],
    }  # fmt: skip


def scale_block(spec: LinearSpec) -> str:
    """What one scale is for: `tensor`, `row`, `1×128`, `128×128`; with a second level of scales `1×32 in 1×256`."""
    one = lambda bn, bk: "tensor" if bn >= spec.n > 1 and bk >= spec.k else "row" if (bn, bk) == (1, spec.k) else f"{bn}×{bk}"
    return one(*spec.block) + (f" in {one(*spec.scale2_block)}" if spec.scale2_block else "")


def inputs(kind: dict[str, Any]) -> str:
    """A kind's activation scheme: `16 bit`, or what `inputs_text` says."""
    text = "16 bit"
    if kind["activations"]:
        text = inputs_text(ActSpec.parse(kind["activations"]))
    return text + (", scaled" if kind["input_multiplier"] else "")


_MOST_ODDITIES = 20  # different ones of one kind of layer
_NARROWEST = 18  # columns for the names of layers
_SHARED = ("layout", "bits", "scale block", "zero", "act-order", "input")  # columns that may be said once for all
_ZEROS = {"none": "-", "int": "int", "float": "offset"}
_COLUMNS = {"none": "-", "trivial": "trivial", "act-order": "yes", "ragged": "ragged"}


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    out.print(f"[bold]{escape(report['path'])}[/]: {report['format'] or 'not quantized'}", highlight=False, soft_wrap=True)
    if report["kinds"]:
        _show_kinds(report["kinds"])
    plain = f"{report['dense_tensors']} plain tensors, {size(report['dense_bytes'])}"
    out.print(f"{report['layers']} quantized layers, {size(report['nbytes'])}; {plain}", highlight=False)
    _show_scales(report["scales"])
    for odd in report["oddities"]:
        many = f"{odd['layers']} layers, such as " if odd["layers"] > 1 else ""
        _show_oddity(odd["level"], odd["what"] + (f" ({many}{odd['example']})" if odd["layers"] else ""))


def _show_oddity(level: str, text: str) -> None:
    label = "note" if level == "note" else "[yellow]odd[/] "
    out.print(f"{label}  {escape(text)}", highlight=False)


def _show_kinds(kinds: list[dict[str, Any]]) -> None:
    """A table; where it does not fit, one without the columns that are the same for all, else two lines for each kind."""
    columns = {
        "layers": [k["names"] for k in kinds], "N×K": [_shape(k) for k in kinds], "layout": [k["layout"] for k in kinds],
        "bits": [str(k["bits"]) for k in kinds], "scale block": [k["scale_block"] for k in kinds],
        "zero": [_ZEROS[k["zero"]] for k in kinds], "act-order": [_COLUMNS[k["columns"]] for k in kinds],
        "input": [inputs(k) for k in kinds], "B/weight": [f"{k['bytes_per_weight']:.3f}" for k in kinds],
        "size": [size(k["nbytes"]) for k in kinds],
    }  # fmt: skip
    same = {name: values[0] for name, values in columns.items() if name in _SHARED and len(set(values)) == 1}
    if _width(columns) > out.width:
        columns = {name: values for name, values in columns.items() if name not in same}
        if _width(columns) > out.width:
            for k in kinds:
                out.print(Text(k["names"]).append(f"  {_shape(k)}  {k['format']}", "bold"), highlight=False)
                out.print(Padding(Text(_sentence(k)), (0, 0, 0, 4)), highlight=False)
            return
        facts = ", ".join(f"{name} {value}" for name, value in same.items())
        out.print(f"all layers: {escape(facts)}", highlight=False)
    grid = table(*columns)
    grid.padding = (0, 1, 0, 0)
    for row in zip(*columns.values(), strict=True):
        grid.add_row(*row)
    out.print(grid)


def _width(columns: dict[str, list[str]]) -> int:
    """The least width in which a table is pleasant to read. Only the names of layers are wrapped."""
    widest = {name: max(map(cell_len, (name, *values))) for name, values in columns.items()}
    return min(widest["layers"], _NARROWEST) + sum(widest.values()) - widest["layers"] + 2 * (len(columns) - 1)


def _shape(kind: dict[str, Any]) -> str:
    return "{}×{}".format(*kind["shape"])


def _sentence(k: dict[str, Any]) -> str:
    zero = {"none": "", "int": ", zero points", "float": ", offsets"}[k["zero"]]
    order = {"none": "", "trivial": ", trivial g_idx", "act-order": ", act-order", "ragged": ", ragged g_idx"}[k["columns"]]
    return (
        f"{k['bits']} bits ({k['type']}), {k['scale_dtype']} scales per {k['scale_block']}{zero}{order}, input {inputs(k)}, "
        f"{k['bytes_per_weight']:.3f} bytes/weight, {size(k['nbytes'])}"
    )


def _show_scales(scales: dict[str, Any]) -> None:
    if not scales["tensors"]:
        return
    if not scales["checked"]:
        out.print(f"scales ({size(scales['nbytes'])} in {scales['tensors']} tensors) were not read: --scales checks them",
                  highlight=False)  # fmt: skip
    for f in scales["findings"]:
        values = f"{f['values']} in {f['tensors']} tensors, such as" if f["tensors"] > 1 else f"{f['values']} in"
        _show_oddity(f["level"], f"{f['what']}: {values} {f['example']}")
