"""Verification of a checkpoint on this machine, layer by layer from its files: each kernel's outputs against the reference."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from bitline.checkpoint import Checkpoint
from bitline.errors import BitlineError, summary_of
from bitline.formats.base import LayerRecord
from bitline.linear import QuantLinear
from bitline.model.layer_check import LayerCheck, fault_of
from bitline.model.rank_slices import RankSlice, RankSlices
from bitline.model.verify import check_layer
from bitline.platform import Platform
from bitline.select import Policy, choose
from bitline.weight import QuantizedWeight

_T = TypeVar("_T")


def sample_layers(records: Sequence[_T], count: int, seed: int) -> list[_T]:
    """`count` layers, one of each of as many equal parts of the file's order, drawn with this seed; all where there are fewer."""
    if count >= len(records):
        return list(records)
    draw = random.Random(seed)
    at = [i * len(records) // count for i in range(count + 1)]
    return [records[draw.randrange(start, stop)] for start, stop in itertools.pairwise(at)]


class FileVerifier:
    """Packs each layer of a checkpoint and compares its outputs with the reference.

    Args:
        checkpoint: An open checkpoint.
        device: Where kernels run.
        dtype: Of activations.
        policy_of: The policy for a layer.
        batch_sizes: M.
        all_kernels: Every kernel that can run a layer, instead of the one that would be chosen.
        world: Tensor-parallel ranks whose slices are checked, one after the other; 1 for whole layers.
        expert_parallel: Whether each rank has whole experts.

    Attributes:
        refused: Kernels that refused a layer's values when they packed it, with all_kernels: (layer, kernel, reason).

    Raises:
        CheckpointError, InputError: As `RankSlices`, where world is above 1.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, policy_of: Callable[[LayerRecord], Policy],
        batch_sizes: tuple[int, ...], *, all_kernels: bool = False, world: int = 1,
        expert_parallel: bool = False,
    ) -> None:  # fmt: skip
        self.checkpoint, self.device, self.dtype, self.policy_of = checkpoint, device, dtype, policy_of
        self.batch_sizes, self.all_kernels = batch_sizes, all_kernels
        self.ranks = RankSlices(checkpoint, dtype, world, expert_parallel=expert_parallel) if world > 1 else None
        self.refused: list[tuple[str, str, str]] = []

    def checks(self, record: LayerRecord) -> Iterator[LayerCheck]:
        """The checks of a layer: of each rank, of each kernel, at each M. What cannot be read is one check with the reason."""
        try:
            part = None
            for part in () if self.ranks is None else self.ranks.slices(record):
                yield from self._of_slice(record, part)
            if part is None:  # one rank, or a layer that the model leaves out
                yield from self._of_weight(record, record.weight(), None)
        except BitlineError as error:
            yield fault_of(record.name, "", str(error))

    def _of_slice(self, record: LayerRecord, part: RankSlice) -> Iterator[LayerCheck]:
        if part.fault:
            yield fault_of(record.name, "", part.fault, part.rank)
        elif not part.is_shared or part.rank == 0:
            yield from self._of_weight(record, part.weight, part.rank)

    def _of_weight(self, record: LayerRecord, weight: QuantizedWeight, rank: int | None) -> Iterator[LayerCheck]:
        weight, policy = weight.with_act_dtype(self.dtype), self.policy_of(record)
        for name in self._kernels(weight, policy):
            wanted = policy if name is None else replace(policy, kernel=name, backend="auto", strict=True)
            try:
                layer = QuantLinear(weight, device=self.device, policy=wanted)
            except BitlineError as error:
                if name is None:
                    raise
                self.refused.append((record.name, name, str(error)))
                continue
            for check in self._outputs(layer, weight, record.name):
                yield replace(check, rank=rank)

    def _outputs(self, layer: QuantLinear, weight: QuantizedWeight, name: str) -> Iterator[LayerCheck]:
        try:
            yield from check_layer(layer, weight, name, self.batch_sizes, every_row=True)
        except Exception as error:  # of a kernel: of torch, Triton or another package
            yield fault_of(name, layer.choice.best.name, summary_of(error))

    def _kernels(self, weight: QuantizedWeight, policy: Policy) -> list[str | None]:
        """Names of the kernels to check; None for the one that the policy chooses."""
        if not self.all_kernels:
            return [None]
        choice = choose(weight.spec, Platform.detect(self.device), policy)
        return [candidate.name for candidate in choice.candidates if candidate.verdict]
