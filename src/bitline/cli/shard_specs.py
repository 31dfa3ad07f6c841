"""The specs of a layer's tensor-parallel shards, computed without its data."""

from __future__ import annotations

from bitline.errors import InputError
from bitline.model.narrowed_specs import narrowed_spec
from bitline.types import LinearSpec


def shard_specs(spec: LinearSpec, tp: int) -> dict[str, list[LinearSpec]]:
    """Each rank's spec when a layer is sharded over `tp` ranks: "N" column parallel, "K" row parallel; "" for one rank.

    More ranks than rows or columns is an InputError.
    """
    if tp == 1:
        return {"": [spec]}
    if tp > min(spec.n, spec.k):
        raise InputError("more ranks than rows or columns", found=f"--tp {tp}", expected=f"at most {min(spec.n, spec.k)}")
    by_rows = [narrowed_spec(spec, 0, spec.n * r // tp, spec.n * (r + 1) // tp) for r in range(tp)]
    by_columns = [narrowed_spec(spec, 1, spec.k * r // tp, spec.k * (r + 1) // tp) for r in range(tp)]
    return {"N": by_rows, "K": [s.replace(bias=spec.bias and r == 0) for r, s in enumerate(by_columns)]}
