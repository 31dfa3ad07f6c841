"""Schemes with quantized activations as the kernels of `scaled_linear` compute them, derived from a `LinearSpec`."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from bitline.kernels.hopper.scaled_config import WHOLE_ROW
from bitline.kernels.integers import fits_int8
from bitline.types import YES, ActSpec, LinearSpec, Verdict, no

K_BLOCK = 128  # columns of a pipeline stage, and of a product that is scaled or added in float32
COLUMNS, WIDE_COLUMNS = 2048, 8192  # of a row that are quantized together, where several CTAs share rows and where not


class ActTraits(NamedTuple):
    """Compile-time part of an activation scheme.

    fp8: codes are E4M3, else int8. granularity: "token", "tensor" (static) or "group". max_code: what amax is divided by.
    columns: of a row that are quantized together. at_once: whose loads are in flight together, for a token's scale.
    fragment_order: of the scales in groups, see `device.quantize.scale_position`.
    """

    fp8: bool
    granularity: str
    asymmetric: bool
    e8m0_scale: bool
    group_size: int
    max_code: float
    min_scale: float
    columns: int = COLUMNS
    at_once: int = WIDE_COLUMNS
    fragment_order: bool = False


class ScaledTraits(NamedTuple):
    """Compile-time part of a scheme.

    fp8: codes are E4M3, else int8. fp16: y is float16, else bfloat16. scaled_in_groups: scales change along K, else they multiply
    the accumulators at the end. zero_points: x has one. k_blocks_per_*_scale: K blocks that share a scale.
    one_scale_per_warpgroup: 64 rows of W from a multiple of 64 on share theirs. The last two are for `epilogue`.
    """

    fp8: bool
    fp16: bool
    scaled_in_groups: bool
    zero_points: bool
    has_bias: bool
    k_blocks_per_weight_scale: int
    k_blocks_per_x_scale: int
    one_scale_per_warpgroup: bool
    has_global_scale: bool = False
    folds_exponent_bias: bool = False


class ScaledScheme(NamedTuple):
    """A layer's scheme.

    columns: K padded to 16 bytes of codes. groups: scales of a row of x. block_rows, row_offset: rows of W that share a scale,
    and those of the first block that precede row 0.
    """

    act: ActTraits
    traits: ScaledTraits
    columns: int
    groups: int
    limit: float
    block_rows: int
    row_offset: int

    def with_bias(self, has_bias: bool) -> ScaledTraits:
        """The traits of a call."""
        return self.traits._replace(has_bias=has_bias)

    @property
    def one_scale_per_128_rows(self) -> bool:
        """Whether 128 rows of W from a multiple of 128 on share their scale, or weight scales do not change along K."""
        return self.traits.k_blocks_per_weight_scale == WHOLE_ROW or self.block_rows % 128 == self.row_offset % 128 == 0

    def parts(self, m: int, ctas: int, columns: int = COLUMNS) -> int:
        """Parts of a row of x [m, K] that `ctas` CTAs quantize; each reads the whole row where the scale is a token's."""
        chunks = -(-self.columns // columns)
        return max(1, min(chunks, ctas // m)) if self.act.granularity == "token" else chunks


def check_spec(spec: LinearSpec) -> Verdict:
    """Whether the kernels compute a spec."""
    act = spec.act
    if act is None:
        return no("the scheme does not quantize activations", "GluonHopperLinearKernel")
    if act.dtype.name not in ("float8_e4m3fn", "int8"):
        return no(f"activations of {act.dtype}", "float8_e4m3fn or int8 activations")
    if act.dynamic and act.granularity == "tensor" and not act.symmetric:
        return no("a dynamic scale and zero point of the whole input", "a symmetric scheme, or a scale per token")
    if spec.zero != "none" or spec.ragged:
        return no("weights with zero points, or scale blocks of unequal size", "a symmetric weight")
    return _check_fp8(spec, act) if act.dtype.kind == "float" else _check_int8(spec, act)


def _check_fp8(spec: LinearSpec, act: ActSpec) -> Verdict:
    if spec.weight.name != "float8_e4m3fn":
        return no(f"weight type {spec.weight}", "float8_e4m3fn weights")
    whole_rows = spec.block[1] >= spec.k + spec.block_offset[1]
    if act.granularity != "group":
        if not whole_rows:
            return no("weight scales change along K, activation scales do not", "activations in groups of 128 columns")
        return YES
    if act.scale not in ("float", "e8m0") or act.group_size % K_BLOCK or COLUMNS % act.group_size:
        return no(f"activation scheme {act}", "activations in groups of 128, 256, 512, 1024 or 2048 columns")
    if not whole_rows and (spec.block[1] % K_BLOCK or spec.block_offset[1]):
        return no(f"scale blocks of {spec.block[1]} columns from {spec.block_offset[1]} on", "scale blocks of multiples of 128")
    if spec.act_order:
        return no("act-order with scales in groups", "columns in the input's order")
    return YES


def _check_int8(spec: LinearSpec, act: ActSpec) -> Verdict:
    if act.granularity == "group" or spec.grid[1] != 1:
        return no("scales change along K", "int8 with one scale per token or tensor, and per channel or for the whole weight")
    if not fits_int8(spec):
        return no(f"{spec.weight} codes are not integers of -128..127 times a step", "a signed or biased integer type")
    if spec.k > 1 << 16:
        return no(f"int32 accumulators over K of {spec.k} can overflow", "K up to 65536")
    return YES


@functools.lru_cache(maxsize=4096)
def scaled_scheme(spec: LinearSpec) -> ScaledScheme:
    """The scheme of a spec that `check_spec` accepts."""
    act = spec.act
    assert act is not None
    fp8, grouped = act.dtype.kind == "float", act.granularity == "group"
    asymmetric = not act.symmetric and not fp8
    columns = -(-spec.k // 16) * 16
    block_rows, offset = (spec.block[0], spec.block_offset[0]) if fp8 else (1, 0)
    per_scale = spec.block[1] // K_BLOCK if spec.block[1] < spec.k else WHOLE_ROW
    one_scale = block_rows + offset >= spec.n + 64 or (block_rows % 64 == 0 and offset % 64 == 0)
    return ScaledScheme(
        ActTraits(
            fp8, act.granularity if act.dynamic else "tensor", asymmetric, act.scale == "e8m0", act.group_size if grouped else 0,
            act.dtype.max() if fp8 else 127.5, torch.finfo(torch.float32).eps, COLUMNS,
            min(WIDE_COLUMNS, max(COLUMNS, 1 << (spec.k - 1).bit_length())) if act.granularity == "token" else WIDE_COLUMNS,
        ),
        ScaledTraits(
            fp8, spec.act_dtype == torch.float16, grouped, asymmetric, False, per_scale,
            act.group_size // K_BLOCK if grouped else 1, one_scale,
        ),
        columns, -(-columns // act.group_size) if grouped else 1, act.limit or math.inf, block_rows, offset,
    )  # fmt: skip
