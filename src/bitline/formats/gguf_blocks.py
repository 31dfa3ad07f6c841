"""GGUF's quantized blocks as canonical weights, with nothing requantized.

A GGUF row is a run of blocks that each hold their scales and 32 or 256 codes. Within a block the codes are in half
order (low nibbles first, then the high nibbles of the same bytes) with the fifth and sixth bits kept apart; the
canonical weight wants one sequential bit stream. Both hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bitline import bits, types
from bitline.types import LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

# Every type that ggml has a number for: (name, weights per block, bytes per block).
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip

# Numbers that ggml gave out and took back; files with them need an old llama.cpp.
RETIRED_TYPES: dict[int, str] = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip

PLAIN_TYPES: dict[str, torch.dtype] = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class BlockType:
    """One quantized ggml type: its spec, and the two functions that take a block apart.

    codes: blocks uint8 [n, blocks, bytes] to packed canonical rows uint8 [n, K * bits / 8].
    scales: the same blocks to the scale tensors of QuantizedWeight, by field name, each [n, grid columns].
    """

    weight: ScalarType
    group: int
    zero: Literal["none", "float"]
    scale_dtype: torch.dtype
    super_block: bool
    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], dict[str, Tensor]]

    def spec(self, n: int, k: int, *, bias: bool = False) -> LinearSpec:
        """The spec of an [n, k] weight of this type. K must be a multiple of the block."""
        return LinearSpec(
            n, k, self.weight, (1, self.group), scale_dtype=self.scale_dtype, zero=self.zero,
            scale2_block=(1, 256) if self.super_block else None, bias=bias,
        )  # fmt: skip


def to_weight(kind: str, raw: Tensor, k: int, bias: Tensor | None = None, origin: str = "") -> QuantizedWeight:
    """Rows of GGUF blocks, uint8 [N, K / block * bytes], as a canonical weight; its dequantized values are ggml's own.

    kind: a key of BLOCKS. Codes are re-laid a chunk of rows at a time, so little memory is needed beside the result.
    """
    block, (_, size, nbytes) = BLOCKS[kind], next(t for t in GGML_TYPES.values() if t[0] == kind)
    n = raw.shape[0]
    blocks = raw.view(n, k // size, nbytes)
    codes = torch.empty(n, bits.row_bytes(k, block.weight.bits), dtype=torch.uint8)
    step = bits.rows_per_chunk(k)
    for r in range(0, n, step):
        codes[r : r + step] = block.codes(blocks[r : r + step])
    spec = block.spec(n, k, bias=bias is not None)
    return QuantizedWeight(spec, codes, bias=bias, origin=origin, **block.scales(blocks))


# ---- codes ---------------------------------------------------------------------------------------------------------


def _nibbles(qs: Tensor, half: int) -> Tensor:
    """uint8 [n, blocks, bytes] in which byte j of each run of `half` bytes holds elements j and j + half."""
    pairs = qs.unflatten(-1, (-1, half // 2, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    low, high = (even & 0x0F) | (odd << 4), (even >> 4) | (odd & 0xF0)
    return torch.stack((low, high), -2).view(qs.shape[0], -1)


def _spread(qs: Tensor, shifts: range, mask: int) -> Tensor:
    """uint8 [..., run] to [..., len(shifts), run]: the field at each shift of every byte."""
    return torch.stack([(qs >> s) & mask for s in shifts], -2)


# The eight bits of every byte value, a byte each and lowest first: one look-up instead of eight passes over short runs.
_BITS = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).to(torch.uint8).view(torch.int64).squeeze(1)


def _q5_legacy(high: Tensor, low: Tensor) -> Tensor:
    """Q5_0 and Q5_1: bit j of the 32-bit word `high` is element j's fifth bit."""
    fifth = _BITS[high.int()].view(torch.uint8)
    codes = _spread(low, range(0, 8, 4), 15).flatten(-2) | (fifth << 4)
    return bits.pack(codes.flatten(1), 5)


def _q5_k(blocks: Tensor) -> Tensor:
    """Bit j of byte l of qh is the fifth bit of element 32 * j + l."""
    low = _spread(blocks[..., 48:176].unflatten(-1, (4, 32)), range(0, 8, 4), 15).flatten(-3)
    fifth = _spread(blocks[..., 16:48], range(8), 1).flatten(-2)
    return bits.pack((low | (fifth << 4)).flatten(1), 5)


def _q6_k(blocks: Tensor) -> Tensor:
    """Each half of 128: nibbles of 64 bytes are elements j and j + 64; bits 2i of 32 bytes belong to j + 32 * i."""
    low = _spread(blocks[..., 0:128].unflatten(-1, (2, 64)), range(0, 8, 4), 15).flatten(-3)
    high = _spread(blocks[..., 128:192].unflatten(-1, (2, 32)), range(0, 8, 2), 3).flatten(-3)
    return bits.pack((low | (high << 4)).flatten(1), 6)


# ---- scales --------------------------------------------------------------------------------------------------------


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, [n, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _one(blocks: Tensor) -> dict[str, Tensor]:
    return {"scale": _half(blocks, 0)}


def _scale_and_min(blocks: Tensor) -> dict[str, Tensor]:
    return {"scale": _half(blocks, 0), "offset": _half(blocks, 2)}


def _six_bit(blocks: Tensor) -> dict[str, Tensor]:
    """Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima in 12 bytes, W = d * scale * q - dmin * min."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scale = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), -1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), -1)
    # The sign goes to the coarse factor: negating is exact, so d*q + (-dmin)*m is ggml's d*q - dmin*m to the last bit.
    return {
        "scale": scale.flatten(1), "scale2": _half(blocks, 0), "offset": minimum.flatten(1), "offset2": -_half(blocks, 2),
    }  # fmt: skip


def _signed_scales(blocks: Tensor) -> dict[str, Tensor]:
    return {"scale": blocks[..., 192:208].flatten(1).view(torch.int8), "scale2": _half(blocks, 208)}


_f16, _u8, _i8 = torch.float16, torch.uint8, torch.int8
BLOCKS: dict[str, BlockType] = {
    "Q4_0": BlockType(types.uint4b8, 32, "none", _f16, False, lambda b: _nibbles(b[..., 2:18], 16), _one),
    "Q4_1": BlockType(types.uint4, 32, "float", _f16, False, lambda b: _nibbles(b[..., 4:20], 16), _scale_and_min),
    "Q5_0": BlockType(types.uint5b16, 32, "none", _f16, False, lambda b: _q5_legacy(b[..., 2:6], b[..., 6:22]), _one),
    "Q5_1": BlockType(types.uint5, 32, "float", _f16, False, lambda b: _q5_legacy(b[..., 4:8], b[..., 8:24]), _scale_and_min),
    "Q8_0": BlockType(types.int8, 32, "none", _f16, False, lambda b: b[..., 2:34].flatten(1), _one),
    "Q4_K": BlockType(types.uint4, 32, "float", _u8, True, lambda b: _nibbles(b[..., 16:144], 32), _six_bit),
    "Q5_K": BlockType(types.uint5, 32, "float", _u8, True, _q5_k, _six_bit),
    "Q6_K": BlockType(types.uint6b32, 16, "none", _i8, True, _q6_k, _signed_scales),
}
SUPPORTED = ", ".join(BLOCKS)
