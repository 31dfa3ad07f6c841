"""Slices of a canonical weight: rows, input columns, and any tensor-parallel shard. Pure functions of a spec and its tensors.

Each takes a LinearSpec and the fields of a QuantizedWeight by name, and returns the slice's spec with the fields that differ.
Tensors are views wherever a slice can be one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from bitline import bitstream
from bitline.dequant import apply_second_level, column_groups, index_select
from bitline.errors import WeightError
from bitline.types import LinearSpec

Fields = Mapping[str, Tensor | None]
Slice = tuple[LinearSpec, dict[str, Any]]


def narrow_rows(spec: LinearSpec, fields: Fields, start: int, stop: int) -> Slice:
    """Rows [start, stop) of N."""
    codes, bias = fields["codes"], fields["bias"]
    assert codes is not None
    block_offset = ((start + spec.block_offset[0]) % spec.block[0], spec.block_offset[1])
    spec_changes, changes = _narrow_scales(spec, fields, 0, start, stop)
    changes |= {"codes": codes[start:stop], "bias": None if bias is None else bias[start:stop]}
    return spec.replace(n=stop - start, block=spec.block, block_offset=block_offset, **spec_changes), changes


def narrow_columns(spec: LinearSpec, fields: Fields, start: int, stop: int) -> Slice:
    """Input columns [start, stop) of K."""
    if fields["perm"] is not None or fields["group_index"] is not None:
        return narrow_permuted(spec, fields, start, stop)
    codes, bits = fields["codes"], spec.weight.bits
    assert codes is not None
    block_offset = (spec.block_offset[0], (start + spec.block_offset[1]) % spec.block[1])
    spec_changes, changes = _narrow_scales(spec, fields, 1, start, stop)
    changes["codes"] = bitstream.narrow(codes, bits, start, stop)[:, : bitstream.row_bytes(stop - start, bits)]
    changes["input_multiplier"] = _slice(fields["input_multiplier"], start, stop)
    return spec.replace(k=stop - start, block=spec.block, block_offset=block_offset, **spec_changes), changes


def _narrow_scales(
    spec: LinearSpec, fields: Fields, dim: Literal[0, 1], start: int, stop: int
) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Changes of the spec, and the scales, zero points and offsets, of both levels, of the blocks that [start, stop) touches."""
    first = (start + spec.block_offset[dim]) // spec.block[dim]
    last = (stop - 1 + spec.block_offset[dim]) // spec.block[dim]
    touched = lambda t: None if t is None else t.narrow(dim, first, last - first + 1)
    changes = {name: touched(fields[name]) for name in ("scale", "zero", "offset")}
    scale, offset, scale2 = fields["scale"], fields["offset"], fields["scale2"]
    if scale2 is None or spec.scale2_block is None:
        return {}, changes
    second_level = _narrow_second_level(spec, fields, dim, start, stop)
    if second_level is None:  # multiplied out in float32, as `dequantize` does
        assert scale is not None
        changes["scale"] = touched(apply_second_level(spec, scale, scale2))
        changes["offset"] = None if offset is None else touched(apply_second_level(spec, offset, fields["offset2"]))
        changes["scale2"] = changes["offset2"] = None
        return {"scale2_block": None, "scale_dtype": torch.float32}, changes
    size, tensors = second_level
    block = (size, spec.scale2_block[1]) if dim == 0 else (spec.scale2_block[0], size)
    return {"scale2_block": block}, changes | tensors


def _narrow_second_level(
    spec: LinearSpec, fields: Fields, dim: Literal[0, 1], start: int, stop: int
) -> tuple[int, dict[str, Tensor]] | None:
    """The size along `dim` of the slice's super-blocks, and its scale2 and offset2.

    A super-block that `start` cuts is split into smaller equal ones, with its scale repeated. None where those would not consist
    of whole scale blocks.
    """
    assert spec.scale2_block is not None
    size = spec.scale2_block[dim]
    if size >= (spec.n, spec.k)[dim]:  # one super-block along dim, which serves every slice
        return stop - start, {}
    if start // size == (stop - 1) // size:  # within one super-block
        touched = {name: fields[name] for name in ("scale2", "offset2")}
        return stop - start, {name: t.narrow(dim, start // size, 1) for name, t in touched.items() if t is not None}
    split = math.gcd(size, start)
    if split % spec.block[dim]:
        return None
    scale2 = fields["scale2"]
    assert scale2 is not None
    source = torch.arange(start // split, -(-stop // split), device=scale2.device) // (size // split)
    tensors = {}
    for name in ("scale2", "offset2"):
        tensor = fields[name]
        if tensor is not None and split == size:
            tensors[name] = tensor.narrow(dim, start // split, len(source))
        elif tensor is not None:
            tensors[name] = tensor.index_select(dim, source)
    return min(split, stop - start), tensors


def narrow_permuted(spec: LinearSpec, fields: Fields, start: int, stop: int, own_codes: Tensor | None = None) -> Slice:
    """Input columns [start, stop) of an act-order or ragged weight.

    The kept columns stay in stored order, so groups lose columns, and groups without any are dropped. Two levels of scales are
    multiplied out in float32. own_codes: the codes of these columns alone, in input order, in the place of the whole weight's.
    """
    codes, scale, offset, scale2 = fields["codes"], fields["scale"], fields["offset"], fields["scale2"]
    assert codes is not None
    assert scale is not None
    device, bits = codes.device, spec.weight.bits
    perm = torch.arange(spec.k, device=device) if (stored := fields["perm"]) is None else stored.long()
    kept = ((perm >= start) & (perm < stop)).nonzero().squeeze(1)
    groups = column_groups(spec, fields["group_index"], device).index_select(0, kept)
    used, group_index, sizes = groups.unique_consecutive(return_inverse=True, return_counts=True)
    bk, missing, ragged = _regular_groups(sizes.tolist(), spec.block[1])
    new_perm = perm.index_select(0, kept) - start
    in_order = torch.equal(new_perm, torch.arange(stop - start, device=device))
    if scale2 is not None:
        scale = apply_second_level(spec, scale, scale2)
        offset = None if offset is None else apply_second_level(spec, offset, fields["offset2"])
    select = lambda t: None if t is None else index_select(t, 1, used)
    return spec.replace(
        k=stop - start, block=(spec.block[0], bk), block_offset=(spec.block_offset[0], missing), ragged=ragged,
        act_order=not in_order, scale_dtype=scale.dtype, scale2_block=None,
    ), {
        "codes": bitstream.take(codes, bits, spec.k, kept) if own_codes is None
        else bitstream.take(own_codes, bits, stop - start, new_perm),
        "scale": select(scale), "zero": select(fields["zero"]), "offset": select(offset), "scale2": None, "offset2": None,
        "perm": None if in_order else new_perm.int(), "group_index": group_index.int() if ragged else None,
        "input_multiplier": _slice(fields["input_multiplier"], start, stop),
    }  # fmt: skip


def _regular_groups(sizes: list[int], block: int) -> tuple[int, int, bool]:
    """(bk, columns missing in the first group, ragged) for groups of these sizes.

    Groups are regular where all but the first and last have `block` columns, or where there is one.
    """
    if len(sizes) == 1:
        return sizes[0], 0, False
    if max(sizes) <= block and all(size == block for size in sizes[1:-1]):
        return block, block - sizes[0], False
    return min(block, sum(sizes)), 0, True


def take_rows(spec: LinearSpec, fields: Fields, index: Tensor) -> Slice:
    """Rows `index`, int64 [n], in any order. A WeightError where rows share scales or an index is out of range."""
    scale2_block = spec.scale2_block
    if 1 != spec.block[0] < spec.n or (scale2_block is not None and 1 != scale2_block[0] < spec.n):
        raise WeightError("cannot reorder rows that share scales", found=spec.scheme, expected="scales per row")
    if index.dim() != 1 or index.numel() == 0 or int(index.min()) < 0 or int(index.max()) >= spec.n:
        found = f"shape {list(index.shape)}"
        raise WeightError("row indices out of range", found=found, expected=f"1-D, 0..{spec.n - 1}")
    n = index.numel()
    per_row = ["codes", "bias"]
    if spec.block[0] == 1:
        per_row += ["scale", "zero", "offset"]
    if scale2_block is not None and scale2_block[0] == 1:
        per_row += ["scale2", "offset2"]
    changes: dict[str, Any] = {name: index_select(t, 0, index) for name in per_row if (t := fields[name]) is not None}
    if scale2_block is not None and scale2_block[0] != 1:
        scale2_block = (n, scale2_block[1])
    block = (1 if spec.block[0] == 1 else n, spec.block[1])
    return spec.replace(n=n, block=block, scale2_block=scale2_block), changes


def _slice(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if tensor is None else tensor[start:stop]
