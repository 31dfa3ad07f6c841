"""The parts of a checkpoint's model that run as one call, loaded one by one and verified."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from bitline import env, native
from bitline.checkpoint import Checkpoint
from bitline.errors import BitlineError
from bitline.experts import QuantExperts
from bitline.formats.base import LayerRecord
from bitline.host import without_default_device
from bitline.model import decode_step
from bitline.model.expert_names import top_k_of
from bitline.model.known_modules import is_known_layer
from bitline.model.layer_check import LayerCheck, fault_of
from bitline.model.meta_model import check_config_sizes, make_config, make_meta_model
from bitline.model.module_snapshot import snapshot
from bitline.model.rank_slices import OneRank
from bitline.model.verify_fused import check_decode_step, check_experts
from bitline.model.weight_loader import WeightLoader
from bitline.select import Policy

OF_ONE_KIND = 8  # parts that are checked of those with the same specs


class FusedParts:
    """The experts of each layer, and on a CPU in bfloat16 the decoder layers, of the model that `load_model` would make.

    Args:
        checkpoint: An open checkpoint.
        device: Where kernels run.
        dtype: Of activations.
        policy: How kernels are chosen.
        batch_sizes: M, of experts.
        rank: Whose experts these are, under expert parallelism; decoder layers are left out then.

    Attributes:
        reason: Why there is no model to take parts of; "" where there is one.
        names: The model's names of the parts: of those whose layers have the same specs eight, spread evenly.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, policy: Policy, batch_sizes: tuple[int, ...],
        rank: OneRank | None = None,
    ) -> None:  # fmt: skip
        self.checkpoint, self.device, self.dtype, self.policy = checkpoint, device, dtype, policy
        self.batch_sizes, self.rank, self.reason, self.names = batch_sizes, rank, "", list[str]()
        try:
            self.names = self._spread([*self._decoder_layers(), *self._loader.experts])
        except BitlineError as error:
            self.reason = str(error)

    @functools.cached_property
    def _loader(self) -> WeightLoader:
        check_config_sizes(self.checkpoint)
        model = make_meta_model(make_config(self.checkpoint), self.dtype, self.checkpoint).eval()
        return WeightLoader(model, self.checkpoint, lambda _name: self.device, self.dtype, self.policy, None,
                            tp=cast(Any, self.rank))  # fmt: skip

    def _decoder_layers(self) -> list[str]:
        """The decoder layers that `load_model` would give a native step."""
        native_step = self.device.type == "cpu" and self.dtype == torch.bfloat16 and native.core() is not None
        if not native_step or self.rank is not None or self.policy.batch_invariant or env.no_step():
            return []
        return [name for name, module in self._loader.model.named_modules() if is_known_layer(module)]

    def _spread(self, names: Sequence[str]) -> list[str]:
        """Of parts of one kind, which run the same code, as many as OF_ONE_KIND, the first and the last among them."""
        kinds: dict[Hashable, list[str]] = defaultdict(list)
        for name in names:
            kinds[tuple(record.spec for record in self._records(name))].append(name)
        found: list[str] = []
        for members in kinds.values():
            steps = min(len(members), OF_ONE_KIND) - 1
            found += [members[round(i * (len(members) - 1) / max(1, steps))] for i in range(steps + 1)]
        return found

    def _records(self, name: str) -> list[LayerRecord]:
        if name in self._loader.experts:
            return [*self._loader.experts[name].records(self._own_experts(name))]
        return [record for target, record in self._loader.layer_targets.items() if target.startswith(f"{name}.")]

    def _own_experts(self, name: str) -> range | None:
        """The numbers of the rank's experts; None for all."""
        if self.rank is None:
            return None
        self._loader.plan_cuts(self.checkpoint.layers(), experts_only=True)
        assert self._loader.parallel is not None
        return self._loader.parallel.whole_experts[name].numbers()

    def layers_of(self, name: str) -> set[str]:
        """The checkpoint's names of the quantized layers of a part."""
        return {record.name for record in self._records(name)}

    @without_default_device
    def checks(self, name: str) -> Iterator[LayerCheck]:
        """Load a part, compare its one call with float64, and free it. Nothing where the model would not run it as one call."""
        restore = snapshot(self._loader.model.get_submodule(name.rpartition(".")[0]))
        try:
            for check in self._experts(name) if name in self._loader.experts else self._decode_step(name):
                yield check if self.rank is None else replace(check, rank=self.rank.rank)
        except BitlineError as error:
            yield fault_of(name, "", str(error), None if self.rank is None else self.rank.rank)
        finally:
            for layer in [layer for layer in self._loader.read_weight if layer.startswith(f"{name}.")]:
                del self._loader.read_weight[layer]
            restore()

    def _experts(self, name: str) -> Iterator[LayerCheck]:
        experts: QuantExperts = self._loader.load_experts(name)
        if experts.is_one_call:
            reads = self._loader.read_weight
            top_k = top_k_of(self._loader.model.config)
            yield from check_experts(experts, reads[f"{name}.up.0"], reads[f"{name}.down"], name, top_k, self.batch_sizes)

    def _decode_step(self, name: str) -> Iterator[LayerCheck]:
        layer = self._loader.load_module(name)
        decode_step.install(layer)
        reads = {n.removeprefix(f"{name}."): read for n, read in self._loader.read_weight.items() if n.startswith(f"{name}.")}
        yield from check_decode_step(layer, reads, name)
