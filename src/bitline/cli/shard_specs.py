"""The specs of a layer's tensor-parallel shards, computed without its data."""

from __future__ import annotations

import torch

from bitline import bitstream
from bitline.errors import InputError
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


def shard_specs(spec: LinearSpec, tp: int) -> dict[str, list[LinearSpec]]:
    """Each rank's spec when a layer is sharded over `tp` ranks: "N" column parallel, "K" row parallel; "" for one rank.

    More ranks than rows or columns is an InputError.
    """
    if tp == 1:
        return {"": [spec]}
    if tp > min(spec.n, spec.k):
        raise InputError("more ranks than rows or columns", found=f"--tp {tp}", expected=f"at most {min(spec.n, spec.k)}")
    if not spec.act_order and not spec.ragged:
        weight, ranks = meta_weight(spec), range(tp)
        return {"N": [weight.shard(0, r, tp).spec for r in ranks], "K": [weight.shard(1, r, tp).spec for r in ranks]}
    # With act-order, which groups a rank's columns belong to depends on g_idx. Group sizes per rank are assumed unequal (ragged)
    # unless there is only one group.
    in_order = shard_specs(spec.replace(act_order=False, ragged=False), tp)
    column_parallel = [s.replace(act_order=spec.act_order, ragged=spec.ragged) for s in in_order["N"]]
    ragged = spec.ragged or spec.grid[1] > 1
    row_parallel = [
        s.replace(act_order=spec.act_order, ragged=ragged, block=(s.block[0], min(spec.block[1], s.k)), block_offset=(0, 0))
        for s in in_order["K"]
    ]
    return {"N": column_parallel, "K": row_parallel}


def meta_weight(spec: LinearSpec) -> QuantizedWeight:
    """A weight of this spec on the meta device, to be sharded as one with data is."""

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
