"""A rank's part of a layer, from its canonical weight or from the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bitline.formats.base import LayerRecord
from bitline.model.merge_weights import merge_key, merge_weights
from bitline.parallel.cuts import Cut
from bitline.weight import QuantizedWeight


def cut_weight(weight: QuantizedWeight, cut: Cut) -> QuantizedWeight:
    """A rank's part of a canonical weight, its bias whole where columns are cut."""
    return _joined([weight.narrow(cut.dim, start, stop) for start, stop in cut.ranges], cut, lambda: weight)


def read_cut(record: LayerRecord, cut: Cut, order: Tensor | None = None) -> QuantizedWeight:
    """A rank's part of a layer, the same as `cut_weight` of the whole layer, of which only units that the part touches are read.

    order: the row in the file of each row, int64 [N]; None where they are the same.
    """
    if cut.dim == 1:
        (columns,) = cut.ranges
        return in_order(record.weight(columns=columns), order)
    parts = [_read_rows(record, start, stop, order) for start, stop in cut.ranges]
    return _joined(parts, cut, lambda: in_order(record.weight(), order))


def in_order(weight: QuantizedWeight, order: Tensor | None) -> QuantizedWeight:
    """A weight with its rows in this order; None for its own."""
    return weight if order is None else weight.take_rows(order)


def _read_rows(record: LayerRecord, start: int, stop: int, order: Tensor | None) -> QuantizedWeight:
    """Rows [start, stop) in an order."""
    if order is None:
        return record.weight(rows=(start, stop))
    rows = order[start:stop]
    first, last = int(rows.min()), int(rows.max()) + 1
    part, own = record.weight(rows=(first, last)), rows - first
    return part if torch.equal(own, torch.arange(last - first)) else part.take_rows(own)


def _joined(parts: Sequence[QuantizedWeight], cut: Cut, whole: Callable[[], QuantizedWeight]) -> QuantizedWeight:
    """The parts as one weight; where they cannot be merged, rows of the whole one."""
    if len(parts) == 1:
        return parts[0]
    return merged(parts) or whole().take_rows(torch.cat([torch.arange(start, stop) for start, stop in cut.ranges]))


def merged(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The weights one above the other; None where they cannot be one weight."""
    keys = {merge_key(part.spec) for part in parts}
    return merge_weights(parts) if len(keys) == 1 and None not in keys else None
