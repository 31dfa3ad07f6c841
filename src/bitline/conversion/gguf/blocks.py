"""Canonical weights as GGUF blocks of 32: the inverse of formats/gguf/blocks.py, for the legacy types Q4_0 to Q8_0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.conversion.target import NotRepresentable
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


class BlockType(NamedTuple):
    """A GGUF block type. ggml_type: its number in ggml's enum. nbytes: of one block."""

    name: str
    ggml_type: int
    nbytes: int


# By weight type, and whether the block has an offset (ggml's "minimum") after its scale.
BLOCK_TYPES: dict[tuple[str, bool], BlockType] = {
    ("uint4b8", False): BlockType("Q4_0", 2, 18), ("uint4", True): BlockType("Q4_1", 3, 20),
    ("uint5b16", False): BlockType("Q5_0", 6, 22), ("uint5", True): BlockType("Q5_1", 7, 24),
    ("int8", False): BlockType("Q8_0", 8, 34),
}  # fmt: skip
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0 = (types.SCALAR_TYPES[name] for name, _ in BLOCK_TYPES)


def block_type(stored: LinearSpec) -> BlockType:
    """The block type of a stored spec."""
    return BLOCK_TYPES[stored.weight.name, stored.zero == "float"]


def stored_specs(spec: LinearSpec) -> list[LinearSpec]:
    """The specs of block types that may represent a weight exactly, the smallest first.

    GGUF has no integer zero points. A code less its zero point is an integer of one bit more, which a wider type stores with the
    same scale; which width suffices depends on the codes.
    """
    bits = spec.weight.bits
    if spec.zero == "none":
        found = [_Q4_0 if bits <= 4 else _Q5_0 if bits == 5 else _Q8_0]
    elif spec.zero == "float":
        found = [_Q4_1 if bits <= 4 else _Q5_1 if bits == 5 else _Q8_0]
    else:
        found = [t for t in (_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0) if bits <= t.bits or (t is _Q4_0 and bits <= 3)] or [_Q8_0]
    if spec.block[1] % 32 and spec.block[1] < spec.k:
        raise NotRepresentable(f"gguf has one scale per 32 columns, and its groups are of {spec.block[1]}")
    if spec.k % 32:
        raise NotRepresentable(f"gguf rows consist of blocks of 32 columns, and K is {spec.k}")
    return [
        spec.replace(weight=t, block=(1, 32), zero="float" if t in (_Q4_1, _Q5_1) else "none", scale2_block=None,
                     scale_dtype=torch.float16, act=None)
        for t in found
    ]  # fmt: skip


def to_blocks(weight: QuantizedWeight) -> Tensor:
    """Rows of GGUF blocks, uint8 [N, K / 32 * bytes of a block], of a weight in one of `stored_specs`.

    A block is its float16 scale, its float16 offset if it has one, and 32 codes: two codes per byte for 4 bits (code j low, code
    j + 16 high), for 5 bits the same after four bytes of high bits, one byte per code for 8 bits.
    """
    spec = weight.spec
    name, _, nbytes = block_type(spec)
    n, blocks = spec.n, spec.k // 32
    out = torch.empty(n, blocks, nbytes, dtype=torch.uint8)
    at = 0
    for grid in (weight.scale, weight.offset):
        if grid is not None:
            out[..., at : at + 2] = grid.contiguous().view(torch.uint8).view(n, blocks, 2)
            at += 2
    step = bitstream.rows_per_chunk(spec.k)
    for r in range(0, n, step):
        codes = weight.codes[r : r + step].contiguous()
        rows = codes.shape[0]
        if name == "Q8_0":
            out[r : r + step, :, at:] = codes.view(rows, blocks, 32)
        elif spec.weight.bits == 4:
            out[r : r + step, :, at:] = _interleave_halves(codes.view(rows, blocks, 16))
        else:
            raw = bitstream.unpack(codes, 5, spec.k).reshape(rows, blocks, 32)
            out[r : r + step, :, at : at + 4] = bitstream.pack((raw >> 4).reshape(-1, 32), 1).view(rows, blocks, 4)
            out[r : r + step, :, at + 4 :] = (raw[..., :16] & 15) | (raw[..., 16:] << 4)
    return out.view(n, -1)


def _interleave_halves(pairs: Tensor) -> Tensor:
    """4-bit codes uint8 [..., 16], from codes 2j and 2j + 1 in byte j to codes j and j + 16 in byte j."""
    first, second = pairs[..., :8], pairs[..., 8:]
    even = (first & 15) | (second << 4)
    odd = (first >> 4) | (second & 0xF0)
    return torch.stack((even, odd), -1).flatten(-2)
