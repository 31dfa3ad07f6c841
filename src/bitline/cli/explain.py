"""`bitline explain`: the kernel of every layer on any platform, with every candidate's verdict, reason and estimated cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bitline.checkpoint import open_checkpoint
from bitline.cli import candidate_status
from bitline.cli.fetch import local_path
from bitline.cli.options import dtype_of
from bitline.cli.render import layer_names
from bitline.cli.scheme_text import scheme_text
from bitline.cli.shard_specs import shard_specs
from bitline.model.meta_model import default_dtype
from bitline.platform import PACKAGES, Platform
from bitline.select import Choice, Policy, choose
from bitline.types import LinearSpec, dtype_name


class ShardedLayers(NamedTuple):
    """Layers of one spec under one sharding. dim: "N", "K", or "" for one rank. rank_specs: each rank's spec."""

    spec: LinearSpec
    names: list[str]
    dim: str
    rank_specs: list[LinearSpec]


Chooser = Callable[[LinearSpec], Choice]


def explain_report(path: Path, platform: Platform | None, policy: Policy, dtype: str = "auto", tp: int = 1) -> dict[str, Any]:
    """The report of the command as JSON-compatible values; docs/command-line.md describes the keys.

    One plan for each distinct spec; with tp > 1, for each sharding of it and each kernel that its ranks get. platform: None is
    this machine's CPU.
    """
    where, dtype_asked = platform or Platform.detect(), dtype_of(dtype)
    checkpoint = open_checkpoint(local_path(str(path)))
    act_dtype = dtype_asked or default_dtype(checkpoint, where)
    layers: dict[LinearSpec, list[str]] = defaultdict(list)
    for record in checkpoint.layers():
        layers[record.spec.replace(act_dtype=act_dtype)].append(record.name)
    sharded = [
        ShardedLayers(spec, names, dim, rank_specs)
        for spec, names in layers.items()
        for dim, rank_specs in shard_specs(spec, tp).items()
    ]
    plans = _plan_all(sharded, lambda spec: choose(spec, where, policy))
    return {
        "path": str(checkpoint.path), "format": checkpoint.format, "platform": str(where), "activations": dtype_name(act_dtype),
        "tp": tp, "m": list(policy.m), "layers": sum(map(len, layers.values())),
        "rates": {name: where.rates.bandwidth if name == "bandwidth" else where.rates.of(name)
                  for name in ("bandwidth", "bf16", "int8", "fp8")},
        "policy": {"kernel": policy.kernel, "backend": policy.backend, "strict": policy.strict,
                   "disabled": sorted(policy.disabled), "batch_invariant": policy.batch_invariant,
                   "deterministic": policy.deterministic, "tuned": policy.tuned},
        "plans": plans, "totals": _totals(plans), "if_installed": _if_installed(plans, sharded, where, policy),
    }  # fmt: skip


def _plan_all(sharded: list[ShardedLayers], chooser: Chooser) -> list[dict[str, Any]]:
    return [plan for layers in sharded for plan in _plans(layers, chooser)]


def _plans(layers: ShardedLayers, chooser: Chooser) -> Iterator[dict[str, Any]]:
    """One plan for each kernel that ranks get."""
    choice_of = {spec: chooser(spec) for spec in dict.fromkeys(layers.rank_specs)}
    by_kernel: dict[str, tuple[Choice, list[int]]] = {}
    for rank, spec in enumerate(layers.rank_specs):
        choice = choice_of[spec]
        by_kernel.setdefault(choice.best.name, (choice, []))[1].append(rank)
    for choice, ranks in by_kernel.values():
        facts = _choice_facts(choice)
        yield {
            "layers": len(layers.names), "names": layer_names(layers.names, short=True), "example": layers.names[0],
            "cut": layers.dim, "ranks": ranks, "whole_shape": [layers.spec.n, layers.spec.k],
            "weights": scheme_text(layers.spec), **facts, "cost_seconds": facts["candidates"][0]["cost_seconds"],
            "packed_bytes": choice.kernel.packed_bytes(choice.spec),
        }  # fmt: skip


def _choice_facts(choice: Choice) -> dict[str, Any]:
    """A choice as a dict, with each candidate's status and the package that it lacks."""
    facts = choice.to_dict()
    for fact, candidate in zip(facts["candidates"], choice.candidates, strict=True):
        fact["kind"] = candidate_status.status(candidate, choice)
        if fact["kind"] == "machine":  # report the hardware's reason: a package would not help
            verdict = candidate_status.hardware_verdict(candidate, choice.platform)
            fact["reason"], fact["fix"] = verdict.reason, verdict.fix
        fact["does_scheme"] = candidate.verdict.ok or candidate_status.supports_scheme(candidate.kernel, choice.spec)
        lacks_package = fact["kind"] == "package"
        fact["package"] = candidate_status.missing_package(candidate, choice.platform) if lacks_package else None
    return facts


def _totals(plans: list[dict[str, Any]]) -> dict[str, Any]:
    """By sharding, seconds and bytes of all layers on one rank: each layer's slowest and its largest."""
    by_dim: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for p in plans:
        by_dim[p["cut"]][p["example"]].append(p)
    return {
        dim: {
            "cost_seconds": {m: sum(max(p["cost_seconds"].get(m, 0.0) for p in ps) * ps[0]["layers"] for ps in layers.values())
                             for m in next(iter(layers.values()))[0]["cost_seconds"]},
            "packed_bytes": sum(max(p["packed_bytes"] for p in ps) * ps[0]["layers"] for ps in layers.values()),
        }
        for dim, layers in by_dim.items()
    }  # fmt: skip


def _if_installed(
    plans: list[dict[str, Any]], sharded: list[ShardedLayers], where: Platform, policy: Policy
) -> list[dict[str, Any]]:
    """Missing packages with which some layer would get another kernel: for which layers, and the total time then."""
    wanted = {c["package"] for p in plans for c in p["candidates"] if c["package"] and c["does_scheme"]}
    now, found = _totals(plans), []
    for package in sorted(wanted):
        with_package = replace(where, packages=where.packages | {package})
        other = _plan_all(sharded, lambda spec, platform=with_package: choose(spec, platform, policy))  # type: ignore[misc]
        changed = [p for p in other if p["kernel"] not in {q["kernel"] for q in plans if q["example"] == p["example"]}]
        if changed:
            found.append({
                "package": PACKAGES[package].distribution, "install": PACKAGES[package].install,
                "kernels": sorted({p["kernel"] for p in changed}),
                "layers": sum({p["example"]: p["layers"] for p in changed}.values()),
                "totals": _totals(other), "now": now,
            })  # fmt: skip
    return found
