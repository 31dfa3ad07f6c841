"""Act-order (GPTQ's desc_act): from a g_idx, the scale group of each input column, to columns sorted by group.

The canonical weight stores columns sorted by group: `perm` maps a stored column to its input column, and `group_index`
gives the group of each stored column where groups are not all as wide as the scale block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_group(g_idx: Tensor, block_k: int) -> tuple[Tensor | None, Tensor | None]:
    """Group numbers [K], all in range, to (perm, group_index), each int32 [K], or None where it is the identity or regular.

    block_k: columns of a scale block. The sort is stable, so columns keep their order within a group.
    """
    columns = torch.arange(g_idx.numel())
    regular_groups = columns // block_k
    if torch.equal(g_idx.long(), regular_groups):  # columns in input order, which needs no sort
        return None, None
    ordered, perm = g_idx.long().sort(stable=True)
    identity, regular = torch.equal(perm, columns), torch.equal(ordered, regular_groups)
    return None if identity else perm.int(), None if regular else ordered.int()


def gptq_order(g_idx: Tensor, block_k: int, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """A GPTQ g_idx, int32 or int64 [K], to (perm, group_index) of `sort_by_group`.

    Negative entries count from the last group, as GPTQModel reads them. ValueError where a group number is out of range.
    """
    index = torch.where(g_idx < 0, g_idx.long() + groups, g_idx.long())
    if int(index.min()) < 0 or int(index.max()) >= groups:
        at = int(((index < 0) | (index >= groups)).nonzero()[0])
        raise ValueError(f"group {int(g_idx[at])} at column {at}")
    return sort_by_group(index, block_k)
