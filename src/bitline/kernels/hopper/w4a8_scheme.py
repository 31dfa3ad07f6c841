"""Schemes with 4-bit weights and 8-bit activations as the kernels of `w4a8_linear` compute them, derived from a `LinearSpec`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from bitline import types
from bitline.kernels.hopper.scaled_scheme import K_BLOCK, ScaledScheme, check_spec, scaled_scheme
from bitline.types import YES, LinearSpec, Verdict, no

# (weight, x): name of the unpacking, XOR onto each code when packing, factor of the unpacked codes
_FORMATS = {
    ("uint4b8", "int8"): ("int4", 8, 16.0),
    ("int4", "int8"): ("int4", 0, 16.0),
    ("uint4b8", "float8_e4m3fn"): ("int4", 8, 2.0**-8),
    ("int4", "float8_e4m3fn"): ("int4", 0, 2.0**-8),
    ("float4_e2m1", "float8_e4m3fn"): ("e2m1", 0, 2.0**-6),
}


def _unpack_ptx(body: str) -> tuple[str, str]:
    """Four words to eight registers. body: of one word {p} to {lo}, rows g, and {hi}, rows g + 8; s, t are free."""
    words = (body.format(p=f"${8 + i}", lo=f"${2 * i}", hi=f"${2 * i + 1}") for i in range(4))
    return "{ .reg .b32 s,t; " + "".join(words) + "}", ",".join(["=&r"] * 8 + ["r"] * 4)


# Four bits become a byte. Two's complement to int8: 16 times the code. For E4M3 they are a sign and the magnitude, less one where
# negative, at bits 7 and 3 … 1 (rows g) and at bits 0 and 6 … 4 (rows g + 8). The byte is sign and magnitude, where E4M3 codes
# 0 … 16 are 0 … 16 times 2**-9: of twice the code, or ("odd", one addition less) of twice the code plus one. E2M1's bits are
# those of an E4M3 of 2**-6 times the value.
UNPACK_PTX = {
    ("int4", False): _unpack_ptx("shl.b32 t,{p},4; and.b32 {lo},t,0xF0F0F0F0; and.b32 {hi},{p},0xF0F0F0F0;"),
    ("int4", True): _unpack_ptx(
        "and.b32 s,{p},0x80808080; and.b32 t,{p},0x8E8E8E8E; shr.u32 s,s,6; add.u32 {lo},t,s;"
        "shl.b32 s,{p},7; and.b32 s,s,0x80808080; shr.u32 t,{p},3; lop3.b32 t,t,0x0E0E0E0E,s,0xEA; shr.u32 s,s,6;"
        "add.u32 {hi},t,s;"
    ),
    ("odd", True): _unpack_ptx(
        "mov.b32 s,0x01010101; lop3.b32 {lo},{p},0x8E8E8E8E,s,0xEA; shr.u32 t,{p},3; lop3.b32 t,t,0x0E0E0E0E,s,0xEA;"
        "shl.b32 s,{p},7; lop3.b32 {hi},s,0x80808080,t,0xEA;"
    ),
    ("e2m1", True): _unpack_ptx(
        "shl.b32 t,{p},2; and.b32 t,t,0x1C1C1C1C; shl.b32 s,{p},4; lop3.b32 {lo},s,0x80808080,t,0xEA;"
        "shr.u32 t,{p},2; and.b32 t,t,0x1C1C1C1C; lop3.b32 {hi},{p},0x80808080,t,0xEA;"
    ),
}


class W4A8Traits(NamedTuple):
    """Compile-time part of a scheme.

    fp8: codes of x are E4M3, else int8. fp16: y is float16, else bfloat16. scaled_in_groups: weight scales change along K.
    groups_per_k_block: 2 or 4 for groups of 64 and 32 columns, else 1. k_blocks_per_scale: K blocks of 128 columns that share a
    scale. exact_int32: products are added up in int32. odd: codes are unpacked to twice the code plus one. The last two are for
    `epilogue`.
    """

    fp8: bool
    fp16: bool
    scaled_in_groups: bool
    groups_per_k_block: int
    k_blocks_per_scale: int
    has_bias: bool
    exact_int32: bool
    unpack_ptx: tuple[str, str]
    odd: bool = False
    has_global_scale: bool = False
    folds_exponent_bias: bool = False


class W4A8Scheme(NamedTuple):
    """A layer's scheme.

    x: of an 8-bit weight with the same activations. code: name of the unpacking. xor_mask: XORed onto each code when packing.
    factor: of the unpacked codes. groups: entries of a row of W in the table of scales.
    """

    x: ScaledScheme
    traits: W4A8Traits
    code: str
    xor_mask: int
    factor: float
    groups: int

    def with_bias(self, has_bias: bool) -> W4A8Traits:
        """The traits of a call."""
        return self.traits._replace(has_bias=has_bias)

    def small_m_traits(self, has_bias: bool) -> W4A8Traits:
        """The traits of a call of `w4a8_small_m`."""
        traits = self.with_bias(has_bias)
        odd = self.code == "int4" and traits.fp8
        return traits._replace(odd=True, unpack_ptx=UNPACK_PTX["odd", True]) if odd else traits


def _activations(spec: LinearSpec) -> LinearSpec:
    """The layer with an 8-bit weight."""
    assert spec.act is not None
    return LinearSpec(spec.n, spec.k, spec.act.dtype, (1, spec.k), act=spec.act, act_dtype=spec.act_dtype, bias=spec.bias)


def check_w4a8(spec: LinearSpec) -> Verdict:
    """Whether the kernels compute a spec."""
    act = spec.act
    if act is None:
        return no("the scheme does not quantize activations", "GluonHopperLinearKernel")
    if (spec.weight.name, act.dtype.name) not in _FORMATS:
        return no(
            f"{spec.weight} weights with activations of {act.dtype}", "int4 or uint4b8 weights, or E2M1 with E4M3 activations"
        )
    if act.granularity == "group" or (act.dtype.kind == "int" and not act.symmetric):
        return no(f"activation scheme {act}", "one symmetric scale per token or tensor")
    if spec.zero != "none" or spec.ragged or spec.scale2_block is not None:
        return no("weights with zero points, two levels of scales, or groups of unequal size", "a symmetric weight")
    if spec.block[0] > 1 and spec.block != (spec.n, spec.k):
        return no(f"scale blocks of {spec.block[0]} rows", "scales for each row of W, or one")
    size = spec.block[1]
    if size < spec.k and (spec.block_offset[1] or (size not in (32, 64) and size % K_BLOCK)):
        where = f", offset by {spec.block_offset[1]}" if spec.block_offset[1] else ""
        return no(f"groups of {size} columns{where}", "groups of 32, 64 or a multiple of 128 columns, or a scale per row")
    if spec.act_order and size < spec.k:
        return no("act-order with scales in groups", "columns in the input's order")
    of_activations = check_spec(_activations(spec))
    return YES if of_activations else of_activations


@functools.lru_cache(maxsize=4096)
def w4a8_scheme(spec: LinearSpec) -> W4A8Scheme:
    """The scheme of a spec that `check_w4a8` accepts."""
    assert spec.act is not None
    code, mask, factor = _FORMATS[spec.weight.name, spec.act.dtype.name]
    fp8, size = spec.act.dtype is types.float8_e4m3fn, spec.block[1]
    grouped = size < spec.k
    per_block = max(1, K_BLOCK // size) if grouped else 1
    k_blocks = -(-spec.k // K_BLOCK)
    per_scale = max(1, size // K_BLOCK) if grouped else k_blocks
    return W4A8Scheme(
        scaled_scheme(_activations(spec)),
        W4A8Traits(
            fp8, spec.act_dtype == torch.float16, grouped, per_block,
            per_scale if grouped else 1, False, not fp8 and not grouped, UNPACK_PTX[code, fp8],
        ),
        code, mask, factor, (-(-k_blocks // per_scale) * per_block) if grouped else 1,
    )  # fmt: skip
