"""torchao's minifloats: Float8Tensor, MXTensor and NVFP4Tensor.

Scales of MX and NVFP4 may be stored in the order of a GPU's tensor cores, tiles of 128 rows and 4 scales; they are put back
(NVIDIA, cuBLAS 12.9, "1D Block Scaling Factors Layout").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.formats.base import LayerRecord
from bitline.formats.common.ignored_modules import is_known
from bitline.formats.common.module_tensors import NUMBER
from bitline.formats.torchao.tensor_subclass import DescribedLayer, dtype_of
from bitline.types import ActSpec, LinearSpec, ScalarType

KINDS = ("Float8Tensor", "MXTensor", "NVFP4Tensor")
_FP8 = {torch.float8_e4m3fn: types.float8_e4m3fn, torch.float8_e5m2: types.float8_e5m2}
_BY_NAME = {
    "float8_e4m3fn": types.float8_e4m3fn, "float8_e5m2": types.float8_e5m2, "fp6_e2m3": types.float6_e2m3,
    "fp6_e3m2": types.float6_e3m2, "float4_e2m1fn_x2": types.float4_e2m1,
}  # fmt: skip
_TINY, _HUGE = 1e-35, 1e35  # a global scale of inputs outside has no float32 reciprocal, or one that is nothing


def record(m: DescribedLayer) -> LayerRecord:
    """The record of a weight of one of these kinds."""
    return {"Float8Tensor": _float8, "MXTensor": _mx, "NVFP4Tensor": _nvfp4}[str(m.kind)](m)


def _float8(m: DescribedLayer) -> LayerRecord:
    n, k = m.matrix("_weight_qdata", tuple(_FP8))
    block = m.block(n, k)
    grid = m.scales(n, k, block)
    dtype, factors = m.need("_weight_scale").dtype, m.factors(k)
    spec = LinearSpec(n, k, _FP8[m.main.dtype], block, scale_dtype=dtype, act=_fp8_inputs(m), bias=m.bias(n),
                      input_multiplier=factors)  # fmt: skip

    def build() -> dict[str, Tensor | None]:
        return {
            "codes": m.read("_weight_qdata").view(torch.uint8), "scale": m.read("_weight_scale", *grid),
            "input_multiplier": m.read_factors(k),
        }  # fmt: skip

    return m.record("torchao Float8Tensor", spec, build, {"scale": "_weight_scale"})


def _fp8_inputs(m: DescribedLayer) -> ActSpec | None:
    values = m.values("act_quant_kwargs")
    if values is None:
        return None
    how, scalar = m.granularity(values), _BY_NAME.get(dtype_of(values.get("float8_dtype")) or "float8_e4m3fn")
    low, limit = values.get("hp_value_lb"), values.get("hp_value_ub")
    size = int(how.removeprefix("group")) if how.startswith("group") else 0
    bounded = limit is None or (isinstance(limit, (int, float)) and 0 < limit < math.inf)
    if scalar is None or scalar not in _FP8.values() or not (size or how in ("token", "tensor")) or low or not bounded:
        found = f"act_quant_kwargs: {scalar} {how}, bounds {low} and {limit}"
        raise m.error(m.main, "inputs quantized this way are not supported yet", found, "FP8 per token, tensor or group")
    kind: Any = "group" if size else how
    return ActSpec(scalar, True, kind, size, limit=float(limit or 0))


def _mx(m: DescribedLayer) -> LayerRecord:
    """Elements of FP8, FP6 (one a byte) or FP4 (two a byte, the lower first) under E8M0 scales."""
    scalar = _element(m, m.data.get("elem_dtype"))
    stored = {8: tuple(t for t, s in _FP8.items() if s is scalar), 6: (torch.uint8,), 4: (torch.uint8,)}[scalar.bits]
    n, columns = m.matrix("_weight_qdata", stored)
    k, size = columns * (2 if scalar.bits == 4 else 1), m.size()
    tiled = _scales(m, n, k, size, torch.float8_e8m0fnu)
    spec = LinearSpec(n, k, scalar, (1, size), scale_dtype=torch.float8_e8m0fnu, act=_mx_inputs(m), bias=m.bias(n))

    def build() -> dict[str, Tensor]:
        raw = m.read("_weight_qdata").view(torch.uint8)
        if scalar.bits == 6:
            if int(raw.max()) >= 64:
                raise m.error(m.main, "values do not fit 6 bits", int(raw.max()), "0..63")
            raw = bitstream.pack(raw, 6)
        return {"codes": raw, "scale": _untiled(m.read("_weight_scale"), spec.grid, tiled)}

    return m.record(f"torchao MXTensor {scalar}", spec, build, {"scale": "_weight_scale"})


def _element(m: DescribedLayer, said: object) -> ScalarType:
    name = said if isinstance(said, str) else dtype_of(said)
    if name not in _BY_NAME:
        raise m.error(m.main, "elements of an MX tensor that are not known", repr(said), ", ".join(_BY_NAME))
    return _BY_NAME[name]


def _mx_inputs(m: DescribedLayer) -> ActSpec | None:
    values = m.values("act_quant_kwargs")
    if values is None:
        return None
    scalar, size = _element(m, values.get("elem_dtype")), values.get("block_size", 32)
    if scalar.bits == 6 or type(size) is not int or not 1 <= size < 1 << 31:
        found = f"act_quant_kwargs: {scalar}, block_size {size}"
        raise m.error(m.main, "inputs quantized this way are not supported yet", found, "MXFP8 or MXFP4")
    return ActSpec(scalar, True, "group", size, scale="e8m0")


def _nvfp4(m: DescribedLayer) -> LayerRecord:
    """FP4 under E4M3 scales and, mostly, one global one, all of which multiply."""
    n, columns = m.matrix("_weight_qdata", (torch.uint8,))
    k, size = 2 * columns, m.size()
    tiled = _scales(m, n, k, size, torch.float8_e4m3fn)
    two = m.find("_weight_per_tensor_scale") is not None
    if two:
        m.number("_weight_per_tensor_scale", (torch.float32,))
    static = m.find("_weight_act_per_tensor_scale") is not None
    if static:
        m.number("_weight_act_per_tensor_scale", (torch.float32,))
    act, values = None, m.values("act_quant_kwargs")
    if values is not None:
        inner = values.get("block_size", 16)
        if type(inner) is not int or inner < 1 or values.get("use_dynamic_per_tensor_scale"):
            found = f"block_size {inner}, use_dynamic_per_tensor_scale {values.get('use_dynamic_per_tensor_scale')}"
            expected = "scales of 16 columns under a stored global one, or under none"
            raise m.error(m.main, "inputs quantized this way are not supported yet", found, expected)
        act = ActSpec(types.float4_e2m1, True, "group", inner, scale="e4m3")
    static = static and act is not None
    spec = LinearSpec(n, k, types.float4_e2m1, (1, size), scale_dtype=torch.float8_e4m3fn, act=act, bias=m.bias(n),
                      scale2_block=(n, k) if two else None)  # fmt: skip

    def build() -> dict[str, Tensor | None]:
        return {
            "codes": m.read("_weight_qdata"), "scale": _untiled(m.read("_weight_scale"), spec.grid, tiled),
            "scale2": m.read("_weight_per_tensor_scale", 1, 1).double() if two else None,
            "input_scale": _divisor(m) if static else None,
        }  # fmt: skip

    fields = {"scale": "_weight_scale", "scale2": "_weight_per_tensor_scale", "input_scale": "_weight_act_per_tensor_scale"}
    return m.record("torchao NVFP4Tensor", spec, build, fields)


def _divisor(m: DescribedLayer) -> Tensor:
    """The global scale of inputs, which is stored as a factor and used as a divisor."""
    value = m.read("_weight_act_per_tensor_scale").reshape(()).double()
    if not _TINY < float(value) < _HUGE:
        info = m.need("_weight_act_per_tensor_scale")
        raise m.error(info, "a global scale of inputs that is no scale", float(value), f"{_TINY} to {_HUGE}")
    return value.reciprocal().float()


def _scales(m: DescribedLayer, n: int, k: int, size: int, dtype: torch.dtype) -> bool:
    """Whether scales are in tiles; they have to be of this dtype, and on the grid or on that of whole tiles."""
    said = m.data.get("is_swizzled_scales")
    if not is_known(said, (None, True, False)):
        raise m.error(m.main, "is_swizzled_scales of a weight is not valid", repr(said)[:200], "true or false")
    tiled = said is True
    columns = -(-k // size)
    grid = (32 * -(-n // 128), 16 * -(-columns // 4)) if tiled else (n, columns)
    info = m.need("_weight_scale", (dtype, torch.uint8) if dtype == torch.float8_e8m0fnu else (dtype,))
    if info.shape != grid and not (tiled and info.shape == (math.prod(grid),)) and not (grid == (1, 1) and info.shape in NUMBER):
        raise m.unfit(info, n, k, f"{list(grid)}{' (tiles of 128 x 4)' if tiled else ''}")
    return tiled


def _untiled(stored: Tensor, grid: tuple[int, int], tiled: bool) -> Tensor:
    """Scales [grid] from the order of tiles: 128 rows by 4 columns, of which row 32 i + j is row j, columns 4 i to 4 i + 3."""
    dtype = torch.float8_e8m0fnu if stored.dtype == torch.uint8 else stored.dtype
    if not tiled:
        return stored.view(dtype).reshape(grid)
    down, across = -(-grid[0] // 128), -(-grid[1] // 4)
    whole = stored.view(torch.uint8).reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(128 * down, 4 * across)
    return whole[: grid[0], : grid[1]].contiguous().view(dtype)
