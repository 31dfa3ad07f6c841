"""This rank's part of a layer's whole matrices: rows of fused layers, shared key and value heads, columns; then merged again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bitline.engines.model_weights import ModelWeights
from bitline.errors import CheckpointError
from bitline.model.merge_weights import merge_key, merge_weights
from bitline.weight import QuantizedWeight

Part = QuantizedWeight | Tensor  # a matrix [N, K], quantized or not


@dataclass(frozen=True)
class Band:
    """Rows of a layer that ranks cut together: one query, key or value layer, one of the merged ones, or the whole layer.

    whole: rows in the checkpoint. own: rows on this rank. rank, size: of the group of ranks that cuts it.
    """

    whole: int
    own: int
    rank: int
    size: int

    def start(self, name: str) -> int:
        """This rank's first row. Ranks share rows where there are fewer parts than ranks (key and value heads).

        A CheckpointError names the layer where the rows cannot be cut so.
        """
        if self.own <= 0 or self.whole % self.own or self.size % (self.whole // self.own):
            raise CheckpointError("rows cannot be split over the ranks", tensor=name, found=f"{self.whole} rows",
                                  expected=f"{self.own} on each of {self.size} ranks")  # fmt: skip
        return self.rank * (self.whole // self.own) // self.size * self.own


def bands(wholes: Iterable[tuple[str, Part]], widths: Sequence[int], weights: ModelWeights) -> Iterator[Part]:
    """The whole matrices of a layer's bands, one by one, also where the checkpoint stores several as one.

    wholes: (name, matrix) of the layers that the checkpoint has. widths: rows of each band. A
    CheckpointError names a layer whose rows are not those of one or several bands.
    """
    at = 0
    for name, whole in wholes:
        n, start = whole.shape[0], 0
        while start < n and at < len(widths) and start + widths[at] <= n:
            yield narrow(whole, 0, start, start + widths[at])
            start, at = start + widths[at], at + 1
        if start != n:
            raise misfit(weights, name, f"{n} rows", f"the widths {list(widths)} of the model's layer")
    if at != len(widths):
        raise misfit(weights, name, f"{at} of {len(widths)} parts", f"the widths {list(widths)} of the model's layer")


def columns(part: Part, own: int, rank: int, size: int, name: str, weights: ModelWeights) -> Part:
    """This rank's columns of a row-parallel layer; all of them where the layer is not cut along its input."""
    k = part.shape[1]
    if k == own:
        return part
    if k != own * size:
        raise misfit(weights, name, f"K={k}", f"K={own * size}")
    return narrow(part, 1, own * rank, own * (rank + 1))


def narrow(part: Part, dim: Literal[0, 1], start: int, stop: int) -> Part:
    """Rows or columns start..stop of a matrix; itself where these are all."""
    if (start, stop) == (0, part.shape[dim]):
        return part
    return part.narrow(dim, start, stop - start) if isinstance(part, Tensor) else part.narrow(dim, start, stop)


def merged(parts: Sequence[Part], dtype: torch.dtype) -> list[Part]:
    """Neighbours of one scheme as one weight, so that a layer is as few calls as possible. dtype: of the layer's input."""
    typed = [part if isinstance(part, Tensor) else part.with_act_dtype(dtype) for part in parts]
    out: list[Part] = []
    for key, group in itertools.groupby(typed, lambda p: None if isinstance(p, Tensor) else merge_key(p.spec)):
        members = list(group)
        quantized = [p for p in members if isinstance(p, QuantizedWeight)]
        both = merge_weights(quantized) if key is not None and len(quantized) > 1 else None
        out += members if both is None else [both]
    return out


def misfit(weights: ModelWeights, name: str, found: str, expected: str) -> CheckpointError:
    """A layer that has another shape in the checkpoint than in the engine's model."""
    engine = weights.engine.name
    return CheckpointError(
        f"a quantized layer does not fit {engine}'s model", file=weights.path, tensor=name, found=found, expected=expected,
        fix=f"the checkpoint belongs to another model, or {engine} builds it in another way",
    )  # fmt: skip
