"""The oracle's bitsandbytes and HQQ, from the descriptions of the formats. No code of Bitline."""

from __future__ import annotations

import json

import numpy as np
from oracle_files import (
    F32,
    F64,
    Files,
    Layer,
    Tensors,
    bias_of,
    demand,
    expand,
    product,
)  # fmt: skip
from oracle_float import SCALAR_SHAPES

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
            demand("weight_format" not in m or m["weight_format"].number() == 0, "codes in the tile order of a GPU")
            n, k = m["weight"].shape
            demand(m["weight"].dtype == "I8" and m["SCB"].dtype == "F32", "other dtypes")
            scale = (m["SCB"].scales().astype(F64) / 127).astype(F32).reshape(n, 1)
            out[base] = Layer(product(m["weight"].integers(), expand(scale, n, k, 1, k)), bias_of(m, n))
    return out


def _four_bits(m: Tensors) -> Layer:
    state = json.loads(next(t.raw for key, t in m.items() if key.startswith(_STATE)))
    (n, k), block = state["shape"], state["blocksize"]
    demand(state.keys() <= _KEYS and state.get("nested_dtype", "float32") == "float32", "a quant_state of another kind")
    raw, count = m["weight"].bytes(), n * k
    demand(0 <= len(raw) - -(-count // 2) < 4, "another number of codes")  # floats hold up to three bytes more
    codes = np.stack((raw >> 4, raw & 15), 1).reshape(-1)[:count]
    absmax, scales = m["weight.absmax"], -(-count // block)
    demand(absmax.shape == (scales,), "another number of scales")
    if "nested_blocksize" in state:
        nested = m["weight.nested_absmax"].scales()[np.arange(scales) // state["nested_blocksize"]]
        with np.errstate(all="ignore"):
            scale = m["weight.nested_quant_map"].floats()[absmax.bytes()] * nested + F32(state["nested_offset"])
        demand(np.isfinite(scale).all(), "scales that are not finite")
    else:
        scale = absmax.scales()
    table = m["weight.quant_map"].floats()
    kind = "nf4" if np.array_equal(table, _NF4) else "fp4" if np.array_equal(table, _FP4) else None
    demand(kind == state["quant_type"], "an unknown quant_map")
    return Layer(product(table[codes], scale[np.arange(count) // block]).reshape(n, k), bias_of(m, n))


# The tables as bitsandbytes stores them.
_NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], F32)  # fmt: skip
_FP4 = (np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], F32) / F32(12)).astype(F32)


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
    bits, shifts = _PACKINGS[m["packing"].raw.decode("ascii", "replace")]
    axis = m["axis"].number()
    demand(n >= 1 and k >= 1 and axis in (0, 1), "an invalid shape or axis")
    demand(not any(m[key].number() for key in ("quant_scale", "quant_zero") if key in m), "quantized scales")
    per_tensor = "scale" in m and m["scale"].shape in SCALAR_SHAPES and "channel_wise" in m and m["channel_wise"].number() == 0
    size = n * k if per_tensor else int(m["group_size"].number()) if "group_size" in m else k if axis == 1 else n
    demand(size >= 1 and n * k % size == 0, "groups that do not fill the weight")
    groups = n * k // size
    rows = n if per_tensor else groups if axis == 1 else size  # of the packed matrix: groups are its rows or its columns
    stored = np.frombuffer(m["W_q"].raw, "<i4" if bits == 3 else np.uint8).astype(np.int64)
    demand(len(stored) == -(-rows // len(shifts)) * (n * k // rows), "another number of codes")
    codes = np.concatenate([(stored >> shift) & ((1 << bits) - 1) for shift in shifts])[: n * k].reshape(rows, -1)
    if "scale" not in m and "zero_scale" in m:  # stacked in one tensor
        parts, exact = m["zero_scale"].scales().astype(F64).reshape(2, -1)[::-1], m["zero_scale"].dtype != "F32"
    else:
        parts, exact = (
            [m[key].scales().astype(F64) for key in ("scale", "zero")],
            not {m["scale"].dtype, m["zero"].dtype} & {"F32"},
        )
    scale, zero = (part.reshape((1, 1) if per_tensor else (groups, 1) if axis == 1 else (1, groups)) for part in parts)
    with np.errstate(all="ignore"):
        weight = ((codes - zero) * scale).astype(F32)
    return Layer(weight.reshape(n, k), bias_of(m, n), 0.0 if exact else 2.0**-22)
