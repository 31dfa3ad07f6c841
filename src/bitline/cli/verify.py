"""`bitline verify`: every quantized layer of a checkpoint on this machine against the reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.text import Text

from bitline.checkpoint import open_checkpoint
from bitline.cli.console import out
from bitline.cli.expert_layers import experts_of
from bitline.cli.fetch import local_path
from bitline.cli.options import device_of, dtype_of
from bitline.cli.progress import progress_bars
from bitline.cli.render import put, table
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord
from bitline.model.expert_names import expert_number
from bitline.model.fused_parts import FusedParts
from bitline.model.layer_check import LayerCheck
from bitline.model.meta_model import default_dtype
from bitline.model.rank_slices import OneRank
from bitline.model.verify_file import FileVerifier, sample_layers
from bitline.platform import Platform
from bitline.select import Policy, short_name
from bitline.types import dtype_name

_SHOWN = 10  # layers in the table that are within the tolerance
_WIDE = 72  # cells that a table of ranks has room for all figures in
_FUSED_SHOWN = 3  # parts that run as one call


def verify_report(
    model: str, device: str, dtype: str, policy: Policy, sizes: tuple[int, ...], all_kernels: bool, sample: int | None,
    seed: int, tp: int, *, expert_parallel: bool = False, quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    """The report of the command as JSON-compatible values; docs/verify.md describes the keys."""
    target, asked = device_of(device), dtype_of(dtype)
    platform = Platform.detect(target)
    checkpoint = open_checkpoint(local_path(model))
    records = checkpoint.layers()
    if not records:
        raise CheckpointError("nothing to verify", file=checkpoint.path, found="no quantized linear layer")
    act_dtype = asked or default_dtype(checkpoint, platform)
    experts = experts_of([record.name for record in records], checkpoint, act_dtype)

    def policy_for(record: LayerRecord) -> Policy:
        return policy if experts is None or expert_number(record.name) is None else experts.policy(policy)

    started = time.perf_counter()
    verifier = FileVerifier(checkpoint, target, act_dtype, policy_for, sizes, all_kernels=all_kernels, world=tp,
                            expert_parallel=expert_parallel)  # fmt: skip
    chosen = records if sample is None else sample_layers(records, sample, seed)
    checks: list[LayerCheck] = []
    with progress_bars(quiet=quiet) as progress:
        for i, record in enumerate(chosen):
            checks += verifier.checks(record)
            progress("verify layers", i + 1, len(chosen))
        ranks = [OneRank(rank, tp, expert_parallel=True) for rank in range(tp)] if expert_parallel else []
        parts = [FusedParts(checkpoint, target, act_dtype, policy, sizes, rank) for rank in (ranks if tp > 1 else [None])]
        fused, skipped = _fused_checks(parts, checks, sample, seed, progress)
    checks.sort(key=lambda check: -check.badness)
    failed = [check for check in (*checks, *fused) if not check.ok]
    return {
        "path": str(checkpoint.path), "format": checkpoint.format, "device": str(target), "platform": str(platform),
        "activations": dtype_name(act_dtype), "m": list(sizes), "tp": tp, "expert_parallel": expert_parallel, "seed": seed,
        "layers": len(chosen), "layers_in_all": len(records), "seconds": time.perf_counter() - started,
        "ok": not failed, "failed": list(dict.fromkeys(check.layer for check in failed)),
        "checks": [vars(check) | {"ok": check.ok} for check in checks],
        "fused": [vars(check) | {"ok": check.ok} for check in fused],
        "skipped": [{"layer": name, "reason": reason} for name, reason in skipped],
        "refused": [{"layer": layer, "kernel": kernel, "reason": reason} for layer, kernel, reason in verifier.refused],
    }  # fmt: skip


def _fused_checks(
    of_ranks: list[FusedParts], checks: list[LayerCheck], sample: int | None, seed: int,
    progress: Callable[[str, int, int], None],
) -> tuple[list[LayerCheck], list[tuple[str, str]]]:  # fmt: skip
    """The checks of what the model runs as one call, the worst first; and what is not checked, with the reason.

    of_ranks: the parts of each rank, or those of one rank.
    """
    skipped = [("", parts.reason) for parts in of_ranks[:1] if parts.reason]
    off = {check.layer for check in checks if not check.ok}
    drawn = lambda names: names if sample is None else sample_layers(names, sample, seed)
    chosen = [(parts, name) for parts in of_ranks for name in drawn(parts.names)]
    found: list[LayerCheck] = []
    for i, (parts, name) in enumerate(chosen):
        if wrong := sorted(parts.layers_of(name) & off):
            skipped.append((name, f"{wrong[0]} in it failed"))
        else:
            found += parts.checks(name)
        progress("verify fused calls", i + 1, len(chosen))
    return sorted(found, key=lambda check: -check.badness), skipped


def show(report: dict[str, Any]) -> None:
    """Print a report: layers that failed and those nearest to it, the worst first."""
    what = f"{report['layers']} of {report['layers_in_all']} layers" if report["layers"] < report["layers_in_all"] else \
           f"{report['layers']} layers"  # fmt: skip
    ranks = f", each of {report['tp']} ranks' slices" if report["tp"] > 1 else ""
    ranks += " and whole experts" if report["expert_parallel"] else ""
    head = f"on {report['device']}, activations {report['activations']}: {what}{ranks}"
    out.print(f"[bold]{escape(report['path'])}[/] {head}", highlight=False, soft_wrap=True)
    rows = _worst_of_each(report["checks"])
    failed = [row for row in rows if not row["ok"]]
    fused = _worst_of_each(report["fused"])
    off = [row for row in fused if not row["ok"]]
    _show_rows(failed + off + [row for row in rows if row["ok"]][:_SHOWN] + [row for row in fused if row["ok"]][:_FUSED_SHOWN])
    for row in failed + off:
        if row["fault"]:
            rank = "" if row["rank"] is None else f" on rank {row['rank']}"
            out.print(Text.assemble((f"{row['layer']}{rank}: ", "bold"), row["fault"]), highlight=False, soft_wrap=True)
    for row in report["refused"][:_SHOWN]:
        out.print(f"[yellow]not checked[/] {escape(row['layer'])}: {row['kernel']}: {escape(row['reason'])}", highlight=False)
    for row in report["skipped"][:_SHOWN]:
        out.print(f"[yellow]not checked[/] {escape(row['layer'] or 'fused calls')}: {escape(row['reason'])}", highlight=False)
    seconds = f"in {report['seconds']:.1f} s"
    if failed or off:
        count = len({row["layer"] for row in failed})
        calls = f", {len(off)} of {len(fused)} fused calls" if fused else ""
        out.print(f"[bold red]{count} of {report['layers']} layers{calls} failed[/] {seconds}", highlight=False)
    else:
        calls = f", and so are {len(fused)} fused calls" if fused else ""
        out.print(f"[green]every layer is within the tolerance[/]{calls}, {seconds}", highlight=False)


def _worst_of_each(checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst check of each layer, kernel and rank, in the order of the checks."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for check in checks:
        found.setdefault((check["layer"], check["kernel"], check["rank"]), check)
    return list(found.values())


def _show_rows(rows: list[dict[str, Any]]) -> None:
    ranks = ("rank",) if any(row["rank"] is not None for row in rows) else ()
    shown = 4 if out.width >= _WIDE else 2  # the NMSE and the cosine are in the JSON too
    grid = table("layers", *ranks, "kernel", "M", *("error", "allowed", "NMSE", "cosine")[:shown], "")
    for row in rows:
        mark = Text("ok", "green") if row["ok"] else Text("FAILED", "bold red")
        rank = ["-" if row["rank"] is None else str(row["rank"])] if ranks else []
        figures = (
            ["-"] * 4
            if row["fault"]
            else [f"{row['error']:.1e}", f"{row['allowed']:.1e}", f"{row['nmse']:.1e}", f"{row['cosine']:.6f}"]
        )
        m = str(row["m"]) if row["m"] else "-"
        grid.add_row(row["layer"], *rank, short_name(row["kernel"]) or "-", m, *figures[:shown], mark)
    put(grid)
