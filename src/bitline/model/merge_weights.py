"""Layers with one input as one layer: their canonical weights, one above the other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

_SHARED = ("perm", "input_scale", "input_zero", "input_multiplier")  # one for the whole layer


def merge_key(spec: LinearSpec) -> Hashable:
    """What layers that can be merged have in common; None for one that cannot be merged at all."""
    if spec.ragged or spec.block_offset != (0, 0):
        return None
    return (
        spec.k, spec.weight, _rows(spec, spec.block), spec.block[1], spec.scale_dtype, spec.zero, _second_level(spec),
        spec.act_order, spec.act, spec.act_dtype, spec.bias, spec.input_multiplier,
    )  # fmt: skip


def merge_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The weights, all with one `merge_key`, as one of the sum of their rows; None where values that it has once differ.

    Every row keeps its codes and scales. Weights with a scale per tensor share one where theirs are equal, else each row gets its
    weight's.
    """
    specs = [w.spec for w in weights]
    if any(not _all_equal([getattr(w, name) for w in weights]) for name in _SHARED):
        return None
    fields = ("scale", "zero", "offset")
    bn = _row_block(specs)
    if bn == 0:
        return None
    one = specs[0]
    per_tensor = _rows(one, one.block) == "all"
    if per_tensor and all(_all_equal([getattr(w, name) for w in weights]) for name in fields):
        n = sum(s.n for s in specs)
        block, tensors = (n, one.block[1]), {name: getattr(weights[0], name) for name in fields}
    else:
        block = (1 if per_tensor else bn, one.block[1])
        tensors = {name: _stacked([getattr(w, name) for w in weights], specs if per_tensor else None) for name in fields}
    second = _merged_second_level(weights)
    if second is None:
        return None
    scale2_block, second_tensors = second
    spec = one.replace(n=sum(s.n for s in specs), block=block, scale2_block=scale2_block)
    shared = {name: getattr(weights[0], name) for name in _SHARED}
    named: dict[str, Any] = {**tensors, **second_tensors, **shared, "bias": _stacked([w.bias for w in weights])}
    origin = " + ".join(w.origin for w in weights if w.origin)
    return QuantizedWeight(spec, torch.cat([w.codes for w in weights]), **named, origin=origin)


def merged_spec(specs: Sequence[LinearSpec]) -> LinearSpec | None:
    """The spec of weights, all with one `merge_key`, whose values allow it; None where blocks would have rows of two weights.

    Global scales are taken to be equal, scales per tensor to differ.
    """
    one, n, bn, second = specs[0], sum(s.n for s in specs), _row_block(specs), specs[0].scale2_block
    if bn == 0 or (second is not None and _rows(one, second) != "all" and any(s.n % second[0] for s in specs[:-1])):
        return None
    if second is not None and _rows(one, second) == "all":
        second = (n, second[1])
    return one.replace(n=n, block=(1 if _rows(one, one.block) == "all" else bn, one.block[1]), scale2_block=second)


def _rows(spec: LinearSpec, block: tuple[int, int]) -> int | str:
    """Rows that share a scale; "all" for one scale per tensor, whatever its size."""
    return "all" if block == (spec.n, spec.k) and spec.n > 1 else block[0]


def _row_block(specs: Sequence[LinearSpec]) -> int:
    """Rows of a scale block of the merged weight; 0 where a block would have rows of two weights."""
    bn = specs[0].block[0]
    if _rows(specs[0], specs[0].block) == "all" or all(s.n % bn == 0 for s in specs[:-1]):
        return bn
    return 0


def _second_level(spec: LinearSpec) -> Hashable:
    block = spec.scale2_block
    return None if block is None else (_rows(spec, block), "all" if block[1] == spec.k else block[1])


def _merged_second_level(weights: Sequence[QuantizedWeight]) -> tuple[tuple[int, int] | None, dict[str, Tensor | None]] | None:
    """scale2_block, scale2 and offset2 of the merged weight; None where global scales differ, or a block has rows of two."""
    specs, names = [w.spec for w in weights], ("scale2", "offset2")
    block = specs[0].scale2_block
    if block is None:
        return None, dict.fromkeys(names)
    if _rows(specs[0], block) == "all":
        if not all(_all_equal([getattr(w, name) for w in weights]) for name in names):
            return None
        return (sum(s.n for s in specs), block[1]), {name: getattr(weights[0], name) for name in names}
    if any(s.n % block[0] for s in specs[:-1]):
        return None
    return block, {name: _stacked([getattr(w, name) for w in weights]) for name in names}


def _all_equal(tensors: Sequence[Tensor | None]) -> bool:
    first = tensors[0]
    if first is None:
        return all(t is None for t in tensors)
    return all(t is not None and t.shape == first.shape and bool((_bytes(t) == _bytes(first)).all()) for t in tensors[1:])


def _stacked(tensors: Sequence[Tensor | None], repeats: Sequence[LinearSpec] | None = None) -> Tensor | None:
    """The tensors one above the other, each row for all rows of its weight where `repeats` gives those."""
    present = [t for t in tensors if t is not None]
    if len(present) < len(tensors):
        return None
    dtype, rows = present[0].dtype, [_bytes(t) if t.dtype.itemsize == 1 else t for t in present]
    if repeats is not None:
        rows = [t.expand(s.n, -1) for t, s in zip(rows, repeats, strict=True)]
    return torch.cat(rows).view(dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor, as bytes where torch has few operators for its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
