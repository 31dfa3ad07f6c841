"""torchao's minifloats: Float8Tensor, MXTensor and NVFP4Tensor.

Scales of MX and NVFP4 may be swizzled for tensor cores, in tiles of 128 rows by 4 scales ("1D Block Scaling Factors Layout"
in the cuBLAS 12.9 documentation); they are unswizzled here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.formats.base import LayerRecord
from bitline.formats.common.scales import SCALAR_SHAPES
from bitline.formats.common.slices import COLUMNS, ROWS, Axes, byte_axis, scale_axes
from bitline.formats.quant_config import is_allowed
from bitline.formats.torchao.tensor_subclass import SubclassTensors, described_name
from bitline.types import ActSpec, LinearSpec, ScalarType

KINDS = ("Float8Tensor", "MXTensor", "NVFP4Tensor")
_FP8_TYPES = {torch.float8_e4m3fn: types.float8_e4m3fn, torch.float8_e5m2: types.float8_e5m2}
_TYPES = {
    "float8_e4m3fn": types.float8_e4m3fn, "float8_e5m2": types.float8_e5m2, "fp6_e2m3": types.float6_e2m3,
    "fp6_e3m2": types.float6_e3m2, "float4_e2m1fn_x2": types.float4_e2m1,
}  # fmt: skip
_TILE_ROWS, _TILE_COLUMNS = 128, 4


def minifloat_record(m: SubclassTensors) -> LayerRecord:
    """The record of a weight of one of KINDS."""
    return {"Float8Tensor": _float8, "MXTensor": _mx, "NVFP4Tensor": _nvfp4}[str(m.kind)](m)


# ---- Float8Tensor --------------------------------------------------------------------------------------------------------


def _float8(m: SubclassTensors) -> LayerRecord:
    n, k = m.matrix("_weight_qdata", tuple(_FP8_TYPES))
    block = m.scale_block(n, k)
    grid = m.scale_grid(n, k, block)
    dtype, pre_scale = m.require("_weight_scale").dtype, m.has_pre_scale(k)
    spec = LinearSpec(n, k, _FP8_TYPES[m.codes.dtype], block, scale_dtype=dtype, act=_fp8_act(m), bias=m.has_bias(n),
                      input_multiplier=pre_scale)  # fmt: skip

    def read_fields() -> dict[str, Tensor | None]:
        return {
            "codes": m.read("_weight_qdata").view(torch.uint8), "scale": m.read("_weight_scale", *grid),
            "input_multiplier": m.read_pre_scale(k),
        }  # fmt: skip

    layout = m.layout((ROWS, COLUMNS), scale_axes(spec, m.require("_weight_scale").shape))
    return m.record("torchao Float8Tensor", spec, read_fields, {"scale": "_weight_scale"}, layout, _float8)


def _fp8_act(m: SubclassTensors) -> ActSpec | None:
    act = m.attributes("act_quant_kwargs")
    if act is None:
        return None
    granularity, dtype = m.granularity(act), _TYPES.get(described_name(act.get("float8_dtype")) or "float8_e4m3fn")
    low, limit = act.get("hp_value_lb"), act.get("hp_value_ub")
    size = int(granularity.removeprefix("group")) if granularity.startswith("group") else 0
    is_limit = limit is None or (isinstance(limit, (int, float)) and 0 < limit < math.inf)
    known = size or granularity in ("token", "tensor")
    if dtype is None or dtype not in _FP8_TYPES.values() or not known or low or not is_limit:
        found = f"act_quant_kwargs: {dtype} {granularity}, bounds {low} and {limit}"
        raise m.error(m.codes, "inputs quantized this way are not supported yet", found, "FP8 per token, tensor or group")
    kind: Any = "group" if size else granularity
    return ActSpec(dtype, True, kind, size, limit=float(limit or 0))


# ---- MXTensor ------------------------------------------------------------------------------------------------------------


def _mx(m: SubclassTensors) -> LayerRecord:
    """FP8, FP6 (one code per byte) or FP4 (two, low nibble first) under E8M0 scales."""
    weight = _mx_type(m, m.data.get("elem_dtype"))
    stored = {8: tuple(t for t, s in _FP8_TYPES.items() if s is weight), 6: (torch.uint8,), 4: (torch.uint8,)}[weight.bits]
    n, columns = m.matrix("_weight_qdata", stored)
    k, block_k = columns * (2 if weight.bits == 4 else 1), m.block_size()
    swizzled = _check_scales(m, n, k, block_k, torch.float8_e8m0fnu)
    spec = LinearSpec(n, k, weight, (1, block_k), scale_dtype=torch.float8_e8m0fnu, act=_mx_act(m), bias=m.has_bias(n))

    def read_fields() -> dict[str, Tensor]:
        codes = m.read("_weight_qdata").view(torch.uint8)
        if weight.bits == 6:
            if int(codes.max()) >= 64:
                raise m.error(m.codes, "values do not fit 6 bits", int(codes.max()), "0..63")
            codes = bitstream.pack(codes, 6)
        return {"codes": codes, "scale": _unswizzle(m.read("_weight_scale"), spec.grid, swizzled)}

    codes = (ROWS, byte_axis(4) if weight.bits == 4 else COLUMNS)
    layout = m.layout(codes, _scale_axes(spec, m.require("_weight_scale").shape, swizzled))
    return m.record(f"torchao MXTensor {weight}", spec, read_fields, {"scale": "_weight_scale"}, layout, _mx)


def _mx_type(m: SubclassTensors, declared: object) -> ScalarType:
    name = declared if isinstance(declared, str) else described_name(declared)
    if name not in _TYPES:
        raise m.error(m.codes, "elements of an MX tensor that are not known", repr(declared), ", ".join(_TYPES))
    return _TYPES[name]


def _mx_act(m: SubclassTensors) -> ActSpec | None:
    act = m.attributes("act_quant_kwargs")
    if act is None:
        return None
    dtype, size = _mx_type(m, act.get("elem_dtype")), act.get("block_size", 32)
    if dtype.bits == 6 or type(size) is not int or not 1 <= size < 1 << 31:
        found = f"act_quant_kwargs: {dtype}, block_size {size}"
        raise m.error(m.codes, "inputs quantized this way are not supported yet", found, "MXFP8 or MXFP4")
    return ActSpec(dtype, True, "group", size, scale="e8m0")


# ---- NVFP4Tensor ---------------------------------------------------------------------------------------------------------


def _nvfp4(m: SubclassTensors) -> LayerRecord:
    """FP4 under E4M3 block scales and mostly a global scale, all of which multiply."""
    n, columns = m.matrix("_weight_qdata", (torch.uint8,))
    k, block_k = 2 * columns, m.block_size()
    swizzled = _check_scales(m, n, k, block_k, torch.float8_e4m3fn)
    has_global = _has_global_scale(m, "_weight_per_tensor_scale")
    has_act_global = _has_global_scale(m, "_weight_act_per_tensor_scale")
    act = _nvfp4_act(m)
    has_act_global = has_act_global and act is not None
    if not has_act_global:
        m.leave_unused("_weight_act_per_tensor_scale")
    spec = LinearSpec(n, k, types.float4_e2m1, (1, block_k), scale_dtype=torch.float8_e4m3fn, act=act, bias=m.has_bias(n),
                      scale2_block=(n, k) if has_global else None)  # fmt: skip

    def read_fields() -> dict[str, Tensor | None]:
        return {
            "codes": m.read("_weight_qdata"), "scale": _unswizzle(m.read("_weight_scale"), spec.grid, swizzled),
            "scale2": m.read("_weight_per_tensor_scale", 1, 1).double() if has_global else None,
            # torchao's multiplies, the canonical one divides.
            "input_scale": m.read_reciprocal("_weight_act_per_tensor_scale") if has_act_global else None,
        }  # fmt: skip

    stored_as = {"scale": "_weight_scale", "scale2": "_weight_per_tensor_scale", "input_scale": "_weight_act_per_tensor_scale"}
    layout = m.layout((ROWS, byte_axis(4)), _scale_axes(spec, m.require("_weight_scale").shape, swizzled))
    return m.record("torchao NVFP4Tensor", spec, read_fields, stored_as, layout, _nvfp4)


def _scale_axes(spec: LinearSpec, shape: tuple[int, ...], swizzled: bool) -> Axes | None:
    """Swizzled scales are in the order of tiles, which no part of the weight has alone."""
    return None if swizzled else scale_axes(spec, shape)


def _has_global_scale(m: SubclassTensors, suffix: str) -> bool:
    if m.find(suffix) is None:
        return False
    m.scalar(suffix, (torch.float32,))
    return True


def _nvfp4_act(m: SubclassTensors) -> ActSpec | None:
    act = m.attributes("act_quant_kwargs")
    if act is None:
        return None
    size, dynamic_global = act.get("block_size", 16), act.get("use_dynamic_per_tensor_scale")
    if type(size) is not int or size < 1 or dynamic_global:
        found = f"block_size {size}, use_dynamic_per_tensor_scale {dynamic_global}"
        expected = "a scale per 16 columns under a stored global scale, or under none"
        raise m.error(m.codes, "inputs quantized this way are not supported yet", found, expected)
    return ActSpec(types.float4_e2m1, True, "group", size, scale="e4m3")


# ---- swizzled scales -----------------------------------------------------------------------------------------------------


def _check_scales(m: SubclassTensors, n: int, k: int, block_k: int, dtype: torch.dtype) -> bool:
    """Whether scales are swizzled; they must be of this dtype, on the grid of scale blocks or of whole tiles."""
    declared = m.data.get("is_swizzled_scales")
    if not is_allowed(declared, (None, True, False)):
        raise m.error(m.codes, "is_swizzled_scales of a weight is not valid", repr(declared)[:200], "true or false")
    swizzled = declared is True
    columns = -(-k // block_k)
    grid = (32 * -(-n // _TILE_ROWS), 16 * -(-columns // _TILE_COLUMNS)) if swizzled else (n, columns)
    info = m.require("_weight_scale", (dtype, torch.uint8) if dtype == torch.float8_e8m0fnu else (dtype,))
    flat = swizzled and info.shape == (math.prod(grid),)
    if info.shape != grid and not flat and not (grid == (1, 1) and info.shape in SCALAR_SHAPES):
        raise m.scale_shape_error(info, n, k, f"{list(grid)}{' (tiles of 128 x 4)' if swizzled else ''}")
    return swizzled


def _unswizzle(stored: Tensor, grid: tuple[int, int], swizzled: bool) -> Tensor:
    """Scales [grid]. Row 32 i + j of a tile of 128 rows by 4 columns is stored in row j, columns 4 i to 4 i + 3."""
    dtype = torch.float8_e8m0fnu if stored.dtype == torch.uint8 else stored.dtype
    if not swizzled:
        return stored.view(dtype).reshape(grid)
    down, across = -(-grid[0] // _TILE_ROWS), -(-grid[1] // _TILE_COLUMNS)
    tiles = stored.view(torch.uint8).reshape(down, across, 32, 4, _TILE_COLUMNS)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(_TILE_ROWS * down, _TILE_COLUMNS * across)
    return whole[: grid[0], : grid[1]].contiguous().view(dtype)
