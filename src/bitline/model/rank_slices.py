"""The slices of a checkpoint's layers that tensor-parallel ranks pack, one rank after the other in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.errors import InputError
from bitline.expert_gate import recognize
from bitline.formats.base import LayerRecord
from bitline.model.expert_names import DOWN_NAME, ExpertPlace
from bitline.model.meta_model import check_config_sizes, make_config, make_meta_model
from bitline.model.tensor_parallel import ParallelPlan
from bitline.model.weight_loader import WeightLoader
from bitline.parallel.cuts import Cut, ExpertRange, expert_range
from bitline.weight import QuantizedWeight


@dataclass(frozen=True)
class OneRank:
    """A rank without a process group: what `ParallelPlan` asks of one to plan cuts. It exchanges nothing.

    experts: this rank's, where an engine places them.
    """

    rank: int
    world: int
    exact_activation_scales: bool = True
    expert_parallel: bool = False
    experts: ExpertRange | None = None

    def expert_range(self, total: int) -> ExpertRange:
        """This rank's experts of a module of so many; an InputError for more ranks than experts, or an engine's other total."""
        if self.experts is None:
            return expert_range(total, self.rank, self.world)
        if self.experts.total != total:
            raise InputError("the engine's model has another number of experts", found=self.experts.total, expected=total)
        return self.experts


@dataclass(frozen=True)
class RankSlice:
    """What a rank packs of a layer.

    Attributes:
        rank: The rank.
        weight: Its canonical weight.
        cut: Of the layer; None where it is whole.
        fault: How its values differ from those of the whole layer; "" for not at all.
        is_shared: Whether every rank has the whole layer.
    """

    rank: int
    weight: QuantizedWeight
    cut: Cut | None
    fault: str = ""
    is_shared: bool = False


class RankSlices:
    """Cuts the layers of a checkpoint as `load_model(tp=…)` does on each of `world` ranks.

    The model is built on the meta device; layers are read one by one. expert_parallel: whether each rank has whole experts.

    Raises:
        CheckpointError: Where the checkpoint is not of a model that transformers has.
        InputError: For a model that cannot be cut over so many ranks, or no part of it.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, world: int, *, expert_parallel: bool = False) -> None:
        check_config_sizes(checkpoint)
        model = make_meta_model(make_config(checkpoint), dtype, checkpoint)
        self.model = model
        self.loaders = []
        for rank in range(world):
            group: Any = OneRank(rank, world, expert_parallel=expert_parallel)
            loader = WeightLoader(model, checkpoint, lambda _name: torch.device("cpu"), dtype, None, None, tp=group)
            loader.plan_cuts(checkpoint.layers())
            self.loaders.append(loader)
        if not any(_divides(loader.parallel) for loader in self.loaders):
            raise InputError("tensor parallelism cuts no layer of this model", found=type(model).__name__,
                             expected="attention or MLPs with known projections", fix="leave out --tp")  # fmt: skip

    def slices(self, record: LayerRecord) -> Iterator[RankSlice]:
        """The layer's slice on each rank that has one; none where the model has no module for it."""
        place = self.loaders[0].names.expert_place(record.name, layer=True)
        if place is not None and (owner := self._owner(place)) is not None:
            yield RankSlice(owner, record.weight(), None)
            return
        target = None if place is not None else self.loaders[0]._target(record)
        if place is None and target is None:
            return
        whole = record.weight() if place is not None else self.loaders[0].names.permute_rows(record.name, record.weight())
        values = whole.dequantize(torch.float32)
        for rank, loader in enumerate(self.loaders):
            plan, cut = loader.parallel, None
            assert plan is not None
            if place is not None:
                down = place.parameter == DOWN_NAME
                gate = recognize(self.model.get_submodule(place.module))
                interleaved = gate is not None and gate[1] and place.parts == 1 and not down
                weight = plan.read_expert(place.module, record, down=down, interleaved=interleaved)
                cut = plan.expert_cut(place.module, record.spec.n, down=down, interleaved=interleaved)
            else:
                assert target is not None
                weight = loader._read(target, record)
                cut = plan.cuts.get(target)
            yield RankSlice(rank, weight, cut, "" if cut is None else difference(weight, values, cut), cut is None)

    def _owner(self, place: ExpertPlace) -> int | None:
        """The only rank that has an expert; None where ranks have a part of each."""
        for rank, loader in enumerate(self.loaders):
            own = loader.parallel.whole_experts.get(place.module) if loader.parallel is not None else None
            if own is not None and place.expert in own.numbers():
                return rank
        return None


def _divides(plan: ParallelPlan | None) -> bool:
    """Whether ranks have different parts of something."""
    return plan is not None and bool(plan.cuts or plan.experts or plan.whole_experts)


def difference(part: QuantizedWeight, whole: Tensor, cut: Cut) -> str:
    """How a rank's weight differs from its rows or columns of the whole one, dequantized [N, K]; "" where they are the same."""
    expected = torch.cat([whole.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges], cut.dim)
    found = part.dequantize(torch.float32)
    what = f"{'rows' if cut.dim == 0 else 'columns'} {', '.join(f'{a}..{b}' for a, b in cut.ranges)}"
    if found.shape != expected.shape:
        return f"the slice of {what} is {list(found.shape)}, not {list(expected.shape)}"
    if not torch.equal(found, expected) and (wrong := _different(found, expected)).any():
        row, column = (int(i) for i in wrong.nonzero()[0])
        count = f"{int(wrong.sum())} of {wrong.numel()} weights"
        values = f"{float(found[row, column])!r}, not {float(expected[row, column])!r}"
        return f"the slice of {what} differs from the whole layer in {count}, the first at [{row}, {column}]: {values}"
    return ""


def _different(a: Tensor, b: Tensor) -> Tensor:
    """Where float32 values differ, NaN being equal to itself and 0 to -0."""
    return (a != b) & ~(a.isnan() & b.isnan())
