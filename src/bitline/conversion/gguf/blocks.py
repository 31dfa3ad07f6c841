"""Canonical weights as GGUF blocks of 32: the inverse of formats/gguf/blocks.py."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.conversion.base import NotExact
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

# Block types that are written: (weight type, has offsets) to their name, the number ggml gives them and bytes of a block.
KINDS: dict[tuple[str, bool], tuple[str, int, int]] = {
    ("uint4b8", False): ("Q4_0", 2, 18), ("uint4", True): ("Q4_1", 3, 20), ("uint5b16", False): ("Q5_0", 6, 22),
    ("uint5", True): ("Q5_1", 7, 24), ("int8", False): ("Q8_0", 8, 34),
}  # fmt: skip
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0 = (types.SCALAR_TYPES[name] for name, _ in KINDS)


def kind_of(form: LinearSpec) -> tuple[str, int, int]:
    """Name, number and bytes of the block type of a form."""
    return KINDS[form.weight.name, form.zero == "float"]


def forms(spec: LinearSpec) -> list[LinearSpec]:
    """The block types that may hold a weight, the smallest first.

    GGUF has no integer zero points. A code less its zero point is an integer of one bit more, so that a type with more bits
    holds it with the same scale; which is the smallest depends on the codes.
    """
    width, offsets = spec.weight.bits, spec.zero == "float"
    if spec.zero == "none":
        found = [_Q4_0 if width <= 4 else _Q5_0 if width == 5 else _Q8_0]
    elif offsets:
        found = [_Q4_1 if width <= 4 else _Q5_1 if width == 5 else _Q8_0]
    else:
        found = [t for t in (_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0) if width <= t.bits or (t is _Q4_0 and width <= 3)] or [_Q8_0]
    if spec.block[1] % 32 and spec.block[1] < spec.k:
        raise NotExact(f"gguf has one scale for 32 columns, and these groups are of {spec.block[1]}")
    if spec.k % 32:
        raise NotExact(f"gguf rows are made of blocks of 32 columns, and the weight has {spec.k}")
    return [
        spec.replace(weight=t, block=(1, 32), zero="float" if t in (_Q4_1, _Q5_1) else "none", scale2_block=None,
                     scale_dtype=torch.float16, act=None)
        for t in found
    ]  # fmt: skip


def to_blocks(weight: QuantizedWeight) -> Tensor:
    """Rows of GGUF blocks, uint8 [N, K / 32 * bytes of a block], of a weight in one of `forms`."""
    s = weight.spec
    name, _, nbytes = kind_of(s)
    n, blocks = s.n, s.k // 32
    out = torch.empty(n, blocks, nbytes, dtype=torch.uint8)
    at = 0
    for part in (weight.scale, weight.offset):
        if part is not None:
            out[..., at : at + 2] = part.contiguous().view(torch.uint8).view(n, blocks, 2)
            at += 2
    step = bitstream.rows_per_chunk(s.k)
    for r in range(0, n, step):
        codes = weight.codes[r : r + step].contiguous()
        rows = codes.shape[0]
        if name == "Q8_0":
            out[r : r + step, :, at:] = codes.view(rows, blocks, 32)
        elif s.weight.bits == 4:
            out[r : r + step, :, at:] = _halves(codes.view(rows, blocks, 16))
        else:
            raw = bitstream.unpack(codes, 5, s.k).reshape(rows, blocks, 32)
            out[r : r + step, :, at : at + 4] = bitstream.pack((raw >> 4).reshape(-1, 32), 1).view(rows, blocks, 4)
            out[r : r + step, :, at + 4 :] = (raw[..., :16] & 15) | (raw[..., 16:] << 4)
    return out.view(n, -1)


def _halves(pairs: Tensor) -> Tensor:
    """uint8 [..., 16], codes 2j and 2j + 1 in byte j, to codes j and j + 16 in byte j."""
    first, second = pairs[..., :8], pairs[..., 8:]
    even = (first & 15) | (second << 4)
    odd = (first >> 4) | (second & 0xF0)
    return torch.stack((even, odd), -1).flatten(-2)
