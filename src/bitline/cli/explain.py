"""`bitline explain`: the plan for a checkpoint on any machine, with every candidate's verdict, reason and cost."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.text import Text

from bitline import bits
from bitline.checkpoint import open_checkpoint
from bitline.cli.fetch import local_path
from bitline.cli.main import dtype_of, out
from bitline.cli.render import table
from bitline.cli.run import policy_of
from bitline.errors import InputError
from bitline.platform import Platform
from bitline.select import Choice, choose, seconds, short_name
from bitline.skeleton import default_dtype
from bitline.types import LinearSpec, dtype_name
from bitline.weight import QuantizedWeight


def explain_report(
    path: Path, platform: str, m: tuple[int, ...], dtype: str, tp: int, kernel: str | None, backend: str | None, strict: bool,
    batch_invariant: bool,
) -> dict[str, Any]:  # fmt: skip
    """Every figure of the command: one choice per distinct layer; where tp > 1, per cut and per kernel that its ranks get."""
    where = Platform.parse(platform) if platform else Platform.detect()
    policy = policy_of(kernel, backend, strict, m=m, batch_invariant=batch_invariant)
    checkpoint = open_checkpoint(local_path(str(path)))
    act = dtype_of(dtype) or default_dtype(checkpoint, where)
    layers: dict[LinearSpec, list[str]] = defaultdict(list)
    for record in checkpoint.layers():
        layers[record.spec.replace(act_dtype=act)].append(record.name)
    plans = []
    for spec, names in layers.items():
        for cut, parts in cuts(spec, tp).items():
            chosen: dict[str, tuple[Choice, list[int]]] = {}
            for rank, part in enumerate(parts):
                choice = choose(part, where, policy)
                chosen.setdefault(choice.best.name, (choice, []))[1].append(rank)
            for choice, ranks in chosen.values():
                plans.append({"layers": len(names), "example": names[0], "cut": cut, "ranks": ranks, **choice.to_dict()})
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "platform": str(where),
        "activations": dtype_name(act),
        "tp": tp,
        "plans": plans,
    }


def cuts(spec: LinearSpec, tp: int) -> dict[str, list[LinearSpec]]:
    """What each of `tp` ranks would hold, column parallel ("N" cut) and row parallel ("K" cut); "" for one rank."""
    if tp == 1:
        return {"": [spec]}
    if tp > min(spec.n, spec.k):
        raise InputError("more ranks than rows or columns", found=f"--tp {tp}", expected=f"at most {min(spec.n, spec.k)}")
    if not spec.act_order and not spec.ragged:
        weight, ranks = hollow(spec), range(tp)
        return {"N": [weight.shard(0, r, tp).spec for r in ranks], "K": [weight.shard(1, r, tp).spec for r in ranks]}
    # Which groups a rank sees is in the data. That they are uneven is as good as certain, unless there is only one.
    parts = cuts(spec.replace(act_order=False, ragged=False), tp)
    rows = [p.replace(act_order=spec.act_order, ragged=spec.ragged) for p in parts["N"]]
    ragged = spec.ragged or spec.grid[1] > 1
    block = lambda p: (p.block[0], min(spec.block[1], p.k))
    columns = [p.replace(act_order=spec.act_order, ragged=ragged, block=block(p), block_offset=(0, 0)) for p in parts["K"]]
    return {"N": rows, "K": columns}


def hollow(spec: LinearSpec) -> QuantizedWeight:
    """A weight of this spec without data, to be cut as a real one is."""
    make = lambda shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device="meta")
    grid2 = None if spec.scale2_block is None else spec.replace(block=spec.scale2_block, block_offset=(0, 0)).grid
    static = spec.act is not None and not spec.act.dynamic
    return QuantizedWeight(
        spec, make((spec.n, bits.row_bytes(spec.k, spec.weight.bits)), torch.uint8), make(spec.grid, spec.scale_dtype),
        zero=make(spec.grid, torch.uint8) if spec.zero == "int" else None,
        offset=make(spec.grid, spec.scale_dtype) if spec.zero == "float" else None,
        scale2=None if grid2 is None else make(grid2),
        input_scale=make(()) if static else None,
        input_multiplier=make((spec.k,)) if spec.input_multiplier else None,
        bias=make((spec.n,)) if spec.bias else None,
    )  # fmt: skip


def elsewhere(candidates: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Kernels that do not run on the platform at all, by their reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for c in candidates:
        if not c["cost_seconds"]:
            reasons[c["reason"] + (f"; would run on {c['fix']}" if c["fix"] else "")].append(short_name(c["kernel"]))
    return reasons


def show(report: dict[str, Any]) -> None:
    """The report as text: a table of candidates under each distinct layer."""
    where = f"[bold]{escape(report['path'])}[/] ({report['format']})"
    out.print(f"{where} on [bold]{report['platform']}[/], activations {report['activations']}", highlight=False, soft_wrap=True)
    if not report["plans"]:
        out.print("no quantized linear layer in this checkpoint")
    for p in report["plans"]:
        n, k = p["shape"]
        cut = f", {p['cut']} cut over {report['tp']} ranks" if p["cut"] else ""
        if cut and len(p["ranks"]) < report["tp"]:
            cut += f": rank{'s' * (len(p['ranks']) > 1)} {', '.join(map(str, p['ranks']))}"
        example = escape(p["example"])
        out.print(f"\n[bold]{p['layers']} × {n}×{k}[/] {p['scheme']}{cut} (for example {example})", highlight=False)
        ms = list(p["candidates"][0]["cost_seconds"])
        here = [c for c in p["candidates"] if c["cost_seconds"]]
        grid = table("", "kernel", *(f"M={m}" for m in ms), "why, and what would change it")
        for i, c in enumerate(here):
            why = "chosen" if i == 0 else c["reason"] + (f"; would run {c['fix']}" if c["fix"] else "")
            mark = Text("→", "green") if i == 0 else Text("yes", "green") if c["ok"] else Text("no", "red")
            grid.add_row(mark, short_name(c["kernel"]), *(seconds(c["cost_seconds"][m]) for m in ms), why or "slower")
        out.print(grid)
        for reason, names in elsewhere(p["candidates"]).items():
            out.print(f"[red]no[/]  {', '.join(names)}: {escape(reason)}", highlight=False)
        if p["note"]:
            out.print(f"[yellow]{escape(p['note'])}[/]", highlight=False)
        if p["degraded"]:
            out.print("[yellow]degraded[/]: the reference runs although this machine has a faster kernel")
