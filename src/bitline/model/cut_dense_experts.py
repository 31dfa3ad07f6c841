"""Cuts of unquantized experts over tensor-parallel ranks, in the stacked parameters that transformers holds them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitline.model.expert_names import DOWN_NAME, UP_NAMES


def cut_dense_experts(module: Any, at: Sequence[int], rank: int) -> None:
    """Cut the stacked parameters of an experts module to a rank's channels. at: boundaries of all ranks'."""
    start, stop, size = at[rank], at[rank + 1], at[-1]
    transposed, interleaved = getattr(module, "is_transposed", False), not getattr(module, "is_concatenated", True)
    padding = -(stop - start) % 8  # torch's grouped GEMM wants strides of 16 bytes; channels of zeros add nothing
    for leaf, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        is_bias, base = leaf.endswith("_bias"), leaf.removesuffix("_bias")
        if base == DOWN_NAME and is_bias:
            if rank:
                parameter.data.zero_()
            continue
        if base not in (DOWN_NAME, *UP_NAMES):
            continue
        dim = 1 if is_bias else (2 if (base == DOWN_NAME) != transposed else 1)
        rows = parameter.shape[dim]
        if interleaved and rows != size:
            ranges = [(2 * start, 2 * stop)]
        else:
            ranges = [(first + start, first + stop) for first in range(0, rows, size)]
        cut = _padded_ranges(parameter.detach(), dim, ranges, 2 * padding if interleaved and rows != size else padding)
        module._parameters[leaf] = nn.Parameter(cut, requires_grad=False)
    for attribute in ("intermediate_dim", "intermediate_size", "expert_dim"):
        if getattr(module, attribute, None) == size:
            setattr(module, attribute, stop - start + padding)


def _padded_ranges(tensor: Tensor, dim: int, ranges: Sequence[tuple[int, int]], padding: int) -> Tensor:
    """The ranges of a dimension one after the other, each with so many zeros behind it."""
    zeros = tensor.new_zeros([padding if d == dim else size for d, size in enumerate(tensor.shape)])
    return torch.cat([part for a, b in ranges for part in (tensor.narrow(dim, a, b - a), zeros)], dim)
