"""GGUF's quantized blocks as canonical weights, with nothing requantized.

A GGUF row is a sequence of blocks, each of which holds its scales and 32 to 256 codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bitline import bitstream, memory, native, types
from bitline.formats.gguf import block_scales as scales
from bitline.formats.gguf import iq_grids as iq
from bitline.formats.gguf.block_codes import BitPlanes, q5_legacy, tq1_0
from bitline.formats.gguf.block_scales import ScaleFields, half_at
from bitline.formats.gguf.ggml_types import BLOCK_SIZES
from bitline.types import LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

GLOBAL_SCALE = -1
NATIVE_CHUNKS = 8  # the native core makes no temporary codes: larger chunks, in which its loops and torch's use all threads


@dataclass(frozen=True)
class BlockType:
    """One quantized ggml type: its spec, and the functions that read codes and scales out of its blocks.

    block_k: weights per block scale. codes: blocks uint8 [n, blocks, bytes] to canonical rows uint8 [n, K * bits / 8].
    scales: the same blocks to the scale fields of QuantizedWeight, each [n, grid columns].
    super_block: weights per super-block scale, 0 where there is none, GLOBAL_SCALE for one of the whole weight.
    """

    weight: ScalarType
    block_k: int
    scale_dtype: torch.dtype
    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], ScaleFields]
    super_block: int = 0
    zero: Literal["none", "float"] = "none"

    def spec(self, n: int, k: int, *, bias: bool = False, scaled: bool = False) -> LinearSpec:
        """The spec of an [n, k] weight of this type; K must be a multiple of the block. scaled: it has a factor of its own."""
        scale2_block = None
        if self.super_block > 0:
            scale2_block = (1, self.super_block)
        elif self.super_block == GLOBAL_SCALE or scaled:
            scale2_block = (n, k)
        return LinearSpec(
            n, k, self.weight, (1, self.block_k), scale_dtype=self.scale_dtype, zero=self.zero, bias=bias,
            scale2_block=scale2_block,
        )  # fmt: skip


def to_weight(
    kind: str, raw: Tensor, k: int, bias: Tensor | None = None, origin: str = "", factor: float | None = None
) -> QuantizedWeight:
    """Rows of GGUF blocks, uint8 [N, K / block * bytes], as a canonical weight; its dequantized values are ggml's own.

    kind: a key of BLOCKS. factor: multiplies the whole weight, and goes into scale2. Rows are repacked a chunk at a time, so
    little memory is needed beside the result. The IQ types other than IQ4 need the gguf package.
    """
    block, (size, nbytes) = BLOCKS[kind], BLOCK_SIZES[kind]
    n = raw.shape[0]
    blocks = raw.view(n, k // size, nbytes)
    codes = memory.empty_pooled(n, bitstream.row_bytes(k, block.weight.bits), dtype=torch.uint8)
    chunks: list[ScaleFields] = []
    step = bitstream.rows_per_chunk(k)
    if isinstance(block.codes, BitPlanes) and native.core_for(raw) is not None:
        step *= NATIVE_CHUNKS
    for r in range(0, n, step):
        chunk, rows = blocks[r : r + step], codes[r : r + step]
        if not (isinstance(block.codes, BitPlanes) and block.codes.repack_native(chunk, rows)):
            rows.copy_(block.codes(chunk))
        chunks.append(block.scales(chunk))
    fields = chunks[0] if len(chunks) == 1 else {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    fields |= _scale2_fields(block, fields, factor)
    spec = block.spec(n, k, bias=bias is not None, scaled=factor is not None)
    return QuantizedWeight(spec, codes, bias=bias, origin=origin, **fields)


def _scale2_fields(block: BlockType, fields: ScaleFields, factor: float | None) -> ScaleFields:
    """scale2 and offset2 as the factor changes them, or as a global scale of their own, float64 [1, 1]."""
    if block.super_block > 0:
        if factor is None:
            return {}
        return {name: fields[name].float() * factor for name in ("scale2", "offset2") if name in fields}
    if block.super_block != GLOBAL_SCALE and factor is None:
        return {}
    one = torch.tensor([[1.0 if factor is None else factor]], dtype=torch.float64)
    return {"scale2": one} | ({"offset2": one} if "offset" in fields else {})


_f16, _u8, _i8 = torch.float16, torch.uint8, torch.int8
BLOCKS: dict[str, BlockType] = {
    "Q1_0": BlockType(types.binary, 128, _f16, lambda b: b[..., 2:18].flatten(1), half_at(0)),
    "Q2_0": BlockType(types.uint2b1, 64, _f16, lambda b: b[..., 2:18].flatten(1), half_at(0)),
    "Q4_0": BlockType(types.uint4b8, 32, _f16, BitPlanes(32, 4, ((2, 16, 4, 0),)), half_at(0)),
    "Q4_1": BlockType(types.uint4, 32, _f16, BitPlanes(32, 4, ((4, 16, 4, 0),)), scales.scale_and_min, zero="float"),
    "Q5_0": BlockType(types.uint5b16, 32, _f16, lambda b: q5_legacy(b[..., 2:6], b[..., 6:22]), half_at(0)),
    "Q5_1": BlockType(types.uint5, 32, _f16, lambda b: q5_legacy(b[..., 4:8], b[..., 8:24]), scales.scale_and_min, zero="float"),
    "Q8_0": BlockType(types.int8, 32, _f16, BitPlanes(32, 8, ((2, 32, 8, 0),)), half_at(0)),
    "Q2_K": BlockType(types.uint2, 16, _u8, BitPlanes(256, 2, ((16, 32, 2, 0),)), scales.q2_k, 256, "float"),
    "Q3_K": BlockType(types.uint3b4, 16, _i8, BitPlanes(256, 3, ((32, 32, 2, 0), (0, 32, 1, 2))), scales.q3_k, 256),
    "Q4_K": BlockType(types.uint4, 32, _u8, BitPlanes(256, 4, ((16, 32, 4, 0),)), scales.q4_k, 256, "float"),
    "Q5_K": BlockType(types.uint5, 32, _u8, BitPlanes(256, 5, ((48, 32, 4, 0), (16, 32, 1, 4))), scales.q4_k, 256, "float"),
    "Q6_K": BlockType(types.uint6b32, 16, _i8, BitPlanes(256, 6, ((0, 64, 4, 0), (128, 32, 2, 4))), scales.q6_k, 256),
    "Q8_K": BlockType(types.int8, 256, torch.float32, BitPlanes(256, 8, ((4, 32, 8, 0),)), scales.float32_scale),
    "TQ1_0": BlockType(types.uint2b1, 256, _f16, tq1_0, half_at(52)),
    "TQ2_0": BlockType(types.uint2b1, 256, _f16, BitPlanes(256, 2, ((0, 32, 2, 0),)), half_at(64)),
    # Code 8 is FP4's minus zero.
    "MXFP4": BlockType(
        types.float4_e2m1, 32, torch.float8_e8m0fnu, BitPlanes(32, 4, ((1, 16, 4, 0),), zero_code=8), scales.e8m0_scale
    ),
    "NVFP4": BlockType(
        types.float4_e2m1, 16, torch.float8_e4m3fn, BitPlanes(64, 4, ((4, 8, 4, 0),), zero_code=8), scales.nvfp4, GLOBAL_SCALE
    ),
    "IQ1_S": BlockType(types.uint2, 32, _u8, iq.iq1_s, iq.iq1_s_scales, 256, "float"),
    "IQ1_M": BlockType(types.iq1_m, 16, _u8, iq.iq1_m, iq.iq1_m_scales, 256),
    "IQ2_XXS": BlockType(types.iq2, 32, _u8, iq.iq2_xxs, iq.iq2_xxs_scales, 256),
    "IQ2_XS": BlockType(types.iq2, 16, _u8, iq.iq2_xs, iq.odd_scales(66, 74), 256),
    "IQ2_S": BlockType(types.iq2, 16, _u8, iq.iq2_s, iq.odd_scales(74, 82), 256),
    "IQ3_XXS": BlockType(types.iq3_xxs, 32, _u8, iq.iq3_xxs, iq.iq3_xxs_scales, 256),
    "IQ3_S": BlockType(types.iq3_s, 32, _u8, iq.iq3_s, iq.odd_scales(106, 110), 256),
    "IQ4_NL": BlockType(types.iq4_nl, 32, _f16, BitPlanes(32, 4, ((2, 16, 4, 0),)), half_at(0)),
    "IQ4_XS": BlockType(types.iq4_nl, 32, _i8, BitPlanes(256, 4, ((8, 16, 4, 0),)), scales.iq4_xs, 256),
}  # fmt: skip
SUPPORTED = ", ".join(BLOCKS)
