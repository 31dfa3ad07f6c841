"""The layers of a checkpoint by spec and by how ranks share them, for `bitline explain`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bitline.checkpoint import Checkpoint
from bitline.cli.expert_layers import Experts, experts_of
from bitline.cli.render import layer_names
from bitline.cli.shard_specs import shard_specs
from bitline.errors import BitlineError, InputError
from bitline.model.expert_names import expert_number
from bitline.model.rank_plan import LayerOnRanks, RankPlan
from bitline.types import LinearSpec


class ShardedLayers(NamedTuple):
    """Layers of one spec under one sharding. dim: "N", "K", "E" for whole experts, or "" for whole layers. rank_specs: each
    rank's spec. experts: None for plain layers. shares_scales: ranks quantize the input together. held: of whole experts, the
    layers that each rank has.
    """

    spec: LinearSpec
    names: list[str]
    dim: str
    rank_specs: list[LinearSpec]
    experts: Experts | None
    shares_scales: bool = False
    held: tuple[int, ...] = ()

    def stacks(self, held: int) -> tuple[int, int]:
        """How many layers of experts there are, and experts of each on a rank that has `held` of the names; (layers, 0) of plain
        layers.
        """
        if self.experts is None:
            return len(self.names), 0
        layers = max(1, len(self.names) // self.experts.num_experts)
        if not self.held:
            return layers, self.experts.num_experts
        return (1, held) if any(count % layers for count in self.held) else (layers, held // layers)


def names_by_spec(checkpoint: Checkpoint, dtype: torch.dtype, *, experts: bool) -> dict[LinearSpec, list[str]]:
    """Names of plain layers, or of experts' layers, by spec."""
    found: dict[LinearSpec, list[str]] = defaultdict(list)
    for record in checkpoint.layers():
        if (expert_number(record.name) is not None) == experts:
            found[record.spec.replace(act_dtype=dtype)].append(record.name)
    return found


def by_dimension(checkpoint: Checkpoint, dtype: torch.dtype, tp: int) -> list[ShardedLayers]:
    """Every layer under every sharding, where no model says which one it gets; plain layers first."""
    return [
        ShardedLayers(spec, names, dim, rank_specs, experts_of(names, checkpoint, dtype))
        for experts in (False, True)
        for spec, names in names_by_spec(checkpoint, dtype, experts=experts).items()
        for dim, rank_specs in shard_specs(spec, tp).items()
    ]


def rank_plan(checkpoint: Checkpoint, dtype: torch.dtype, tp: int, *, expert_parallel: bool) -> tuple[RankPlan | None, str]:
    """The plan of `load_model(tp=…)`; or None, and why there is none: the checkpoint is not of a model that transformers has.

    A number of ranks that the model cannot be cut over is an InputError; so are whole experts where there is no model.
    """
    try:
        return RankPlan(checkpoint, dtype, tp, expert_parallel=expert_parallel), ""
    except InputError:
        raise
    except BitlineError as error:
        if expert_parallel:
            raise InputError("expert parallelism is planned for models alone", file=checkpoint.path, found=str(error.what),
                             fix="leave out --expert-parallel") from error  # fmt: skip
        return None, str(error.what)


def by_plan(plan: RankPlan) -> list[ShardedLayers]:
    """The layers as the plan cuts them, experts last."""
    groups: dict[Any, list[LayerOnRanks]] = defaultdict(list)
    for layer in plan.layers():
        of_expert = expert_number(layer.record.name) is not None
        spec = layer.record.spec.replace(act_dtype=plan.dtype)
        groups[of_expert, spec, layer.dim, layer.specs, layer.shares_scales].append(layer)
    found = []
    for (_, spec, dim, rank_specs, shares), layers in sorted(groups.items(), key=lambda group: group[0][0]):
        names = [layer.record.name for layer in layers]
        experts, owners = experts_of(names, plan.checkpoint, plan.dtype), [layer.rank for layer in layers]
        is_whole = owners[0] is not None
        held = tuple(owners.count(rank) for rank in range(plan.world)) if is_whole else ()
        cut = "E" if is_whole else {0: "N", 1: "K"}.get(dim, "")
        found.append(ShardedLayers(spec, names, cut, list(rank_specs), experts, shares, held))
    return found


def rank_facts(plan: RankPlan | None, why: str, plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The report's `tensor_parallel`: what each rank holds, and what ranks exchange for a token."""
    if plan is None:
        return {"planned": False, "why": why, "ranks": [], "whole": [], "exchanges": []}
    heads, unquantized = plan.heads(), [plan.unquantized_bytes(rank) for rank in range(plan.world)]
    packed = [sum(p["packed_bytes"] * p["layers"] for p in plans if rank in p["ranks"]) for rank in range(plan.world)]
    ranks = [
        {"packed_bytes": packed[rank] + plan.tied_bytes(rank), "unquantized_bytes": unquantized[rank],
         "query_heads": heads[rank]["query"] if heads else 0, "kv_heads": heads[rank]["kv"] if heads else 0,
         "kv_heads_on_ranks": heads[rank]["kv_on_ranks"] if heads else 0}
        for rank in range(plan.world)
    ]  # fmt: skip
    whole = [layer.record.name for layer in plan.layers() if layer.dim is None and layer.rank is None]
    by_what: dict[str, list[Any]] = defaultdict(list)
    for exchange in plan.exchanges():
        by_what[exchange.what].append(exchange)
    exchanges = [
        {"what": what, "names": layer_names([e.module for e in found], short=True), "count": sum(e.count for e in found),
         "bytes": sum(e.nbytes for e in found)}
        for what, found in by_what.items()
    ]  # fmt: skip
    return {"planned": True, "why": "", "ranks": ranks, "whole": whole, "exchanges": exchanges}
