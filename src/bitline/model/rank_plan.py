"""How `load_model(tp=…)` cuts a checkpoint over any number of ranks, and what they exchange: without ranks, and without data."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from bitline.checkpoint import Checkpoint
from bitline.errors import CheckpointError, InputError
from bitline.expert_gate import recognize
from bitline.formats.base import LayerRecord
from bitline.model.expert_names import DOWN_NAME, TOP_K_KEYS, ExpertPlace
from bitline.model.merge_weights import merge_key, merged_spec
from bitline.model.meta_model import check_config_sizes, make_config, make_meta_model
from bitline.model.narrowed_specs import narrowed_spec
from bitline.model.rank_slices import OneRank
from bitline.model.tensor_parallel import ParallelPlan
from bitline.model.weight_loader import WeightLoader
from bitline.parallel.cuts import Cut
from bitline.parallel.exchanges import Exchange, of_concatenation, of_scales, of_sum
from bitline.types import LinearSpec


@dataclass(frozen=True)
class LayerOnRanks:
    """A quantized layer on each rank.

    Attributes:
        record: The layer.
        module: The model's module, or experts module.
        dim: 0 where rows are cut, 1 for columns, None where every rank has the whole layer.
        specs: Each rank's.
        shares_scales: Ranks quantize the layer's input together: a kernel that takes no quantized input then runs it weight-only.
        rank: The only rank that has the layer, an expert's; None where all have it, or a cut of it.
    """

    record: LayerRecord
    module: str
    dim: int | None
    specs: tuple[LinearSpec, ...]
    shares_scales: bool
    rank: int | None = None

    def on(self, rank: int) -> bool:
        """Whether a rank has the layer, or a cut of it."""
        return self.rank is None or self.rank == rank


class RankPlan:
    """The cuts of a checkpoint's model over `world` ranks.

    Args:
        checkpoint: Of a model that transformers has.
        dtype: The model's.
        world: Ranks, at least 2.
        expert_parallel: Whether each rank has whole experts.

    Raises:
        CheckpointError: Where transformers has no model of this configuration, or its modules are not the checkpoint's layers.
        InputError: For a number of ranks that the model cannot be cut over.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, world: int, *, expert_parallel: bool = False) -> None:
        self.checkpoint, self.dtype, self.world = checkpoint, dtype, world
        check_config_sizes(checkpoint)
        self.model = make_meta_model(make_config(checkpoint), dtype, checkpoint)
        self.loader = WeightLoader(self.model, checkpoint, lambda _name: torch.device("cpu"), dtype, None, None)
        self.records = checkpoint.layers()
        self._modules = dict(self.model.named_modules())
        self._place = {r.name: self.loader.names.expert_place(r.name, layer=True) for r in self.records}
        self._target = {r.name: self._target_of(r) for r in self.records if self._place[r.name] is None}
        specs = self.loader._specs_of_modules(self.records)
        one = lambda rank, world: cast(Any, OneRank(rank, world, expert_parallel=expert_parallel))
        cut = lambda rank, world: ParallelPlan(self.model, one(rank, world), specs)
        try:
            self.ranks = [cut(rank, world) for rank in range(world)]
        except InputError as error:
            most = bisect.bisect_left(range(2, world), True, key=lambda ranks: not _is_possible(cut, ranks)) + 1
            raise InputError(
                f"the model cannot be cut over {world} ranks: {error.what}", file=checkpoint.path, found=error.found,
                expected=error.expected, fix=f"at most {most} ranks" if most > 1 else "one rank",
            ) from error  # fmt: skip

    def _target_of(self, record: LayerRecord) -> str | None:
        """The module of a layer, whose shape must be the layer's; None where the model leaves the layer out."""
        target = self.loader._target(record)
        shape = getattr(getattr(self._modules.get(target or ""), "weight", None), "shape", None)
        if target is not None and shape is not None and tuple(shape) != (record.spec.n, record.spec.k):
            raise CheckpointError("the configuration's model has another shape than a layer", tensor=record.name,
                                  found=[record.spec.n, record.spec.k], expected=list(shape))  # fmt: skip
        return target if shape is not None else None

    # ---- layers ----------------------------------------------------------------------------------------------------------

    def layers(self) -> Iterator[LayerOnRanks]:
        """Every quantized layer that the model runs packed; a router is dequantized."""
        for record in self.records:
            place, target = self._place[record.name], self._target.get(record.name)
            if place is not None:
                yield self._expert(record, place)
            elif target is not None and self.loader.runs_packed(self._modules[target]):
                cuts = [plan.cuts.get(target) for plan in self.ranks]
                shared = [cut for cut in cuts if cut and cut.dim == 1 and self.ranks[0]._shares_scales(record.spec.act, cut)]
                specs = tuple(self._spec(record.spec, cut, rank, bool(shared)) for rank, cut in enumerate(cuts))
                yield LayerOnRanks(record, target, cuts[0].dim if cuts[0] else None, specs, bool(shared))

    def _expert(self, record: LayerRecord, place: ExpertPlace) -> LayerOnRanks:
        """A matrix of an expert."""
        down, spec = place.parameter == DOWN_NAME, record.spec
        if f"{place.parameter}_bias" in self.model.get_submodule(place.module)._parameters:
            spec = spec.replace(bias=True)  # the module's, of which an expert's layer gets its part
        own = [plan.whole_experts.get(place.module) for plan in self.ranks]
        if own[0] is not None:
            owner = next(rank for rank, experts in enumerate(own) if experts and place.expert in experts.numbers())
            return LayerOnRanks(record, place.module, None, (self._spec(spec, None, owner, False),) * self.world, False, owner)
        gate = recognize(self.model.get_submodule(place.module))
        interleaved = gate is not None and gate[1] and place.parts == 1 and not down
        of_rank = [plan.expert_cut(place.module, spec.n, down=down, interleaved=interleaved) for plan in self.ranks]
        if down and self.ranks[0]._shares_scales(spec.act, of_rank[0]):
            spec = spec.replace(act=None)
        specs = tuple(self._spec(spec, cut, rank, False) for rank, cut in enumerate(of_rank))
        return LayerOnRanks(record, place.module, of_rank[0].dim, specs, False)

    def _spec(self, spec: LinearSpec, cut: Cut | None, rank: int, shared: bool) -> LinearSpec:
        """A rank's spec of a layer. shared: the bias is added after the sum."""
        spec = spec.replace(act_dtype=self.dtype)
        if cut is None:
            return spec
        parts = [narrowed_spec(spec, cut.dim, start, stop) for start, stop in cut.ranges]
        whole = parts[0]
        if len(parts) > 1:
            keys = {merge_key(part) for part in parts}
            joined = merged_spec(parts) if len(keys) == 1 and None not in keys else None
            whole = joined or parts[0].replace(n=sum(part.n for part in parts))
        return whole.replace(bias=False) if cut.dim == 1 and (rank or shared) else whole

    # ---- what is not quantized -------------------------------------------------------------------------------------------

    def unquantized_bytes(self, rank: int) -> int:
        """Bytes of the parameters that no packed layer has, on a rank; tied ones once."""
        plan = self.ranks[rank]
        quantized = {target for target in self._target.values() if target}
        packed = {target for target in quantized if self.loader.runs_packed(self._modules[target])}
        of_experts = {(p.module, p.parameter) for p in self._place.values() if p}
        modules = {module for module, _ in of_experts}
        tied = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        total = 0
        for name, parameter in self.model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            own = owner in packed or (owner, leaf.removesuffix("_bias")) in of_experts
            partner = tied.get(name, "").rpartition(".")[0]
            if own or partner in quantized:
                continue
            if owner in plan.experts or owner in plan.whole_experts:
                total += self._dense_expert_bytes(plan, owner, leaf, parameter, among_quantized=owner in modules)
            elif leaf != "bias" or plan.keeps_bias(owner):
                total += plan.tensor(name, parameter.detach()).nbytes
        return total

    def _dense_expert_bytes(
        self, plan: ParallelPlan, module: str, leaf: str, parameter: nn.Parameter, *, among_quantized: bool
    ) -> int:  # fmt: skip
        """Bytes of a parameter of unquantized experts. Channels are padded to multiples of 8 in transformers' own module."""
        if (own := plan.whole_experts.get(module)) is not None:
            return parameter.nbytes // own.total * len(own)
        at, rank = plan.experts[module], plan.tp.rank
        if leaf == f"{DOWN_NAME}_bias":
            return 0 if among_quantized and rank else parameter.nbytes
        channels = at[rank + 1] - at[rank]
        return parameter.nbytes // at[-1] * (channels if among_quantized else -(-channels // 8) * 8)

    def tied_bytes(self, rank: int) -> int:
        """Bytes of quantized tables that are also the head, and that the model then has twice: the second time."""
        total = 0
        for a, b in dict(getattr(self.model, "all_tied_weights_keys", None) or {}).items():
            owners = [name.rpartition(".")[0] for name in (a, b)]
            records = {target: r for r in self.records if (target := self._target.get(r.name)) in owners}
            if len(records) == 1:
                (target, record), *_ = records.items()
                other = next(owner for owner in owners if owner != target)
                total += self._spec(record.spec, self.ranks[rank].cuts.get(other), rank, False).weight_bytes()
        return total

    # ---- exchanges -------------------------------------------------------------------------------------------------------

    def exchanges(self) -> list[Exchange]:
        """The collective operations of a forward pass of one token."""
        plan, found = self.ranks[0], []
        acts = {target: r.spec.act for r in self.records if (target := self._target.get(r.name))}
        table = self.model.get_input_embeddings()
        for name, cut in plan.cuts.items():
            module = self._modules[name]
            n = module.weight.shape[0]
            if cut.dim == 1:
                act = acts.get(name)
                if act is not None and plan._shares_scales(act, cut):
                    found.append(of_scales(name, act, cut.parts, self.dtype))
                    exact = act.granularity != "group"
                    found.append(of_sum("sum", name, n, torch.float32 if exact else self.dtype, self.world))
                else:
                    found.append(of_sum("sum", name, n, self.dtype, self.world))
            elif name in plan.gathered:
                found.append(of_concatenation("gather", name, plan.gathered[name], self.dtype))
            elif module is table:
                found.append(of_sum("embedding", name, module.weight.shape[1], self.dtype, self.world))
        found += [exchange for name in plan.experts for exchange in self._expert_exchanges(name)]
        size = self.model.config.get_text_config().hidden_size
        return found + [of_sum("sum", name, size, self.dtype, self.world) for name in plan.whole_experts]

    def _expert_exchanges(self, name: str) -> Iterator[Exchange]:
        """Those of an experts module: the sum, and activation scales of each expert that runs."""
        plan, config = self.ranks[0], self.model.config.get_text_config()
        place = lambda r: self._place[r.name]
        of_module = (r for r in self.records if (p := place(r)) and (p.module, p.parameter) == (name, DOWN_NAME))
        down, cut = next(of_module, None), plan.expert_cut(name, 0, down=True)
        if down is not None and down.spec.act is not None and plan._shares_scales(down.spec.act, cut):
            top_k = next((v for key in TOP_K_KEYS if isinstance(v := getattr(config, key, None), int) and v > 0), 1)
            yield of_scales(name, down.spec.act, cut.parts, self.dtype, top_k)
        yield of_sum("sum", name, config.hidden_size, self.dtype, self.world)

    # ---- heads -----------------------------------------------------------------------------------------------------------

    def heads(self) -> list[dict[str, Any]]:
        """By rank, query and key-value heads of an attention module, and how many ranks have each of the latter.

        Of the first kind of attention alone, where a model has several; empty where attention is not cut.
        """
        names = list(self.ranks[0].heads)
        if not names:
            return []
        cuts = [plan.heads[names[0]] for plan in self.ranks]
        return [
            {"query": c.query[1] - c.query[0], "kv": c.kv[1] - c.kv[0], "kv_on_ranks": sum(o.kv == c.kv for o in cuts)}
            for c in cuts
        ]


def _is_possible(cut: Callable[[int, int], ParallelPlan], ranks: int) -> bool:
    """Whether a model can be cut over so many ranks, as it then can over fewer."""
    try:
        cut(0, ranks)
    except InputError:
        return False
    return True
