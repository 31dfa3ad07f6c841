"""`bitline explain`: the plan for a checkpoint on any machine, with every candidate's verdict, reason and cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bitline import bitstream
from bitline.checkpoint import open_checkpoint
from bitline.cli import packages
from bitline.cli.fetch import local_path
from bitline.cli.options import dtype_of
from bitline.cli.render import layer_names
from bitline.cli.scheme import scheme_text
from bitline.errors import InputError
from bitline.model.meta_model import default_dtype
from bitline.platform import PACKAGES, Platform
from bitline.select import Choice, Policy, choose
from bitline.types import LinearSpec, dtype_name
from bitline.weight import QuantizedWeight


def explain_report(path: Path, platform: Platform | None, policy: Policy, dtype: str = "auto", tp: int = 1) -> dict[str, Any]:
    """Every figure of the command: one choice per distinct layer; where tp > 1, per cut and per kernel that its ranks get.

    platform: None is this machine's CPU. docs/command-line.md describes the keys.
    """
    where, computing = platform or Platform.detect(), dtype_of(dtype)
    checkpoint = open_checkpoint(local_path(str(path)))
    act = computing or default_dtype(checkpoint, where)
    layers: dict[LinearSpec, list[str]] = defaultdict(list)
    for record in checkpoint.layers():
        layers[record.spec.replace(act_dtype=act)].append(record.name)
    parts = [(spec, names, cut, parts) for spec, names in layers.items() for cut, parts in cuts(spec, tp).items()]
    pick = lambda part: choose(part, where, policy)
    plans = [plan for entry in parts for plan in _plans(*entry, pick)]
    return {
        "path": str(checkpoint.path), "format": checkpoint.format, "platform": str(where), "activations": dtype_name(act),
        "tp": tp, "m": list(policy.m), "layers": sum(map(len, layers.values())),
        "rates": {"bandwidth": where.rates.bandwidth, "bf16": where.rates.of("bf16"), "int8": where.rates.of("int8"),
                  "fp8": where.rates.of("fp8")},
        "policy": {"kernel": policy.kernel, "backend": policy.backend, "strict": policy.strict,
                   "disabled": sorted(policy.disabled), "batch_invariant": policy.batch_invariant,
                   "deterministic": policy.deterministic},
        "plans": plans, "totals": _totals(plans), "if_installed": _if_installed(plans, parts, where, policy),
    }  # fmt: skip


Parts = tuple[LinearSpec, list[str], str, list[LinearSpec]]  # the layer's spec, its names, how it is cut, what each rank has


def _plans(spec: LinearSpec, names: list[str], cut: str, parts: list[LinearSpec], pick: Callable[..., Choice]) -> Iterable[Any]:
    """One for each kernel that ranks get."""
    chosen: dict[str, tuple[Choice, list[int]]] = {}
    made = {part: pick(part) for part in dict.fromkeys(parts)}
    for rank, part in enumerate(parts):
        chosen.setdefault(made[part].best.name, (made[part], []))[1].append(rank)
    for choice, ranks in chosen.values():
        facts = choice.to_dict()
        for fact, c in zip(facts["candidates"], choice.candidates, strict=True):
            fact["kind"] = packages.kind(c, choice)
            if fact["kind"] == "machine":  # a package would not help
                why = packages.obstacle(c, choice.platform)
                fact["reason"], fact["fix"] = why.reason, why.fix
            fact["does_scheme"] = c.verdict.ok or packages.does(c.kernel, choice.spec)
            fact["package"] = packages.missing(c, choice.platform) if fact["kind"] == "package" else None
        yield {
            "layers": len(names), "names": layer_names(names, short=True), "example": names[0], "cut": cut, "ranks": ranks,
            "whole_shape": [spec.n, spec.k], "weights": scheme_text(spec), **facts,
            "cost_seconds": facts["candidates"][0]["cost_seconds"], "packed_bytes": choice.kernel.packed_bytes(choice.spec),
        }  # fmt: skip


def _totals(plans: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and bytes of all layers on one rank, for each way to cut: the slowest rank's and the largest one's."""
    slowest: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for p in plans:
        slowest[p["cut"]][p["example"]].append(p)
    return {
        cut: {
            "cost_seconds": {m: sum(max(p["cost_seconds"].get(m, 0.0) for p in ps) * ps[0]["layers"] for ps in of.values())
                             for m in next(iter(of.values()))[0]["cost_seconds"]},
            "packed_bytes": sum(max(p["packed_bytes"] for p in ps) * ps[0]["layers"] for ps in of.values()),
        }
        for cut, of in slowest.items()
    }  # fmt: skip


def _if_installed(plans: list[dict[str, Any]], parts: list[Parts], where: Platform, policy: Policy) -> list[dict[str, Any]]:
    """For each missing package that would be chosen somewhere: where, and what the layers' time would be."""
    wanted = {c["package"] for p in plans for c in p["candidates"] if c["package"] and c["does_scheme"]}
    now, found = _totals(plans), []
    for package in sorted(wanted):
        more = replace(where, packages=where.packages | {package})
        pick = lambda part, more=more: choose(part, more, policy)
        other = [plan for entry in parts for plan in _plans(*entry, pick)]
        taken = [p for p in other if p["kernel"] not in {q["kernel"] for q in plans if q["example"] == p["example"]}]
        if taken:
            found.append({
                "package": PACKAGES[package].distribution, "install": PACKAGES[package].install,
                "kernels": sorted({p["kernel"] for p in taken}),
                "layers": sum({p["example"]: p["layers"] for p in taken}.values()),
                "totals": _totals(other), "now": now,
            })  # fmt: skip
    return found


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
        spec, make((spec.n, bitstream.row_bytes(spec.k, spec.weight.bits)), torch.uint8), make(spec.grid, spec.scale_dtype),
        zero=make(spec.grid, torch.uint8) if spec.zero == "int" else None,
        offset=make(spec.grid, spec.scale_dtype) if spec.zero == "float" else None,
        scale2=None if grid2 is None else make(grid2),
        input_scale=make(()) if static else None,
        input_multiplier=make((spec.k,)) if spec.input_multiplier else None,
        bias=make((spec.n,)) if spec.bias else None,
    )  # fmt: skip
