"""`bitline inspect`: what a checkpoint contains, from its headers; of the data only small scales are read."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from bitline.checkpoint import open_checkpoint
from bitline.cli.checkpoint_findings import column_order, ignored_module_findings, layer_findings, unquantized_findings
from bitline.cli.console import out
from bitline.cli.fetch import local_path
from bitline.cli.render import layer_names, size, table
from bitline.cli.scale_checks import check_scales
from bitline.cli.scheme_text import activation_text
from bitline.formats.base import LayerRecord
from bitline.types import ActSpec, LinearSpec, dtype_name


def inspect_report(path: Path, scales: bool | None = None) -> dict[str, Any]:
    """The report of the command as JSON-compatible values. scales: whether to check the scales; None if they are small."""
    checkpoint = open_checkpoint(local_path(str(path)))
    records = checkpoint.layers()
    groups: dict[Any, list[LayerRecord]] = defaultdict(list)
    by_order: dict[str, list[LayerRecord]] = defaultdict(list)
    for record in records:
        order = column_order(record)
        by_order[order].append(record)
        groups[record.format, record.spec, order].append(record)
    kinds = sorted((_kind(checkpoint.format, members) for members in groups.values()), key=lambda k: -k["nbytes"])
    unquantized = [checkpoint.source.tensors[n] for n in checkpoint.dense_names()]
    findings = [
        *layer_findings(by_order), *ignored_module_findings(checkpoint, records), *unquantized_findings(checkpoint, records)
    ]  # fmt: skip
    return {
        "path": str(checkpoint.path), "format": checkpoint.format, "layers": len(records), "kinds": kinds,
        "nbytes": sum(k["nbytes"] for k in kinds), "dense_tensors": len(unquantized),
        "dense_bytes": sum(t.nbytes for t in unquantized),
        "oddities": [f.to_dict() for f in findings], "scales": check_scales(checkpoint, records, scales),
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
        "zero": spec.zero, "act_order": spec.act_order, "columns": column_order(first),
        "activations": str(spec.act) if spec.act else None, "input_multiplier": spec.input_multiplier, "bias": spec.bias,
        "nbytes": nbytes, "bits_per_weight": 8 * nbytes / weights, "bytes_per_weight": nbytes / weights,
        "oddities": sorted({text for r in members for text in r.oddities})[:_MAX_WARNINGS],
    }  # fmt: skip


def scale_block(spec: LinearSpec) -> str:
    """The block of one scale: `tensor`, `row`, `1×128`, `128×128`; with super-block or global scales `1×32 in 1×256`."""
    one = lambda bn, bk: "tensor" if bn >= spec.n > 1 and bk >= spec.k else "row" if (bn, bk) == (1, spec.k) else f"{bn}×{bk}"
    return one(*spec.block) + (f" in {one(*spec.scale2_block)}" if spec.scale2_block else "")


def input_text(kind: dict[str, Any]) -> str:
    """The activation quantization of a kind of layer: `16 bit` for none, else `activation_text`."""
    text = "16 bit"
    if kind["activations"]:
        text = activation_text(ActSpec.parse(kind["activations"]))
    return text + (", scaled" if kind["input_multiplier"] else "")


_MAX_WARNINGS = 20  # distinct ones per kind of layer
_MIN_NAMES_WIDTH = 18  # terminal columns for the names of layers
_SHAREABLE = ("layout", "bits", "scale block", "zero", "act-order", "input")  # printed once if equal for all layers
_ZEROS = {"none": "-", "int": "int", "float": "offset"}
_ORDERS = {"none": "-", "trivial": "trivial", "act-order": "yes", "ragged": "ragged"}


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    out.print(f"[bold]{escape(report['path'])}[/]: {report['format'] or 'not quantized'}", highlight=False, soft_wrap=True)
    if report["kinds"]:
        _show_kinds(report["kinds"])
    unquantized = f"{report['dense_tensors']} unquantized tensors, {size(report['dense_bytes'])}"
    out.print(f"{report['layers']} quantized layers, {size(report['nbytes'])}; {unquantized}", highlight=False)
    _show_scales(report["scales"])
    for finding in report["oddities"]:
        count = f"{finding['layers']} layers, such as " if finding["layers"] > 1 else ""
        _show_finding(finding["level"], finding["what"] + (f" ({count}{finding['example']})" if finding["layers"] else ""))


def _show_finding(level: str, text: str) -> None:
    label = "note   " if level == "note" else "[yellow]warning[/]"
    out.print(f"{label}  {escape(text)}", highlight=False)


def _show_kinds(kinds: list[dict[str, Any]]) -> None:
    """A table; if it does not fit, without the columns that are equal for all layers, or else two lines per kind."""
    columns = {
        "layers": [k["names"] for k in kinds], "N×K": [_shape(k) for k in kinds], "layout": [k["layout"] for k in kinds],
        "bits": [str(k["bits"]) for k in kinds], "scale block": [k["scale_block"] for k in kinds],
        "zero": [_ZEROS[k["zero"]] for k in kinds], "act-order": [_ORDERS[k["columns"]] for k in kinds],
        "input": [input_text(k) for k in kinds], "B/weight": [f"{k['bytes_per_weight']:.3f}" for k in kinds],
        "size": [size(k["nbytes"]) for k in kinds],
    }  # fmt: skip
    same = {name: values[0] for name, values in columns.items() if name in _SHAREABLE and len(set(values)) == 1}
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
    """The least width of a readable table. Only the names of layers are wrapped."""
    widest = {name: max(map(cell_len, (name, *values))) for name, values in columns.items()}
    return min(widest["layers"], _MIN_NAMES_WIDTH) + sum(widest.values()) - widest["layers"] + 2 * (len(columns) - 1)


def _shape(kind: dict[str, Any]) -> str:
    return "{}×{}".format(*kind["shape"])


def _sentence(k: dict[str, Any]) -> str:
    zero = {"none": "", "int": ", zero points", "float": ", offsets"}[k["zero"]]
    order = {"none": "", "trivial": ", trivial g_idx", "act-order": ", act-order", "ragged": ", ragged g_idx"}[k["columns"]]
    return (
        f"{k['bits']} bits ({k['type']}), {k['scale_dtype']} scales per {k['scale_block']}{zero}{order}, input {input_text(k)}, "
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
        _show_finding(f["level"], f"{f['what']}: {values} {f['example']}")
