"""`bitline explain`: the plan for a checkpoint on any machine, with every candidate's verdict, reason and cost."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from bitline.checkpoint import open_checkpoint
from bitline.cli.main import dtype_of, out
from bitline.cli.render import table
from bitline.cli.run import local_path, policy_of
from bitline.errors import InputError
from bitline.platform import Platform
from bitline.select import choose, seconds, short_name
from bitline.types import LinearSpec


def explain_report(
    path: Path, platform: str, m: tuple[int, ...], dtype: str, tp: int, kernel: str, backend: str, strict: bool,
    batch_invariant: bool,
) -> dict[str, Any]:  # fmt: skip
    """Every figure of the command: one choice per distinct layer, and per rank's cut where tp > 1."""
    where = Platform.parse(platform) if platform else Platform.detect()
    policy = policy_of(kernel, backend, strict, m=m, batch_invariant=batch_invariant)
    act = dtype_of(dtype) or torch.bfloat16
    checkpoint = open_checkpoint(local_path(str(path)))
    layers: dict[LinearSpec, list[str]] = defaultdict(list)
    for record in checkpoint.layers():
        layers[record.spec.replace(act_dtype=act)].append(record.name)
    plans = []
    for spec, names in layers.items():
        for cut, part in cuts(spec, tp):
            choice = choose(part, where, policy)
            plans.append({"layers": len(names), "example": names[0], "cut": cut, **choice.to_dict()})
    return {"path": str(checkpoint.path), "format": checkpoint.format, "platform": str(where), "tp": tp, "plans": plans}


def cuts(spec: LinearSpec, tp: int) -> list[tuple[str, LinearSpec]]:
    """The spec as rank 0 of `tp` would hold it, column parallel (N cut) and row parallel (K cut)."""
    if tp == 1:
        return [("", spec)]
    if tp > min(spec.n, spec.k):
        raise InputError("more ranks than rows or columns", found=f"--tp {tp}", expected=f"at most {min(spec.n, spec.k)}")
    rows = spec.replace(n=spec.n // tp, block=(min(spec.block[0], spec.n // tp), spec.block[1]))
    ordered = spec.act_order or spec.ragged
    cols = spec.replace(k=spec.k // tp, block=(spec.block[0], min(spec.block[1], spec.k // tp)), ragged=ordered)
    return [("N", rows), ("K", cols)]


def elsewhere(candidates: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Kernels that do not run on the platform at all, by their reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for c in candidates:
        if not c["cost_seconds"]:
            reasons[c["reason"] + (f"; would run on {c['fix']}" if c["fix"] else "")].append(short_name(c["kernel"]))
    return reasons


def show(report: dict[str, Any]) -> None:
    """The report as text: a table of candidates under each distinct layer."""
    out.print(f"[bold]{report['path']}[/] ({report['format']}) on [bold]{report['platform']}[/]", highlight=False)
    if not report["plans"]:
        out.print("no quantized linear layer in this checkpoint")
    for p in report["plans"]:
        n, k = p["shape"]
        cut = f", {p['cut']} cut over {report['tp']} ranks" if p["cut"] else ""
        out.print(f"\n[bold]{p['layers']} × {n}×{k}[/] {p['scheme']}{cut} (for example {p['example']})", highlight=False)
        ms = list(p["candidates"][0]["cost_seconds"])
        here = [c for c in p["candidates"] if c["cost_seconds"]]
        grid = table("", "kernel", *(f"M={m}" for m in ms), "why, and what would change it")
        for i, c in enumerate(here):
            why = "chosen" if i == 0 else c["reason"] + (f"; would run {c['fix']}" if c["fix"] else "")
            mark = "[green]→[/]" if i == 0 else ("[green]yes[/]" if c["ok"] else "[red]no[/]")
            grid.add_row(mark, short_name(c["kernel"]), *(seconds(c["cost_seconds"][m]) for m in ms), why or "slower")
        out.print(grid)
        for reason, names in elsewhere(p["candidates"]).items():
            out.print(f"[red]no[/]  {', '.join(names)}: {reason}", highlight=False)
        if p["note"]:
            out.print(f"[yellow]{p['note']}[/]", highlight=False)
        if p["degraded"]:
            out.print("[yellow]degraded[/]: the reference runs although this machine has a faster kernel")
