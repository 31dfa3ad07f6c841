"""The oracle's torchao, from the description of the format. No code of Bitline."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from oracle_files import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F32,
    F64,
    FLOATS,
    Files,
    Layer,
    Stored,
    Tensors,
    bias_of,
    demand,
    expand,
    product,
    stream,
)  # fmt: skip
from oracle_float import blocks, on_grid, positive

_ELEMENTS = {"float8_e4m3fn": (8, E4M3), "float8_e5m2": (8, E5M2), "fp6_e2m3": (6, E2M3), "fp6_e3m2": (6, E3M2),
             "float4_e2m1fn_x2": (4, E2M1)}  # fmt: skip


def layers(files: Files) -> dict[str, Layer]:
    """Every module with a _weight_qdata."""
    out = {}
    for name in files.tensors:
        if name.endswith("._weight_qdata"):
            base = name.removesuffix("._weight_qdata")
            described = json.loads(files.metadata[f"{base}.weight"])
            kind, data, m = described["_type"], described["_data"], files.module(base)
            kinds = {"MXTensor": _mx, "NVFP4Tensor": _nvfp4, "Int4Tensor": _int4}
            layer = kinds[kind](m, data) if kind in kinds else _grid(m, data, kind)
            if "_weight_act_pre_scale" in m:
                layer.extras["input_multiplier"] = m["_weight_act_pre_scale"].scales().reshape(layer.weight.shape[1])
            out[base] = layer
    return out


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value["_data"]


def _grid(m: Tensors, data: dict[str, Any], kind: str) -> Layer:
    """Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor: one code per byte, scales on a grid of blocks."""
    stored, floats = m["_weight_qdata"], kind == "Float8Tensor"
    (n, k), (bn, bk) = stored.shape, data.get("block_size") or stored.shape
    demand(stored.dtype in (("F8_E4M3", "F8_E5M2") if floats else ("I8",)), "codes of another dtype")
    values = stored.floats() if floats else stored.integers()
    bn, bk = min(bn, n), min(bk, k)
    grid = blocks(n, bn), blocks(k, bk)
    bits = int(data["target_dtype"]["_data"].removeprefix("int")) if kind.startswith("Intx") else 8
    half = 1 << (bits - 1)
    demand(floats or (values.min() >= -half and values.max() < half), "codes that do not fit their bits")
    if "_weight_zero_point" in m and not floats:
        zeros = m["_weight_zero_point"]
        zero = (zeros.floats() if zeros.dtype in FLOATS else zeros.integers()).reshape(grid)
        demand((zero == np.round(zero)).all(), "fractional zero points")
        demand(zero.min() >= -half and zero.max() < half, "zero points that do not fit their bits")
        values = values - expand(zero, n, k, bn, bk)
    scale = m["_weight_scale"]
    demand(scale.dtype in FLOATS, "scales of another dtype")
    extras, kwargs = bias_of(m, n), data.get("act_quant_kwargs")
    if kwargs is not None and not floats and "_weight_act_quant_scale" in m:
        extras["input_scale"] = positive(m["_weight_act_quant_scale"].number())
        if (kwargs["_data"].get("mapping_type") or {}).get("_data") == "ASYMMETRIC":
            extras["input_zero"] = np.array(m["_weight_act_quant_zero_point"].number(), F32)
    return Layer(product(values, expand(on_grid(scale, grid), n, k, bn, bk)), extras)


def _codes(m: Tensors, bits: int) -> np.ndarray:
    """One code per byte, or two of four bits, low nibble first."""
    n, columns = m["_weight_qdata"].shape
    raw = m["_weight_qdata"].bytes().reshape(n, columns)
    demand(bits != 6 or raw.max() < 64, "codes of more than six bits")
    return stream(raw, 4, 2 * columns) if bits == 4 else raw.astype(np.int64)


def _scales(m: Tensors, data: dict[str, Any], n: int, k: int) -> tuple[np.ndarray, int]:
    """Scales on their grid, unswizzled from tiles of 128 x 4 if need be, and the columns of a block."""
    size, scale = data["block_size"], m["_weight_scale"]
    demand(type(size) is int and size >= 1, "an empty block")
    rows, columns = n, blocks(k, size)
    if data.get("is_swizzled_scales") is not True:
        return on_grid(scale, (rows, columns)), size
    down, across = -(-rows // 128), -(-columns // 4)
    demand(len(scale.raw) == 512 * down * across and scale.shape in ((32 * down, 16 * across), (512 * down * across,)), "tiles")
    tiles = scale.bytes().reshape(down, across, 32, 4, 4).transpose(0, 3, 2, 1, 4).reshape(128 * down, 4 * across)
    part = np.ascontiguousarray(tiles[:rows, :columns])
    return Stored(scale.dtype, part.shape, part.tobytes()).scales(), size


def _mx(m: Tensors, data: dict[str, Any]) -> Layer:
    name = _name(data["elem_dtype"])
    bits, table = _ELEMENTS[name]
    stored = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}.get(name, "U8")
    demand(m["_weight_qdata"].dtype == stored and m["_weight_scale"].dtype in ("U8", "F8_E8M0"), "other dtypes")
    values = table[_codes(m, bits)]
    (n, k) = values.shape
    scales, size = _scales(m, data, n, k)
    return Layer(product(values, expand(scales, n, k, 1, size)), bias_of(m, n))


def _nvfp4(m: Tensors, data: dict[str, Any]) -> Layer:
    demand(m["_weight_qdata"].dtype == "U8" and m["_weight_scale"].dtype == "F8_E4M3", "other dtypes")
    values = E2M1[_codes(m, 4)]
    (n, k) = values.shape
    scales, size = _scales(m, data, n, k)
    if "_weight_per_tensor_scale" in m:
        global_scale = m["_weight_per_tensor_scale"].number()
        demand(np.isfinite(global_scale), "a global scale that is not finite")
        with np.errstate(all="ignore"):
            scales = (scales.astype(F64) * global_scale).astype(F32)
    extras = bias_of(m, n)
    if data.get("act_quant_kwargs") is not None and "_weight_act_per_tensor_scale" in m:
        value = positive(m["_weight_act_per_tensor_scale"].number())
        demand(1e-35 < value < 1e35, "an input scale without a reciprocal")
        extras["input_scale"] = (1 / value.astype(F64)).astype(F32)
    return Layer(product(values, expand(scales, n, k, 1, size)), extras)


def _int4(m: Tensors, data: dict[str, Any]) -> Layer:
    """Two's complement codes under scales and zero points [G, N], the latter in the weight's units."""
    codes = _codes(m, 4)
    n, k = codes.shape
    (rows, size), (scale, zero) = data["block_size"], (m["_weight_scale"], m["_weight_zero_point"])
    demand(rows == 1 and scale.shape == zero.shape == (blocks(k, min(size, k)), n), "scales of another shape")
    demand(data.get("shape") is None or list(data["shape"]) == [n, k], "a contradicting shape")
    demand(scale.dtype in FLOATS and zero.dtype == scale.dtype, "scales of another dtype")
    weight = product(np.where(codes > 7, codes - 16, codes), expand(scale.scales().T, n, k, 1, size))
    if (data.get("activation_dtype") or {}).get("_data") == "float8_e4m3fn":
        demand(not zero.floats().any(), "zero points of a symmetric weight")
        return Layer(weight, bias_of(m, n))
    with np.errstate(all="ignore"):
        return Layer(weight + expand(zero.scales().T, n, k, 1, size), bias_of(m, n))
