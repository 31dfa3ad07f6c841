"""What ranks exchange for one token, as the layers of `parallel.layers` do it: counts and bytes, without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bitline.parallel.group import ONE_SHOT_BYTES
from bitline.types import ActSpec


@dataclass(frozen=True)
class Exchange:
    """Collective operations of one module for one token.

    Attributes:
        what: "sum" of partial outputs, "embedding" row of the rank that has it, "gather" of outputs, "scales" of activations.
        module: The module's name.
        count: Collective operations.
        nbytes: Bytes that each rank gets from all others.
    """

    what: str
    module: str
    count: int
    nbytes: int


def of_sum(what: str, module: str, size: int, dtype: torch.dtype, world: int) -> Exchange:
    """`TensorParallel.sum` of [1, size]."""
    nbytes = size * dtype.itemsize
    if nbytes <= ONE_SHOT_BYTES:
        return Exchange(what, module, 1, (world - 1) * nbytes)
    part = -(-size // world) * dtype.itemsize  # each rank sums one part and gets the others'
    return Exchange(what, module, 2, 2 * (world - 1) * part)


def of_concatenation(what: str, module: str, sizes: Sequence[int], dtype: torch.dtype, calls: int = 1) -> Exchange:
    """`TensorParallel.concatenate` of [1, sizes[rank]], padded to the widest."""
    return Exchange(what, module, calls, calls * (len(sizes) - 1) * max(sizes) * dtype.itemsize)


def of_scales(module: str, act: ActSpec, parts: Sequence[int], dtype: torch.dtype, calls: int = 1) -> Exchange:
    """`SharedScales` for a row: the extremes of its parts, or the row itself where scales are of groups."""
    if act.granularity == "group":
        return of_concatenation("scales", module, parts, dtype, calls)
    return Exchange("scales", module, calls, calls * (len(parts) - 1) * 2 * torch.float32.itemsize)
