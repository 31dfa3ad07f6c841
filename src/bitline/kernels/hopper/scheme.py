"""Which layers the Hopper kernels can do, and what their packed form and device code are."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from bitline import types
from bitline.kernels.hopper.ptx import unit
from bitline.types import LinearSpec, Verdict, no


@dataclass(frozen=True)
class Scheme:
    """format: a name of `ptx.Format`. half: input float16. flip: what codes are xor-ed with.

    wide: scales are float32, else the input's dtype. fine: scales of 64 columns, 2 or 4 where groups are 32 or 16 columns,
    else 1. per: blocks of 64 columns that share a scale, 0 where a row has one. alpha: a factor of the whole weight is kept
    apart. blocks: blocks of 64 columns that are decoded at a time where few rows are multiplied. groups: scales of a row.
    """

    format: str
    half: bool
    flip: int
    wide: bool
    fine: int
    per: int
    alpha: bool
    blocks: int
    groups: int

    @property
    def width(self) -> int:
        """Bits of a code."""
        return 8 if self.format in ("u8", "z8", "e4m3", "e4m3s") else 4

    @property
    def bias(self) -> int:
        """Binary exponent by which scales are larger than alpha says, since decoded floats are that much smaller; else 0."""
        return {"e2m1s": 14 if self.half else 126, "e4m3s": 120}.get(self.format, 0)

    @property
    def step(self) -> int:
        """Columns of a packed scale, 0 where a row has one; a group may take several."""
        return 64 * self.per // self.fine

    @property
    def usual(self) -> bool:
        """Symmetric 4 bits in groups of 128 with bfloat16 inputs, which tiles are tried with first."""
        return self.format == "u4" and (self.fine, self.per) == (1, 2) and not (self.half or self.wide or self.alpha)

    @property
    def unit(self) -> int:
        """See `ptx.unit`."""
        return unit(self.format, self.half)

    @property
    def zero(self) -> bool:
        """With zero points."""
        return self.format.startswith("z")


_PLAIN = {types.uint4b8: ("u4", 0), types.int4: ("u4", 8), types.uint8b128: ("u8", 0), types.int8: ("u8", 128),
          types.float4_e2m1: ("e2m1", 0), types.float8_e4m3fn: ("e4m3", 0)}  # fmt: skip
_ZERO = {types.uint4: "z4", types.uint8: "z8"}
_EXACT = {(torch.float8_e8m0fnu, torch.bfloat16), (torch.float8_e4m3fn, torch.bfloat16), (torch.float8_e4m3fn, torch.float16)}


@functools.lru_cache(maxsize=4096)
def scheme_of(spec: LinearSpec) -> Scheme | Verdict:
    """The scheme of a layer, or why it is none."""
    if spec.act is not None:
        return no(f"the input is to be quantized ({spec.act}); this kernel is weight-only", "a weight-only scheme, such as W4A16")
    if spec.zero == "int" and spec.weight in _ZERO:
        name, flip = _ZERO[spec.weight], 0
    elif spec.zero == "none" and spec.weight in _PLAIN:
        name, flip = _PLAIN[spec.weight]
    else:
        extra = {"int": " with zero points", "float": " with float offsets", "none": ""}[spec.zero]
        return no(
            f"{spec.weight}{extra} has no decoder here", "4- or 8-bit integers, symmetric or with integer zero points, E2M1, E4M3"
        )
    half = spec.act_dtype == torch.float16
    if spec.ragged:
        return no("groups of unequal size", "groups that are equally long")
    bk, cut = spec.block[1], spec.block_offset[1]
    channel = bk >= spec.k + cut
    step = next((g for g in (64, 32, 16) if bk % g == 0 and cut % g == 0), 0)  # what all groups are multiples of
    if not channel and not step:
        return no(
            f"groups of {bk} columns{f', cut at {cut}' if cut else ''}", "groups of multiples of 16 columns, or one scale a row"
        )
    if step == 64 and not cut:
        step = bk
    fine = 1 if channel or step >= 64 else 64 // step
    per = 0 if channel else max(1, step // 64)
    alpha = spec.scale2_block == (spec.n, spec.k)
    folded = spec.scale2_block is not None and not alpha
    if fine > 1 and (name == "e2m1" or (name == "e4m3" and not half)):
        name, alpha = name + "s", True
    wide = folded or not (spec.scale_dtype == spec.act_dtype or (spec.scale_dtype, spec.act_dtype) in _EXACT)
    blocks = 2 if spec.k % 128 == 0 and per % 2 == (1 if fine > 1 else 0) else 1
    groups = 1 if channel else -(-(-(-spec.k // 64) * 64) // step)
    return Scheme(name, half, flip, wide, fine, per, alpha, blocks, groups)
