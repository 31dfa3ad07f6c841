"""`bitline tune`: time the kernels that can run each layer on this machine, so that selection knows their costs."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
import typer
from rich.markup import escape
from rich.text import Text

from bitline import tuning
from bitline.checkpoint import open_checkpoint
from bitline.cli.console import out
from bitline.cli.fetch import local_path
from bitline.cli.options import device_of, dtype_of, policy_of
from bitline.cli.progress import progress_bars
from bitline.cli.render import hanging, layer_names, put, table
from bitline.cli.scheme_text import scheme_text
from bitline.errors import InputError
from bitline.model.meta_model import default_dtype
from bitline.model.tune import KernelTimes, TunedLayer, specs_to_run, tune
from bitline.platform import Platform
from bitline.rtn import SCHEMES, scheme_spec
from bitline.select import format_seconds, short_name
from bitline.types import LinearSpec, dtype_name

_SHAPE = re.compile(r"([1-9]\d{0,6})[xX×]([1-9]\d{0,6})")


def tune_report(
    model: str | None, shape: str | None, scheme: str, sizes: tuple[int, ...], seconds: float, device: str, dtype: str, *,
    quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    """The report of the command as JSON-compatible values; docs/command-line.md describes the keys."""
    if (model is None) == (shape is None):
        raise typer.BadParameter("give either a model or --shape NxK", param_hint="MODEL")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise typer.BadParameter("give a positive number of seconds", param_hint="--seconds")
    target, asked = device_of(device), dtype_of(dtype)
    platform, policy = Platform.detect(target), policy_of(None, None, False, m=sizes)
    checkpoint = open_checkpoint(local_path(model)) if model is not None else None
    act_dtype = asked or default_dtype(checkpoint, platform)
    if checkpoint is not None:
        layers = specs_to_run(checkpoint, act_dtype, target, policy)
    else:
        layers = _one_layer(shape or "", scheme, act_dtype)
    with progress_bars(quiet=quiet) as progress:
        done = tune(
            {spec: len(names) for spec, names in layers.items()}, target, policy, seconds,
            progress=lambda count, total: progress("tune kernels", count, total),
        )  # fmt: skip
    return {
        "path": None if checkpoint is None else str(checkpoint.path), "device": str(target), "platform": str(platform),
        "machine": tuning.machine(platform), "file": None if done.file is None else str(done.file),
        "activations": dtype_name(act_dtype), "m": list(sizes), "limit_seconds": seconds, "seconds": done.seconds,
        "plans": [_plan(layer, layers[layer.spec], sizes) for layer in done.layers],
    }  # fmt: skip


def _one_layer(shape: str, scheme: str, act_dtype: torch.dtype) -> dict[LinearSpec, list[str]]:
    found = _SHAPE.fullmatch(shape.strip())
    if found is None:
        raise typer.BadParameter("give N and K as in 4096x11008", param_hint="--shape")
    try:
        spec = scheme_spec(int(found[1]), int(found[2]), scheme, dtype=act_dtype)
    except InputError as error:
        known = ", ".join(SCHEMES)
        raise typer.BadParameter(f"unknown scheme {scheme!r}; it is one of {known}", param_hint="--scheme") from error
    return {spec: [f"{scheme.upper()} layer"]}


def _plan(layer: TunedLayer, names: list[str], sizes: tuple[int, ...]) -> dict[str, Any]:
    spec = layer.spec
    return {
        "layers": len(names), "names": layer_names(names, short=True), "example": names[0], "shape": [spec.n, spec.k],
        "weights": scheme_text(spec), "spec": spec.key, "status": layer.status, "kernel": layer.kernel,
        "kernel_by_estimate": layer.before, "candidates": [_candidate(row, sizes) for row in layer.kernels],
    }  # fmt: skip


def _candidate(row: KernelTimes, sizes: tuple[int, ...]) -> dict[str, Any]:
    return {
        "kernel": row.kernel, "status": row.status, "reason": row.reason,
        "measured_seconds": {str(m): row.seconds[m] for m in sizes if m in row.seconds},
        "estimated_seconds": {str(m): row.estimate[m] for m in sizes if m in row.estimate},
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """Print a report: for each layer its kernels, the fastest first, with measured and estimated times."""
    what = escape(report["path"] or "one layer")
    out.print(f"[bold]{what}[/] on {report['device']}, activations {report['activations']}", highlight=False, soft_wrap=True)
    if not report["plans"]:
        out.print("no quantized linear layer in this checkpoint")
        return
    for plan in report["plans"]:
        head = Text(f"\n{plan['names']} {plan['shape'][0]}×{plan['shape'][1]}, {plan['weights']}: ", "bold")
        put(head.append(_outcome(plan), "not bold"))
        _show_candidates(plan, [str(m) for m in report["m"]])
    unfinished = sum(plan["status"] in ("partly", "not reached") for plan in report["plans"])
    out.print()
    if unfinished:
        what = f"{unfinished} of {len(report['plans'])} kinds of layers"
        text = f"{what} were not measured completely in {report['limit_seconds']:g} s"
        put(hanging("note", f"{text}: estimates stand for the rest; --seconds gives more time", "yellow"))
    where = report["file"] or "nowhere: not enough was measured, or the cache folder cannot be written"
    put(hanging("kept in", where))


def _outcome(plan: dict[str, Any]) -> str:
    if plan["status"] == "not reached":
        return f"not measured, {short_name(plan['kernel'])} by estimate"
    same = plan["kernel"] == plan["kernel_by_estimate"]
    change = "as estimated" if same else f"instead of {short_name(plan['kernel_by_estimate'])}"
    return f"{short_name(plan['kernel'])}, {change}" + (" (partly measured)" if plan["status"] == "partly" else "")


def _show_candidates(plan: dict[str, Any], sizes: list[str]) -> None:
    if plan["status"] == "not reached":
        return
    grid = table("", "kernel", *(f"M={m}" for m in sizes), "")
    per_token = lambda row: sum(row["measured_seconds"].get(m, math.inf) / int(m) for m in sizes)
    for row in sorted(plan["candidates"], key=per_token):
        times = [format_seconds(row["measured_seconds"][m]) if m in row["measured_seconds"] else "-" for m in sizes]
        estimate = ", ".join(format_seconds(row["estimated_seconds"][m]) for m in sizes if m in row["estimated_seconds"])
        notes = [f"estimated {estimate}"] if estimate else []
        notes += [f"{row['status']}: {row['reason']}" if row["reason"] else row["status"]] if row["status"] != "measured" else []
        mark = Text("→", "green") if row["kernel"] == plan["kernel"] else ""
        grid.add_row(mark, short_name(row["kernel"]), *times, "; ".join(notes))
    put(grid)
