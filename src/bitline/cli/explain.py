"""`bitline explain`: the kernel of every layer on any platform, with every candidate's verdict, reason and estimated cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitline.checkpoint import open_checkpoint
from bitline.cli import candidate_status
from bitline.cli.fetch import local_path
from bitline.cli.merged_layers import merged_layers
from bitline.cli.options import dtype_of
from bitline.cli.render import layer_names
from bitline.cli.scheme_text import scheme_text
from bitline.cli.sharded_layers import ShardedLayers, by_dimension, by_plan, names_by_spec, rank_facts, rank_plan
from bitline.model.meta_model import default_dtype
from bitline.platform import PACKAGES, Platform
from bitline.select import Choice, Policy, choose
from bitline.types import LinearSpec, dtype_name

Chooser = Callable[[LinearSpec, Policy], Choice]


def explain_report(
    path: Path, platform: Platform | None, policy: Policy, dtype: str = "auto", tp: int = 1, *, expert_parallel: bool = False
) -> dict[str, Any]:  # fmt: skip
    """The report of the command as JSON-compatible values; docs/command-line.md describes the keys.

    One plan for each distinct spec; with tp > 1, for each sharding of it and each kernel and shape that its ranks get: as
    `load_model(tp=…)` cuts the layers, or, where the checkpoint is not of a model, by rows and by columns. Of experts a plan's
    layers are stacks, with the time of those that a batch is expected to touch. platform: None is this machine's CPU.
    expert_parallel: each rank has whole experts.
    """
    where, dtype_asked = platform or Platform.detect(), dtype_of(dtype)
    checkpoint = open_checkpoint(local_path(str(path)))
    act_dtype = dtype_asked or default_dtype(checkpoint, where)
    ranks, why = rank_plan(checkpoint, act_dtype, tp, expert_parallel=expert_parallel) if tp > 1 else (None, "")
    sharded = by_dimension(checkpoint, act_dtype, tp) if ranks is None else by_plan(ranks)
    plans = _plan_all(sharded, policy, lambda spec, of_layer: choose(spec, where, of_layer))
    apart = ranks is None  # totals of every sharding, of which a layer has only one
    return {
        "path": str(checkpoint.path), "format": checkpoint.format, "platform": str(where), "activations": dtype_name(act_dtype),
        "tp": tp, "expert_parallel": expert_parallel, "m": list(policy.m), "layers": len(checkpoint.layers()),
        "rates": {name: where.rates.bandwidth if name == "bandwidth" else where.rates.of(name)
                  for name in ("bandwidth", "bf16", "int8", "fp8")},
        "policy": {"kernel": policy.kernel, "backend": policy.backend, "strict": policy.strict,
                   "disabled": sorted(policy.disabled), "batch_invariant": policy.batch_invariant,
                   "deterministic": policy.deterministic, "tuned": policy.tuned},
        "rates_note": where.rates_note, "plans": plans, "totals": _totals(plans, apart=apart),
        "tensor_parallel": rank_facts(ranks, why, plans) if tp > 1 else None,
        "merged": [] if tp > 1 or where.vendor == "cpu"
        else merged_layers(names_by_spec(checkpoint, act_dtype, experts=False), where, policy),
        "if_installed": _if_installed(plans, sharded, where, policy, apart=apart),
    }  # fmt: skip


def _plan_all(sharded: list[ShardedLayers], policy: Policy, chooser: Chooser) -> list[dict[str, Any]]:
    return [plan for layers in sharded for plan in _plans(layers, policy, chooser)]


def _plans(layers: ShardedLayers, policy: Policy, chooser: Chooser) -> Iterator[dict[str, Any]]:
    """One plan for each kernel that ranks get, for each shape where these differ by more than one row or column, and for each
    number of whole experts.
    """
    experts = layers.experts
    of_layer = policy if experts is None else experts.policy(policy)
    choice_of = {spec: _choose(spec, layers, of_layer, chooser) for spec in dict.fromkeys(layers.rank_specs)}
    by_kernel: dict[Any, tuple[Choice, list[int]]] = {}
    held = layers.held or (len(layers.names),) * len(layers.rank_specs)
    for rank, spec in enumerate(layers.rank_specs):
        if not held[rank]:
            continue
        choice = choice_of[spec]
        shape = (spec.n, spec.k) if max(abs(s.n - spec.n) + abs(s.k - spec.k) for s in layers.rank_specs) > 1 else None
        by_kernel.setdefault((choice.best.name, shape, held[rank]), (choice, []))[1].append(rank)
    for choice, ranks in by_kernel.values():
        facts, (count, stack) = _choice_facts(choice), layers.stacks(held[ranks[0]])
        for fact in facts["candidates"] if experts else ():
            fact |= {key: experts.of_stack(fact[key], policy, stack) for key in ("cost_seconds", "estimated_seconds")}  # type: ignore[union-attr]
        yield {
            "layers": count, "experts": stack, "experts_of_layer": experts.num_experts if experts else 0,
            "top_k": experts.top_k if experts else 0, "names": layer_names(layers.names, short=True), "example": layers.names[0],
            "cut": layers.dim, "ranks": ranks, "whole_shape": [layers.spec.n, layers.spec.k],
            "weights": scheme_text(layers.spec), **facts, "cost_seconds": facts["candidates"][0]["cost_seconds"],
            "packed_bytes": choice.packed_bytes() * max(1, stack),
        }  # fmt: skip


def _choose(spec: LinearSpec, layers: ShardedLayers, policy: Policy, chooser: Chooser) -> Choice:
    """A rank's kernel. One that takes no quantized input runs a layer weight-only whose input all ranks quantize together."""
    choice = chooser(spec, policy)
    if not layers.shares_scales or spec.act is None:
        return choice
    takes_codes = spec.act.granularity != "group" and choice.kernel.takes_quantized_input
    return choice if takes_codes else chooser(spec.replace(act=None), policy)


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


def _totals(plans: list[dict[str, Any]], *, apart: bool) -> dict[str, Any]:
    """Seconds and bytes of all layers on one rank: each layer's slowest and its largest. apart: of each sharding."""
    by_dim: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for p in plans:
        by_dim[p["cut"] if apart else ""][p["example"]].append(p)
    return {
        dim: {
            "cost_seconds": {m: sum(max(p["cost_seconds"].get(m, 0.0) for p in ps) * ps[0]["layers"] for ps in layers.values())
                             for m in next(iter(layers.values()))[0]["cost_seconds"]},
            "packed_bytes": sum(max(p["packed_bytes"] for p in ps) * ps[0]["layers"] for ps in layers.values()),
        }
        for dim, layers in by_dim.items()
    }  # fmt: skip


def _if_installed(
    plans: list[dict[str, Any]], sharded: list[ShardedLayers], where: Platform, policy: Policy, *, apart: bool
) -> list[dict[str, Any]]:
    """Missing packages with which some layer would get another kernel: for which layers, and the total time then."""
    wanted = {c["package"] for p in plans for c in p["candidates"] if c["package"] and c["does_scheme"]}
    now, found = _totals(plans, apart=apart), []
    for package in sorted(wanted):
        with_package = replace(where, packages=where.packages | {package})
        other = _plan_all(sharded, policy, lambda spec, of_layer, to=with_package: choose(spec, to, of_layer))  # type: ignore[misc]
        changed = [p for p in other if p["kernel"] not in {q["kernel"] for q in plans if q["example"] == p["example"]}]
        if changed:
            found.append({
                "package": PACKAGES[package].distribution, "install": PACKAGES[package].install,
                "kernels": sorted({p["kernel"] for p in changed}),
                "layers": sum({p["example"]: p["layers"] for p in changed}.values()),
                "totals": _totals(other, apart=apart), "now": now,
            })  # fmt: skip
    return found
