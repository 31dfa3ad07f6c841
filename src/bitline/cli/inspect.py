"""`bitline inspect`: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from bitline.checkpoint import open_checkpoint
from bitline.cli.fetch import local_path
from bitline.cli.main import out
from bitline.cli.render import size, table
from bitline.formats.base import LayerRecord


def inspect_report(path: Path) -> dict[str, Any]:
    """Every figure of the command."""
    checkpoint = open_checkpoint(local_path(str(path)))
    groups: dict[Any, list[LayerRecord]] = defaultdict(list)
    for record in checkpoint.layers():
        groups[(record.format, record.spec)].append(record)
    kinds = [_kind(format_, members) for (format_, _), members in groups.items()]
    kinds.sort(key=lambda k: -k["nbytes"])
    dense = [checkpoint.source.tensors[n] for n in checkpoint.dense_names()]
    return {
        "path": str(checkpoint.path), "format": checkpoint.format, "layers": sum(k["layers"] for k in kinds), "kinds": kinds,
        "dense_tensors": len(dense), "dense_bytes": sum(t.nbytes for t in dense),
        "oddities": dict(Counter(o for r in checkpoint.layers() for o in r.oddities)),
    }  # fmt: skip


def _kind(format_: str, members: list[LayerRecord]) -> dict[str, Any]:
    spec = members[0].spec
    nbytes = sum(r.nbytes for r in members)
    return {
        "layers": len(members), "example": members[0].name, "format": format_, "scheme": spec.scheme, "shape": [spec.n, spec.k],
        "bits": spec.weight.bits, "block": list(spec.block), "zero": spec.zero, "act_order": spec.act_order,
        "activations": str(spec.act) if spec.act else None, "nbytes": nbytes,
        "bits_per_weight": 8 * nbytes / (len(members) * spec.n * spec.k),
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    out.print(f"[bold]{escape(report['path'])}[/]: {report['format'] or 'not quantized'}", highlight=False, soft_wrap=True)
    if report["kinds"]:
        grid = table("layers", "N×K", "format", "scheme", "bits", "size", "for example")
        for k in report["kinds"]:
            n, cols = k["shape"]
            grid.add_row(
                str(k["layers"]),
                f"{n}×{cols}",
                k["format"],
                k["scheme"],
                f"{k['bits_per_weight']:.2f}",
                size(k["nbytes"]),
                k["example"],
            )
        out.print(grid)
    quantized = sum(k["nbytes"] for k in report["kinds"])
    plain = f"{report['dense_tensors']} plain tensors, {size(report['dense_bytes'])}"
    out.print(f"{report['layers']} quantized layers, {size(quantized)}; {plain}")
    for oddity, count in report["oddities"].items():
        out.print(f"[yellow]odd[/] ({count} layers): {escape(oddity)}", highlight=False)
