"""The oracle's bitsandbytes, Quark, HQQ and torchao, from the descriptions of the formats. No code of Bitline."""

from __future__ import annotations

import fnmatch
import json
from typing import Any

import numpy as np
from oracle_files import (
    E2M1,
    E2M3,
    E3M2,
    F32,
    F64,
    HALVES,
    Files,
    Layer,
    Stored,
    Tensors,
    bias_of,
    demand,
    product,
    spread,
    stream,
    word_stream,
)  # fmt: skip
from oracle_float import NUMBER, blocks, on_grid, positive
from oracle_int import AWQ

# ---- bitsandbytes --------------------------------------------------------------------------------------------------------

_STATE = "weight.quant_state.bitsandbytes__"
_KEYS = {"quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset"}


def bitsandbytes(files: Files) -> dict[str, Layer]:
    """Every module with a quant_state or an SCB."""
    out = {}
    for name in files.tensors:
        base, found, _ = name.partition(f".{_STATE}")
        if found:
            out[base] = _four_bits(files.module(base))
        elif name.endswith(".SCB"):
            base = name.removesuffix(".SCB")
            m = files.module(base)
            demand("weight_format" not in m or m["weight_format"].number() == 0, "codes in the order of a GPU")
            n, k = m["weight"].shape
            demand(m["weight"].dtype == "I8" and m["SCB"].dtype == "F32", "other types")
            scale = (m["SCB"].scales().astype(F64) / 127).astype(F32).reshape(n, 1)
            out[base] = Layer(product(m["weight"].integers(), spread(scale, n, k, 1, k)), bias_of(m, n))
    return out


def _four_bits(m: Tensors) -> Layer:
    state = json.loads(next(t.raw for key, t in m.items() if key.startswith(_STATE)))
    (n, k), block = state["shape"], state["blocksize"]
    demand(state.keys() <= _KEYS and state.get("nested_dtype", "float32") == "float32", "a quant_state of another kind")
    raw, count = m["weight"].bytes(), n * k
    demand(len(raw) >= -(-count // 2), "fewer codes than weights")
    codes = np.stack((raw >> 4, raw & 15), 1).reshape(-1)[:count]
    absmax, scales = m["weight.absmax"], -(-count // block)
    demand(absmax.shape == (scales,), "scales of another number")
    if "nested_blocksize" in state:
        coarse = m["weight.nested_absmax"].scales()[np.arange(scales) // state["nested_blocksize"]]
        with np.errstate(all="ignore"):
            scale = m["weight.nested_quant_map"].floats()[absmax.bytes()] * coarse + F32(state["nested_offset"])
        demand(np.isfinite(scale).all(), "scales that are not finite")
    else:
        scale = absmax.scales()
    table = m["weight.quant_map"].floats()
    kind = "nf4" if np.array_equal(table, _NF4) else "fp4" if np.array_equal(table, _FP4) else None
    demand(kind == state["quant_type"], "a table of no known type")
    return Layer(product(table[codes], scale[np.arange(count) // block]).reshape(n, k), bias_of(m, n))


# The tables as bitsandbytes stores them.
_NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], F32)  # fmt: skip
_FP4 = (np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], F32) / F32(12)).astype(F32)


# ---- Quark ---------------------------------------------------------------------------------------------------------------


def quark(files: Files) -> dict[str, Layer]:
    """Every module with a weight_scale."""
    return {name: _quark(name, files.module(name), files.config) for name in files.modules("weight_scale")}


def _rule(config: dict[str, Any], name: str) -> dict[str, Any]:
    by_name = config.get("layer_quant_config") or {}
    for pattern, rule in by_name.items():
        if fnmatch.fnmatchcase(name, pattern):
            return rule or {}
    return (config.get("layer_type_quant_config") or {}).get("Linear") or config["global_quant_config"]


def _quark(name: str, m: Tensors, config: dict[str, Any]) -> Layer:
    rule = _rule(config, name)
    specs = rule["weight"] if isinstance(rule["weight"], list) else [rule["weight"]]
    spec, dtype = specs[0], specs[0]["dtype"]
    export = config.get("export") or {}
    if dtype in ("int4", "uint4"):
        layer = _quark_words(m, spec, (export.get("pack_method") or "reorder") == "reorder")
    else:
        layer = _quark_rows(m, spec, len(specs) == 2)
    return Layer(layer.weight, layer.extras | _quark_inputs(m, rule.get("input_tensors")))


def _quark_words(m: Tensors, spec: dict[str, Any], reorder: bool) -> Layer:
    (groups, n), (k, words) = m["weight_scale"].shape, m["weight"].shape
    signed, size = spec["dtype"] == "int4", spec["group_size"]
    demand(words == -(-n // 8) and m["weight_scale"].dtype in HALVES, "words that do not fit")

    def columns(stored: Stored) -> np.ndarray:
        codes = word_stream(stored.words(), 4, 8 * words)
        if reorder:
            codes = codes.reshape(len(codes), -1, 8)[:, :, np.argsort(AWQ)].reshape(len(codes), -1)
        codes = codes[:, :n]
        return np.where(codes > 7, codes - 16, codes) if signed else codes

    zeros = columns(m["weight_zero_point"]) if "weight_zero_point" in m else np.zeros((groups, n), np.int64)
    symmetric = signed and spec.get("symmetric") is not False
    demand(zeros.shape == (groups, n) and (not symmetric or not zeros.any()), "zero points of a symmetric weight")
    demand(symmetric or "weight_zero_point" in m, "no zero points")
    values = columns(m["weight"]).T - spread(zeros.T, n, k, 1, size)
    return Layer(product(values, spread(m["weight_scale"].scales().T, n, k, 1, size)), bias_of(m, n))


def _quark_rows(m: Tensors, spec: dict[str, Any], two: bool) -> Layer:
    weight, dtype, scale = m["weight"], spec["dtype"], m["weight_scale"]
    n, columns = weight.shape
    if dtype in ("fp4", "fp6_e2m3", "fp6_e3m2"):
        width, table = (4, E2M1) if dtype == "fp4" else (6, E2M3 if dtype == "fp6_e2m3" else E3M2)
        demand(weight.dtype == "U8" and columns * 8 % width == 0, "bytes that hold no whole codes")
        values = table[stream(weight.bytes().reshape(n, columns), width, columns * 8 // width)]
    elif dtype in ("int8", "uint8"):
        demand(weight.dtype == {"int8": "I8", "uint8": "U8"}[dtype], "other codes")
        values = weight.integers()
    else:
        demand(weight.dtype == {"fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}[dtype], "other codes")
        values = weight.floats()
    k, how = values.shape[1], spec["qscheme"]
    block = {"per_tensor": (n, k), "per_channel": (1, k), "per_group": (1, spec.get("group_size"))}.get(how)
    bn, bk = block or spec["block_size"]
    grid = blocks(n, bn), blocks(k, bk)
    if "weight_zero_point" in m and dtype in ("int8", "uint8"):
        zero = m["weight_zero_point"].integers().reshape(grid)
        symmetric = dtype == "int8" and spec.get("symmetric") is not False
        low = -128 if dtype == "int8" else 0
        demand(not (symmetric and zero.any()) and zero.min() >= low and zero.max() <= low + 255, "zero points out of range")
        values = values - spread(zero, n, k, bn, bk)
    if spec.get("scale_format") == "e8m0" and not two:
        demand(scale.dtype in ("U8", "F8_E8M0"), "scales of another type")
    scales = on_grid(scale, grid)
    if two:
        with np.errstate(all="ignore"):
            scales = (scales.astype(F64) * m["weight_scale_2"].number()).astype(F32)
    demand(np.isfinite(scales).all() or scale.dtype in ("U8", "F8_E8M0") or two, "scales that are not finite")
    return Layer(product(values, spread(scales, n, k, bn, bk)), bias_of(m, n))


def _quark_inputs(m: Tensors, inputs: Any) -> dict[str, np.ndarray]:
    specs = inputs if isinstance(inputs, list) else [] if inputs is None else [inputs]
    if not specs:
        return {}
    if specs[0].get("dtype") == "fp4":
        if len(specs) < 2:
            return {}
        value = positive(m["input_scale_2"].number())
        demand(1e-35 < value < 1e35, "an input scale without a reciprocal")
        return {"input_scale": (1 / value.astype(F64)).astype(F32)}
    return {} if specs[0].get("is_dynamic") is True else {"input_scale": positive(m["input_scale"].number())}


# ---- HQQ -----------------------------------------------------------------------------------------------------------------

_PACKINGS = {
    "8bit_u8": (8, [0]), "4bit_u8": (4, [4, 0]), "2bit_u8": (2, [6, 4, 2, 0]), "1bit_u8": (1, [7, 6, 5, 4, 3, 2, 1, 0]),
    "3bit_32": (3, [27, 24, 21, 18, 15, 12, 9, 6, 3, 0]),
}  # fmt: skip


def hqq(files: Files) -> dict[str, Layer]:
    """Every module with a W_q."""
    return {name: _hqq(files.module(name)) for name in files.modules("W_q")}


def _hqq(m: Tensors) -> Layer:
    n, k = (int(size) for size in m["shape"].integers())
    width, shifts = _PACKINGS[m["packing"].raw.decode("ascii", "replace")]
    demand(n >= 1 and k >= 1 and m["axis"].number() == 1, "a shape or axis that is none")
    demand(not any(m[key].number() for key in ("quant_scale", "quant_zero") if key in m), "quantized scales")
    size = int(m["group_size"].number()) if "group_size" in m else k
    demand(size >= 1 and n * k % size == 0, "groups that do not fill the weight")
    rows = n * k // size
    stored = np.frombuffer(m["W_q"].raw, "<i4" if width == 3 else np.uint8).astype(np.int64)
    demand(len(stored) == -(-rows // len(shifts)) * size, "codes of another number")
    codes = np.concatenate([(stored >> shift) & ((1 << width) - 1) for shift in shifts])[: n * k].reshape(rows, size)
    scale, zero = (m[key].scales().astype(F64).reshape(rows, 1) for key in ("scale", "zero"))
    with np.errstate(all="ignore"):
        weight = ((codes - zero) * scale).astype(F32)
    exact = m["scale"].dtype != "F32" and m["zero"].dtype != "F32"
    return Layer(weight.reshape(n, k), bias_of(m, n), 0.0 if exact else 2.0**-22)


# ---- torchao -------------------------------------------------------------------------------------------------------------


def torchao(files: Files) -> dict[str, Layer]:
    """Every module with a _weight_qdata."""
    names = [name.removesuffix("._weight_qdata") for name in files.tensors if name.endswith("._weight_qdata")]
    return {name: _torchao(files.module(name), json.loads(files.metadata[f"{name}.weight"])) for name in names}


def _torchao(m: Tensors, described: dict[str, Any]) -> Layer:
    data, stored = described["_data"], m["_weight_qdata"]
    (n, k), (bn, bk) = stored.shape, data["block_size"]
    floats = described["_type"] == "Float8Tensor"
    demand(stored.dtype in (("F8_E4M3", "F8_E5M2") if floats else ("I8",)), "other codes")
    values = stored.floats() if floats else stored.integers()
    bn, bk = min(bn, n), min(bk, k)
    grid = blocks(n, bn), blocks(k, bk)
    width = int(data["target_dtype"]["_data"].removeprefix("int")) if described["_type"].startswith("Intx") else 8
    half = 1 << (width - 1)
    demand(floats or (values.min() >= -half and values.max() < half), "codes that do not fit their bits")
    if "_weight_zero_point" in m and not floats:
        stored = m["_weight_zero_point"]
        zero = (stored.floats() if stored.dtype in HALVES else stored.integers()).reshape(grid)
        demand((zero == np.round(zero)).all(), "zero points that are fractions")
        demand(zero.min() >= -half and zero.max() < half, "zero points that do not fit their bits")
        values = values - spread(zero, n, k, bn, bk)
    demand(m["_weight_scale"].shape not in NUMBER[1:] or grid == (1, 1) or grid[0] == 1, "scales of another shape")
    return Layer(product(values, spread(on_grid(m["_weight_scale"], grid), n, k, bn, bk)), bias_of(m, n))
