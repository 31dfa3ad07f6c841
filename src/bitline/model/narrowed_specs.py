"""The spec of some rows or columns of a layer, computed without its data."""

from __future__ import annotations

from typing import Literal

import torch

from bitline import bitstream
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


def narrowed_spec(spec: LinearSpec, dim: Literal[0, 1], start: int, stop: int) -> LinearSpec:
    """The spec of `QuantizedWeight.narrow`.

    Which groups the columns of an act-order weight belong to depends on its g_idx: they are assumed to be of unequal sizes
    (ragged) unless there is only one.
    """
    if not spec.act_order and not spec.ragged:
        return meta_weight(spec).narrow(dim, start, stop).spec
    part = narrowed_spec(spec.replace(act_order=False, ragged=False), dim, start, stop)
    if dim == 0:
        return part.replace(act_order=spec.act_order, ragged=spec.ragged)
    ragged = spec.ragged or spec.grid[1] > 1
    block = (part.block[0], min(spec.block[1], part.k))
    return part.replace(act_order=spec.act_order, ragged=ragged, block=block, block_offset=(0, 0))


def meta_weight(spec: LinearSpec) -> QuantizedWeight:
    """A weight of this spec on the meta device, to be cut as one with data is."""

    def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    grid2 = None if spec.scale2_block is None else spec.replace(block=spec.scale2_block, block_offset=(0, 0)).grid
    static = spec.act is not None and not spec.act.dynamic
    return QuantizedWeight(
        spec, make((spec.n, bitstream.row_bytes(spec.k, spec.weight.bits)), torch.uint8), make(spec.grid, spec.scale_dtype),
        zero=make(spec.grid, torch.uint8) if spec.zero == "int" else None,
        offset=make(spec.grid, spec.scale_dtype) if spec.zero == "float" else None,
        scale2=None if grid2 is None else make(grid2),
        input_scale=make(()) if static else None,
        input_multiplier=make((spec.k,)) if spec.input_multiplier else None,
        bias=make((spec.n,)) if spec.bias else None,
    )  # fmt: skip
