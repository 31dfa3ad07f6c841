"""The oracle's Quark, from the description of the format. No code of Bitline."""

from __future__ import annotations

import fnmatch
from typing import Any

import numpy as np
from oracle_files import (
    E2M1,
    E2M3,
    E3M2,
    F32,
    F64,
    FLOATS,
    SIZES,
    UE5M3,
    Files,
    Layer,
    Stored,
    Tensors,
    bias_of,
    demand,
    expand,
    product,
    stream,
    stream_int32,
)  # fmt: skip
from oracle_float import blocks, on_grid, positive
from oracle_int import AWQ_ORDER

# Integers: bits, whether codes are two's complement, and codes per stored element (0: a bit stream of bytes).
_INTEGERS = {"int2": (2, True, 1), "uint2": (2, False, 4), "int3": (3, True, 0), "int4": (4, True, 8), "uint4": (4, False, 8),
             "int8": (8, True, 1), "uint8": (8, False, 1)}  # fmt: skip
_MX = {"fp4": (4, E2M1), "fp6_e2m3": (6, E2M3), "fp6_e3m2": (6, E3M2)}
_FP8 = {"fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}


def layers(files: Files) -> dict[str, Layer]:
    """Every module with a weight_scale."""
    return {name: _layer(name, files.module(name), files.config) for name in files.modules("weight_scale")}


def _rule(config: dict[str, Any], name: str) -> dict[str, Any]:
    for pattern, rule in (config.get("layer_quant_config") or {}).items():
        if fnmatch.fnmatchcase(name, pattern):
            return rule or {}
    return (config.get("layer_type_quant_config") or {}).get("Linear") or config["global_quant_config"]


def _layer(name: str, m: Tensors, config: dict[str, Any]) -> Layer:
    rule = _rule(config, name)
    specs = rule["weight"] if isinstance(rule["weight"], list) else [rule["weight"]]
    spec, dtype = specs[0], specs[0]["dtype"]
    reorder = ((config.get("export") or {}).get("pack_method") or "reorder") == "reorder"
    if dtype in _INTEGERS:
        layer = _integers(m, spec, reorder)
    else:
        layer = _mx(m, spec) if dtype == "mx" else _floats(m, spec, len(specs) == 2)
    inputs = rule.get("input_tensors")
    return Layer(layer.weight, layer.extras | _inputs(m, inputs if isinstance(inputs, list) else [inputs]), layer.tolerance)


def _codes(stored: Stored, dtype: str, reorder: bool) -> np.ndarray:
    """Codes along the last dimension, as signed or unsigned numbers."""
    bits, signed, per_element = _INTEGERS[dtype]
    rows = stored.shape[0] if len(stored.shape) == 2 else 1
    if per_element == 8:
        codes = stream_int32(stored.uint32().reshape(rows, -1), 4, 8 * stored.shape[-1])
        if reorder:
            codes = codes.reshape(rows, -1, 8)[:, :, np.argsort(AWQ_ORDER)].reshape(rows, -1)
    elif per_element == 1:
        codes = stored.integers().reshape(rows, -1)
        low = -(1 << (bits - 1)) if signed else 0
        demand(codes.min() >= low and codes.max() < low + (1 << bits), "integers that do not fit their type")
        return codes
    else:
        demand(stored.dtype == "U8", "codes of another dtype")
        raw = stored.bytes().reshape(rows, -1)
        codes = stream(raw, bits, raw.shape[1] * 8 // bits)
        if per_element == 4:  # the first code in the high bits
            codes = codes.reshape(rows, -1, 4)[:, :, ::-1].reshape(rows, -1)
    return np.where(codes >> (bits - 1), codes - (1 << bits), codes) if signed else codes


def _integers(m: Tensors, spec: dict[str, Any], reorder: bool) -> Layer:
    dtype, grouped, scale = spec["dtype"], spec["qscheme"] == "per_group", m["weight_scale"]
    _, signed, per_element = _INTEGERS[dtype]
    demand(scale.dtype in FLOATS, "scales of another dtype")
    codes = _codes(m["weight"], dtype, reorder)
    if grouped and per_element:
        codes = codes.T  # stored as [K, N]
    n, k = (scale.shape[1] if grouped else len(codes)), codes.shape[1]
    demand(n <= len(codes) < n + max(per_element, 1), "another number of rows")
    codes, (bn, bk) = codes[:n], _block(spec, n, k)
    grid = blocks(n, bn), blocks(k, bk)
    scales = expand(scale.scales().T if grouped else on_grid(scale, grid), n, k, bn, bk)
    symmetric, zero = signed and spec.get("symmetric") is not False, np.zeros(grid)
    demand(symmetric or "weight_zero_point" in m, "no zero points")
    if "weight_zero_point" in m:
        zero = _zeros(m["weight_zero_point"], spec, grid, reorder)
        demand(not (symmetric and zero.any()), "zero points of a symmetric weight")
    float_zeros = "weight_zero_point" in m and _has_float_zeros(m["weight_zero_point"], spec)
    with np.errstate(all="ignore"):
        weight = ((codes - expand(zero, n, k, bn, bk)) * scales.astype(F64)).astype(F32)
    return Layer(weight, bias_of(m, n), 2.0**-18 if float_zeros and not symmetric else 0.0)


def _has_float_zeros(stored: Stored, spec: dict[str, Any]) -> bool:
    """Whether zero points are floats, not packed and not limited to the codes' range."""
    return stored.dtype in FLOATS or spec.get("zero_point_type") == "float32"


def _zeros(stored: Stored, spec: dict[str, Any], grid: tuple[int, int], reorder: bool) -> np.ndarray:
    """Zero points on the grid of the scales: floats, or integers packed like the weight."""
    grouped, dtype = spec["qscheme"] == "per_group", spec["dtype"]
    if _has_float_zeros(stored, spec):
        zero = (stored.floats() if stored.dtype in FLOATS else stored.integers()).astype(F64)
        demand(np.isfinite(zero).all(), "zero points that are not finite")
        return (zero.T if zero.ndim == 2 else zero).reshape(grid)
    if grid == (1, 1) and not grouped:
        bits, signed, _ = _INTEGERS[dtype]
        value, low = stored.number(), -(1 << (bits - 1)) if signed else 0
        demand(low <= value < low + (1 << bits), "a zero point that does not fit its type")
        return np.array([[value]])
    if not grouped:  # one line of codes
        stored = Stored(stored.dtype, (1, len(stored.raw) // SIZES[stored.dtype]), stored.raw)
    codes = _codes(stored, dtype, reorder)
    if grouped and dtype == "int3":
        return codes[:, : grid[1]]
    return codes[:, : grid[0]].T


def _block(spec: dict[str, Any], n: int, k: int) -> tuple[int, int]:
    qscheme = spec["qscheme"]
    if qscheme == "per_block":
        rows, columns = spec["block_size"]
        return rows, columns
    return {"per_tensor": (n, k), "per_channel": (1, k), "per_group": (1, spec.get("group_size"))}[qscheme]


def _floats(m: Tensors, spec: dict[str, Any], has_global: bool) -> Layer:
    weight, scale, (n, columns) = m["weight"], m["weight_scale"], m["weight"].shape
    if spec["dtype"] in _MX:
        bits, table = _MX[spec["dtype"]]
        demand(weight.dtype == "U8" and columns * 8 % bits == 0, "bytes that do not hold whole codes")
        values = table[stream(weight.bytes().reshape(n, columns), bits, columns * 8 // bits)]
    else:
        demand(weight.dtype == _FP8[spec["dtype"]], "codes of another dtype")
        values = weight.floats()
    k, scale_format = values.shape[1], spec.get("scale_format")
    bn, bk = _block(spec, n, k)
    if scale_format == "e5m3" and not has_global:
        demand(scale.dtype == "U8", "scales of another dtype")
        numbers = UE5M3[scale.bytes()]
        demand(np.isfinite(numbers).all(), "scales that are not finite")
        scale = Stored("F32", scale.shape, numbers.tobytes())
    demand(scale_format != "e8m0" or has_global or scale.dtype in ("U8", "F8_E8M0"), "scales of another dtype")
    scales = on_grid(scale, (blocks(n, bn), blocks(k, bk)))
    if has_global:
        with np.errstate(all="ignore"):
            scales = (scales.astype(F64) * m["weight_scale_2"].number()).astype(F32)
    return Layer(product(values, expand(scales, n, k, bn, bk)), bias_of(m, n))


def _mx(m: Tensors, spec: dict[str, Any]) -> Layer:
    """Blocks of 32 under two's complement exponents; FP6 is stored as planes of 2 and 4 bits."""
    bits, table = _MX[spec["mx_element_dtype"]]
    n, columns = m["weight"].shape
    raw = m["weight"].bytes().reshape(n, columns)
    if bits == 6:
        high = stream(raw[:, ::3], 2, 4 * (columns // 3)).reshape(n, -1, 4)[:, :, ::-1]
        lower = np.stack((raw[:, 1::3], raw[:, 2::3]), -1).reshape(n, -1)
        low = stream(lower, 4, 4 * (columns // 3)).reshape(n, -1, 2)[:, :, ::-1]
        codes = (high.reshape(n, -1) << 4) | low.reshape(n, -1)
    else:
        codes = stream(raw, 4, 2 * columns)
    k, exponent = codes.shape[1], m["weight_scale"].bytes().view(np.int8).astype(F64)
    demand(m["weight_scale"].shape == (n, blocks(k, 32)), "scales of another shape")
    with np.errstate(all="ignore"):
        scales = np.where(exponent == -128, np.nan, 2.0**exponent).astype(F32).reshape(n, -1)
    return Layer(product(table[codes], expand(scales, n, k, 1, 32)), bias_of(m, n))


def _inputs(m: Tensors, specs: list[Any]) -> dict[str, np.ndarray]:
    specs = [spec for spec in specs if spec is not None]
    if not specs:
        return {}
    spec, dynamic = specs[0], specs[0].get("is_dynamic") is True
    if dynamic and spec.get("dtype") == "fp4" and len(specs) == 2:
        value = positive(m["input_scale_2"].number())
        demand(1e-35 < value < 1e35, "an input scale without a reciprocal")
        return {"input_scale": (1 / value.astype(F64)).astype(F32)}
    if dynamic:
        return {}
    extras = {"input_scale": positive(m["input_scale"].number())}
    if spec.get("dtype") == "uint8" or (spec.get("symmetric") is False and spec.get("dtype") == "int8"):
        shift = 128 if spec["dtype"] == "uint8" else 0
        extras["input_zero"] = np.array(m["input_zero_point"].number() - shift, F32)
    return extras
