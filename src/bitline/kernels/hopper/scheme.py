"""How the weights of a layer are dequantized: code format and scale layout, derived from its `LinearSpec`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from bitline import types
from bitline.kernels.hopper.ptx import fragment_exponent_bias
from bitline.types import LinearSpec, Verdict, no


@dataclass(frozen=True)
class DequantScheme:
    """Dequantization of a layer. A K block is 64 columns of W; a K tile is what mma.sync kernels dequantize at a time.

    code_format: name of a `ptx.CodeFormat`.
    fp16: inputs are float16, else bfloat16.
    xor_mask: XORed onto every code when packing (8 and 128 turn two's complement into offset binary).
    fp32_scales: scales are stored in float32, else in the input's dtype.
    scales_per_k_block: 2 or 4 for scale blocks of 32 or 16 columns, else 1.
    k_blocks_per_scale: K blocks that share a scale; 0 for per-channel scales, one per row of W.
    global_scale: a per-tensor factor multiplies the accumulators.
    k_blocks_per_tile: 1 or 2 K blocks per K tile.
    scales_per_row: entries per row of W in the packed scale table.
    """

    code_format: str
    fp16: bool
    xor_mask: int
    fp32_scales: bool
    scales_per_k_block: int
    k_blocks_per_scale: int
    global_scale: bool
    k_blocks_per_tile: int
    scales_per_row: int

    def pipelined(self) -> DequantScheme:
        """For `small_m_pipelined`: scale blocks of 128 columns are K tiles of 128, whose last may lack its second K block."""
        return dataclasses.replace(self, k_blocks_per_tile=2) if self.k_blocks_per_scale == 2 else self

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.code_format in ("u8", "z8", "e4m3", "e4m3s") else 4

    @property
    def scale_exponent_bias(self) -> int:
        """Packed scales hold 2**this times the scale, since `e2m1s` and `e4m3s` dequantize to 2**-this times the code; else 0."""
        return {"e2m1s": 14 if self.fp16 else 126, "e4m3s": 120}.get(self.code_format, 0)

    @property
    def columns_per_scale(self) -> int:
        """Columns of W per packed scale, 0 for per-channel scales; a scale block may take several entries."""
        return 64 * self.k_blocks_per_scale // self.scales_per_k_block

    @property
    def is_w4_g128_bf16(self) -> bool:
        """Symmetric 4 bits in scale blocks of 128 with bfloat16 inputs, the scheme that the cost tables were measured with."""
        bf16 = not (self.fp16 or self.fp32_scales or self.global_scale)
        return self.code_format == "u4" and (self.scales_per_k_block, self.k_blocks_per_scale) == (1, 2) and bf16

    @property
    def fragment_exponent_bias(self) -> int:
        """See `ptx.fragment_exponent_bias`."""
        return fragment_exponent_bias(self.code_format, self.fp16)

    @property
    def zero_points(self) -> bool:
        """Codes have integer zero points."""
        return self.code_format.startswith("z")


# (code format, XOR mask) by weight type
_SYMMETRIC = {types.uint4b8: ("u4", 0), types.int4: ("u4", 8), types.uint8b128: ("u8", 0), types.int8: ("u8", 128),
              types.float4_e2m1: ("e2m1", 0), types.float8_e4m3fn: ("e4m3", 0)}  # fmt: skip
_ZERO_POINTS = {types.uint4: "z4", types.uint8: "z8"}
# (scale dtype, input dtype) whose scales convert exactly
_EXACT = {(torch.float8_e8m0fnu, torch.bfloat16), (torch.float8_e4m3fn, torch.bfloat16), (torch.float8_e4m3fn, torch.float16)}


@functools.lru_cache(maxsize=4096)
def dequant_scheme(spec: LinearSpec) -> DequantScheme | Verdict:
    """The scheme of a layer, or the reason why the Hopper kernels refuse it."""
    code = _code_format(spec)
    if isinstance(code, Verdict):
        return code
    columns = _columns_per_scale(spec)
    if isinstance(columns, Verdict):
        return columns
    code_format, xor_mask = code
    fp16 = spec.act_dtype == torch.float16
    scales_per_k_block = 64 // columns if columns and columns < 64 else 1
    k_blocks_per_scale = max(1, columns // 64) if columns else 0
    global_scale = spec.scale2_block == (spec.n, spec.k)
    super_block_scales = spec.scale2_block is not None and not global_scale  # multiplied into the scales when packing
    if scales_per_k_block > 1 and (code_format == "e2m1" or (code_format == "e4m3" and not fp16)):
        code_format, global_scale = code_format + "s", True
    exact = spec.scale_dtype == spec.act_dtype or (spec.scale_dtype, spec.act_dtype) in _EXACT
    pairs = spec.k % 128 == 0 and k_blocks_per_scale % 2 == (1 if scales_per_k_block > 1 else 0)
    scales_per_row = -(-(-(-spec.k // 64) * 64) // columns) if columns else 1
    return DequantScheme(
        code_format, fp16, xor_mask, super_block_scales or not exact, scales_per_k_block, k_blocks_per_scale, global_scale,
        2 if pairs else 1, scales_per_row,
    )  # fmt: skip


def _code_format(spec: LinearSpec) -> tuple[str, int] | Verdict:
    """(code format, XOR mask)."""
    if spec.act is not None:
        return no(f"activations are quantized ({spec.act}); this kernel is weight-only", "a weight-only scheme, such as W4A16")
    if spec.zero == "int" and spec.weight in _ZERO_POINTS:
        return _ZERO_POINTS[spec.weight], 0
    if spec.zero == "none" and spec.weight in _SYMMETRIC:
        return _SYMMETRIC[spec.weight]
    extra = {"int": " with zero points", "float": " with float offsets", "none": ""}[spec.zero]
    fix = "4- or 8-bit integers, symmetric or with integer zero points, E2M1, E4M3"
    return no(f"{spec.weight}{extra} cannot be dequantized here", fix)


def _columns_per_scale(spec: LinearSpec) -> int | Verdict:
    """Columns per packed scale, 0 for per-channel scales: the largest of 64, 32 and 16 that divides every scale block, or an
    aligned scale block of a multiple of 64."""
    if spec.ragged:
        return no("scale blocks of unequal size", "scale blocks of equal size")
    block_k, offset = spec.block[1], spec.block_offset[1]
    if block_k >= spec.k + offset:
        return 0
    columns = next((c for c in (64, 32, 16) if block_k % c == 0 and offset % c == 0), 0)
    if not columns:
        where = f", offset by {offset}" if offset else ""
        return no(f"scale blocks of {block_k} columns{where}", "scale blocks of multiples of 16 columns, or per-channel scales")
    return block_k if columns == 64 and not offset else columns
