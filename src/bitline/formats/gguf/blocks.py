"""GGUF's quantized blocks as canonical weights, with nothing requantized.

A GGUF row is a run of blocks that each hold their scales and 32 to 256 codes. Within a block the codes are in half
order (low nibbles first, then the high nibbles of the same bytes) with the fifth and sixth bits kept apart; the
canonical weight wants one sequential bit stream. Both hold the same numbers. Types whose codes are numbers of vectors
are in gguf_grids.py.

Scales keep ggml's factors apart where it multiplies them in float32: none of its products loses a bit there (11 bits of
d, at most 8 of a block's scale, at most 7 of a value), so that the order in which they are multiplied is no matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bitline import bitstream, memory, native, types
from bitline.errors import WeightError
from bitline.formats.gguf import iq_grids as grids
from bitline.formats.gguf.iq_grids import half
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
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
SIZES = {name: (weights, nbytes) for name, weights, nbytes in GGML_TYPES.values()}

# Numbers that ggml gave out and took back; files with them need an old llama.cpp.
RETIRED_TYPES: dict[int, str] = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip

PLAIN_TYPES: dict[str, torch.dtype] = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class Planes:
    """Codes of `bits` bits, `size` to a block, whose bits lie in planes: a function of blocks, uint8 [n, blocks, bytes], to
    packed canonical rows.

    planes: (first byte, bytes in a run, bits, how far up they belong). Byte l of a run holds elements l, l + run, …, the lowest
        bits first. none: a code that becomes 0, -1 for no such code.
    """

    size: int
    bits: int
    planes: tuple[tuple[int, int, int, int], ...]
    none: int = -1

    def __call__(self, blocks: Tensor) -> Tensor:
        """In torch."""
        codes: Tensor | None = None
        for at, run, width, left in self.planes:
            runs = blocks[..., at : at + self.size * width // 8].unflatten(-1, (-1, run))
            plane = (_spread(runs, range(0, 8, width), (1 << width) - 1) << left).flatten(-3)
            codes = plane if codes is None else codes | plane
        assert codes is not None
        if self.none >= 0:
            codes = codes.masked_fill(codes == self.none, 0)
        return bitstream.pack(codes.flatten(1), self.bits)

    def read(self, blocks: Tensor, out: Tensor) -> bool:
        """The same by the native core, to `out`; False where it cannot."""
        core = native.usable(blocks, out)
        n, count, nbytes = blocks.shape
        if core is None or blocks.stride(1) != nbytes or not out.is_contiguous():
            return False
        planes = torch.tensor(self.planes, dtype=torch.int32)
        failed = core.block_codes(
            blocks.data_ptr(), blocks.stride(0), n, count, nbytes, self.size, planes.data_ptr(), len(planes), self.bits,
            self.none, out.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory to read blocks in")
        return True


@dataclass(frozen=True)
class BlockType:
    """One quantized ggml type: its spec, and the two functions that take a block apart.

    codes: blocks uint8 [n, blocks, bytes] to packed canonical rows uint8 [n, K * bits / 8].
    scales: the same blocks to the scale tensors of QuantizedWeight, by field name, each [n, grid columns].
    coarse: columns of a block of the second scale, 0 where there is none, -1 where there is one for the whole weight.
    """

    weight: ScalarType
    group: int
    scale_dtype: torch.dtype
    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], dict[str, Tensor]]
    coarse: int = 0
    zero: Literal["none", "float"] = "none"

    def spec(self, n: int, k: int, *, bias: bool = False, scaled: bool = False) -> LinearSpec:
        """The spec of an [n, k] weight of this type. K must be a multiple of the block. scaled: a factor comes with it."""
        return LinearSpec(
            n, k, self.weight, (1, self.group), scale_dtype=self.scale_dtype, zero=self.zero, bias=bias,
            scale2_block=(1, self.coarse) if self.coarse > 0 else (n, k) if self.coarse or scaled else None,
        )  # fmt: skip


def to_weight(
    kind: str, raw: Tensor, k: int, bias: Tensor | None = None, origin: str = "", factor: float | None = None
) -> QuantizedWeight:
    """Rows of GGUF blocks, uint8 [N, K / block * bytes], as a canonical weight; its dequantized values are ggml's own.

    kind: a key of BLOCKS. factor: what the whole weight is multiplied by, which goes into the second scale. Rows are taken
    apart a chunk at a time, so little memory is needed beside the result. The IQ types but IQ4 need the gguf package.
    """
    block, (size, nbytes) = BLOCKS[kind], SIZES[kind]
    n = raw.shape[0]
    blocks = raw.view(n, k // size, nbytes)
    codes = memory.passing(n, bitstream.row_bytes(k, block.weight.bits), dtype=torch.uint8)
    parts: list[dict[str, Tensor]] = []
    step = bitstream.rows_per_chunk(k)
    for r in range(0, n, step):
        chunk, rows = blocks[r : r + step], codes[r : r + step]
        if not (isinstance(block.codes, Planes) and block.codes.read(chunk, rows)):
            rows.copy_(block.codes(chunk))
        parts.append(block.scales(chunk))
    scales = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if block.coarse <= 0 and (block.coarse or factor is not None):
        one = torch.tensor([[1.0 if factor is None else factor]], dtype=torch.float64)
        scales |= {"scale2": one} | ({"offset2": one} if "offset" in scales else {})
    elif factor is not None:
        scales |= {name: scales[name].float() * factor for name in ("scale2", "offset2") if name in scales}
    spec = block.spec(n, k, bias=bias is not None, scaled=factor is not None)
    return QuantizedWeight(spec, codes, bias=bias, origin=origin, **scales)


# ---- codes ---------------------------------------------------------------------------------------------------------


def _spread(qs: Tensor, shifts: range, mask: int) -> Tensor:
    """uint8 [..., run] to [..., len(shifts), run]: the field at each shift of every byte."""
    return torch.stack([(qs >> s) & mask for s in shifts], -2)


def _q5_legacy(high: Tensor, low: Tensor) -> Tensor:
    """Q5_0 and Q5_1: bit j of the 32-bit word `high` is element j's fifth bit."""
    fifth = grids.BITS[high.int()].view(torch.uint8)
    codes = _spread(low, range(0, 8, 4), 15).flatten(-2) | (fifth << 4)
    return bitstream.pack(codes.flatten(1), 5)


_POWERS = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).unsqueeze(-1)


def _tq1_0(blocks: Tensor) -> Tensor:
    """Five base-3 digits a byte, stored as a fraction of 256: times 3**i, modulo 256, the next digit is the top of it."""
    runs = ((blocks[..., 0:32], 5), (blocks[..., 32:48], 5), (blocks[..., 48:52], 4))
    rest = torch.cat([(run.unsqueeze(-2) * _POWERS[:count]).flatten(-2) for run, count in runs], -1)
    digit = (rest > 85).to(torch.uint8).add_(rest > 170)  # rest * 3 // 256
    return bitstream.pack(digit.flatten(1), 2)


# ---- scales --------------------------------------------------------------------------------------------------------


def _at(at: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """A float16 scale at this byte."""
    return lambda blocks: {"scale": half(blocks, at)}


def _scale_and_min(blocks: Tensor) -> dict[str, Tensor]:
    return {"scale": half(blocks, 0), "offset": half(blocks, 2)}


def _q2_k_scales(blocks: Tensor) -> dict[str, Tensor]:
    """Sixteen bytes of a 4-bit scale and a 4-bit minimum, W = d * scale * q - dmin * min."""
    both = blocks[..., 0:16].flatten(1)
    return {"scale": both & 15, "scale2": half(blocks, 80), "offset": both >> 4, "offset2": -half(blocks, 82)}


def _q3_k_scales(blocks: Tensor) -> dict[str, Tensor]:
    """Sixteen 6-bit scales minus 32: nibbles of eight bytes, and the upper bits in four."""
    low, high = _spread(blocks[..., 96:104], range(0, 8, 4), 15), _spread(blocks[..., 104:108], range(0, 8, 2), 3)
    scale = (low.flatten(-2) | (high.flatten(-2) << 4)).sub_(32).view(torch.int8)
    return {"scale": scale.flatten(1), "scale2": half(blocks, 108)}


def _iq4_xs_scales(blocks: Tensor) -> dict[str, Tensor]:
    """Eight 6-bit scales minus 32: nibbles of four bytes, and the upper bits in two."""
    low, high = grids.fields(blocks[..., 4:8], 4), grids.fields(blocks[..., 2:4], 2)
    return {"scale": (low | (high << 4)).sub_(32).view(torch.int8).flatten(1), "scale2": half(blocks, 0)}


def _nvfp4_scales(blocks: Tensor) -> dict[str, Tensor]:
    """Four unsigned E4M3 numbers, of which ggml reads the one that stands for NaN as 0."""
    scale = blocks[..., 0:4].flatten(1)
    if bool((bad := scale > 127).any()):
        raise WeightError(
            "a scale of NVFP4 is not an unsigned E4M3 number", field="scale", found=f"{int(bad.sum())} bytes above 127",
            expected="bytes 0..127",
        )  # fmt: skip
    return {"scale": torch.where(scale == 127, 0, scale).view(torch.float8_e4m3fn)}


def _six_bit(blocks: Tensor) -> dict[str, Tensor]:
    """Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima in 12 bytes, W = d * scale * q - dmin * min."""
    words = blocks[..., 4:16].contiguous().view(torch.int32)  # four bytes at once: masks drop what shifts bring from a neighbour
    first, second, third = words[..., 0], words[..., 1], words[..., 2]
    six, four, two = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
    scale = torch.stack((first & six, (third & four) | ((first >> 2) & two)), -1).view(torch.uint8)
    minimum = torch.stack((second & six, ((third >> 4) & four) | ((second >> 2) & two)), -1).view(torch.uint8)
    # The sign goes to the coarse factor: negating is exact, so d*q + (-dmin)*m is ggml's d*q - dmin*m to the last bit.
    return {
        "scale": scale.flatten(1), "scale2": half(blocks, 0), "offset": minimum.flatten(1), "offset2": -half(blocks, 2),
    }  # fmt: skip


def _signed_scales(blocks: Tensor) -> dict[str, Tensor]:
    return {"scale": blocks[..., 192:208].flatten(1).view(torch.int8), "scale2": half(blocks, 208)}


_f16, _u8, _i8 = torch.float16, torch.uint8, torch.int8
BLOCKS: dict[str, BlockType] = {
    "Q1_0": BlockType(types.binary, 128, _f16, lambda b: b[..., 2:18].flatten(1), _at(0)),
    "Q2_0": BlockType(types.uint2b1, 64, _f16, lambda b: b[..., 2:18].flatten(1), _at(0)),
    "Q4_0": BlockType(types.uint4b8, 32, _f16, Planes(32, 4, ((2, 16, 4, 0),)), _at(0)),
    "Q4_1": BlockType(types.uint4, 32, _f16, Planes(32, 4, ((4, 16, 4, 0),)), _scale_and_min, zero="float"),
    "Q5_0": BlockType(types.uint5b16, 32, _f16, lambda b: _q5_legacy(b[..., 2:6], b[..., 6:22]), _at(0)),
    "Q5_1": BlockType(types.uint5, 32, _f16, lambda b: _q5_legacy(b[..., 4:8], b[..., 8:24]), _scale_and_min, zero="float"),
    "Q8_0": BlockType(types.int8, 32, _f16, Planes(32, 8, ((2, 32, 8, 0),)), _at(0)),
    "Q2_K": BlockType(types.uint2, 16, _u8, Planes(256, 2, ((16, 32, 2, 0),)), _q2_k_scales, 256, "float"),
    "Q3_K": BlockType(types.uint3b4, 16, _i8, Planes(256, 3, ((32, 32, 2, 0), (0, 32, 1, 2))), _q3_k_scales, 256),
    "Q4_K": BlockType(types.uint4, 32, _u8, Planes(256, 4, ((16, 32, 4, 0),)), _six_bit, 256, "float"),
    "Q5_K": BlockType(types.uint5, 32, _u8, Planes(256, 5, ((48, 32, 4, 0), (16, 32, 1, 4))), _six_bit, 256, "float"),
    "Q6_K": BlockType(types.uint6b32, 16, _i8, Planes(256, 6, ((0, 64, 4, 0), (128, 32, 2, 4))), _signed_scales, 256),
    "Q8_K": BlockType(
        types.int8, 256, torch.float32, Planes(256, 8, ((4, 32, 8, 0),)),
        lambda b: {"scale": b[..., 0:4].contiguous().view(torch.float32).squeeze(-1)},
    ),
    "TQ1_0": BlockType(types.uint2b1, 256, _f16, _tq1_0, _at(52)),
    "TQ2_0": BlockType(types.uint2b1, 256, _f16, Planes(256, 2, ((0, 32, 2, 0),)), _at(64)),
    "MXFP4": BlockType(
        types.float4_e2m1, 32, torch.float8_e8m0fnu, Planes(32, 4, ((1, 16, 4, 0),), none=8),
        lambda b: {"scale": b[..., 0].contiguous().view(torch.float8_e8m0fnu)},
    ),
    "NVFP4": BlockType(types.float4_e2m1, 16, torch.float8_e4m3fn, Planes(64, 4, ((4, 8, 4, 0),), none=8), _nvfp4_scales, -1),
    "IQ1_S": BlockType(types.uint2, 32, _u8, grids.iq1_s, grids.iq1_s_scales, 256, "float"),
    "IQ1_M": BlockType(types.iq1_m, 16, _u8, grids.iq1_m, grids.iq1_m_scales, 256),
    "IQ2_XXS": BlockType(types.iq2, 32, _u8, grids.iq2_xxs, grids.iq2_xxs_scales, 256),
    "IQ2_XS": BlockType(types.iq2, 16, _u8, grids.iq2_xs, grids.odd_scales(66, 74), 256),
    "IQ2_S": BlockType(types.iq2, 16, _u8, grids.iq2_s, grids.odd_scales(74, 82), 256),
    "IQ3_XXS": BlockType(types.iq3_xxs, 32, _u8, grids.iq3_xxs, grids.iq3_xxs_scales, 256),
    "IQ3_S": BlockType(types.iq3_s, 32, _u8, grids.iq3_s, grids.odd_scales(106, 110), 256),
    "IQ4_NL": BlockType(types.iq4_nl, 32, _f16, Planes(32, 4, ((2, 16, 4, 0),)), _at(0)),
    "IQ4_XS": BlockType(types.iq4_nl, 32, _i8, Planes(256, 4, ((8, 16, 4, 0),)), _iq4_xs_scales, 256),
}  # fmt: skip
SUPPORTED = ", ".join(BLOCKS)
