"""The oracle's fp8, ModelOpt and gpt-oss, from the descriptions of the formats. No code of Bitline."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle_files import E2M1, E8M0, F32, F64, Files, Layer, Stored, Tensors, bias_of, demand, expand, product, stream
from oracle_int import AUTO_ROUND

FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ")
SCALAR_SHAPES = ((), (1,), (1, 1))


def on_grid(scale: Stored, grid: tuple[int, int]) -> np.ndarray:
    """Scales in the shape of their grid, which may be stored as a vector (per row) or a scalar (per tensor)."""
    flat = SCALAR_SHAPES if grid == (1, 1) else ((grid[0],),) if grid[1] == 1 else ()
    demand(scale.shape in (grid, *flat), f"scales {scale.shape} for {grid}")
    return scale.scales().reshape(grid)


def blocks(size: int, block: int) -> int:
    """Number of blocks."""
    demand(block >= 1, "an empty block")
    return -(-size // block)


# ---- fp8 -----------------------------------------------------------------------------------------------------------------


def fp8(files: Files) -> dict[str, Layer]:
    """Every module with an FP8 weight, and FP4 experts."""
    out = {}
    for name in files.modules("weight"):
        m = files.module(name)
        if m["weight"].dtype in FP8:
            out[name] = _fp8(m, files.config)
        elif m["weight"].dtype == "I8" and "scale" in m:
            n, columns = m["weight"].shape
            values = E2M1[stream(m["weight"].bytes().reshape(n, columns), 4, 2 * columns)]
            scales = on_grid(m["scale"], (n, blocks(2 * columns, 32)))
            out[name] = Layer(product(values, expand(scales, n, 2 * columns, 1, 32)), bias_of(m, n))
    return out


def _fp8(m: Tensors, config: dict[str, Any]) -> Layer:
    n, k = m["weight"].shape
    demand("weight_zp" not in m, "zero points of minifloats")
    scale = next(m[key] for key in ("weight_scale_inv", "weight_scale", "scale", "qscale_weight") if key in m)
    size = config.get("weight_block_size") or config.get("group_size")
    if isinstance(size, list):
        bn, bk = size
    else:
        bn, bk = (n, k) if scale.shape in SCALAR_SHAPES else (1, k) if scale.shape in ((n,), (n, 1)) else (128, 128)
    flat = isinstance(size, int) and size > 0 and scale.shape in ((n, blocks(k, size)), (n * blocks(k, size),))
    if flat and (bn, bk) == (128, 128):  # AutoRound's groups
        bn, bk, scale = 1, size, Stored(scale.dtype, (n, blocks(k, size)), scale.raw)
    scales = on_grid(scale, (blocks(n, bn), blocks(k, bk)))
    if config.get("weight_scale_semantics") == "inverse":
        demand((np.abs(scales) > 1e-35).all(), "scales without a reciprocal")
        scales = 1 / scales
    extras = bias_of({"bias": m["bias"]}, n) if "bias" in m else {}
    bits = config.get("act_bits") or (16 if config["quant_method"] in AUTO_ROUND else 8)
    static = config.get("activation_scheme") == "static" and bits < 16
    if static:
        inputs = next(m[key] for key in ("input_scale", "activation_scale", "qscale_act") if key in m)
        extras["input_scale"] = positive(inputs.number())
    return Layer(product(m["weight"].floats(), expand(scales, n, k, bn, bk)), extras)


def positive(number: float) -> np.ndarray:
    """A static input scale."""
    demand(0 < number < float("inf"), "an invalid input scale")
    return np.array(number, F32)


# ---- ModelOpt ------------------------------------------------------------------------------------------------------------

# algorithm: (storage of the weight, input_scale)
ALGORITHMS = {
    "FP8": ("fp8", "static"), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", ""), "FP8_PB_WO": ("fp8", ""), "FP8_BLOCK_SCALES": ("fp8", ""),
    "NVFP4": ("nvfp4", "inverse"), "NVFP4_AWQ": ("nvfp4", "inverse"), "W4A16_NVFP4": ("nvfp4", ""),
    "W4A8_NVFP4_FP8": ("nvfp4", "static"), "MXFP4": ("mxfp4", ""), "W4A8_MXFP4_FP8": ("mxfp4", "if calibrated"),
    "MXFP8": ("mxfp8", ""),
    "W4A16_AWQ": ("int4", ""), "W4A8_AWQ": ("int4", "static"), "W8A16": ("int8", ""), "W8A8_SQ_PER_CHANNEL": ("int8", "static"),
}  # fmt: skip


def modelopt(files: Files) -> dict[str, Layer]:
    """Every module whose weight is in 8 or 4 bits."""
    names = [n for n in files.modules("weight") if files.tensors[f"{n}.weight"].dtype in ("F8_E4M3", "U8", "I8")]
    return {name: _modelopt(name, files.module(name), files.config) for name in names}


def _algorithm(config: dict[str, Any], name: str, kind: str) -> tuple[str, int]:
    side = config["hf"]
    found = [c["quant_algo"].upper() for c in (config, side) if c.get("quant_algo")]
    method = {"modelopt_fp4": "NVFP4", "modelopt_mxfp8": "MXFP8", "modelopt_mixed": "MIXED_PRECISION"}
    overall = found[0] if found else method.get(config["quant_method"])
    size = config["group_size"] if config.get("group_size") is not None else side.get("group_size")
    by_layer = config.get("quantized_layers") or side.get("quantized_layers") or {}
    if name in by_layer:
        return by_layer[name]["quant_algo"].upper(), by_layer[name].get("group_size") or 0
    if overall == "MIXED_PRECISION" or overall is None:
        fitting = {(a["quant_algo"].upper(), a.get("group_size") or 0) for a in by_layer.values()}
        fitting = {a for a in fitting if ALGORITHMS[a[0]][0] == kind}
        demand(len(fitting) == 1, "no algorithm for this layer")
        return fitting.pop()
    return overall, size or 0


def _modelopt(name: str, m: Tensors, config: dict[str, Any]) -> Layer:
    weight, scale = m["weight"], m["weight_scale"]
    floats = scale.dtype in ("F16", "BF16", "F32")
    if weight.dtype == "F8_E4M3":
        kind = "fp8" if floats else "mxfp8"
    elif weight.dtype == "U8":
        kind = "int4" if floats else "nvfp4" if scale.dtype == "F8_E4M3" else "mxfp4"
    else:
        kind = "int8"
    algorithm, size = _algorithm(config, name, kind)
    demand(ALGORITHMS[algorithm][0] == kind, "tensors of another algorithm")
    rows, columns = weight.shape
    values, bn, bk = _values(weight, kind, rows, columns), 1, 0
    n, k = values.shape
    if len(scale.shape) == 4 and kind == "fp8":
        scale = Stored(scale.dtype, (scale.shape[0], scale.shape[2]), scale.raw)
    if kind in ("fp8", "int8") and scale.shape in SCALAR_SHAPES:
        bn, bk = n, k
    elif kind in ("fp8", "int8") and scale.shape in ((n,), (n, 1)):
        bn, bk = 1, k
    elif kind == "fp8":
        bn, bk = (size, size) if size else (_even(n, scale.shape[0], 128), _even(k, scale.shape[1], 128))
    elif kind == "mxfp8":
        bn, bk = next(1 << i for i in range(40) if blocks(n, 1 << i) == scale.shape[0]), 32
    elif kind == "mxfp4":
        bk = 32
    else:
        bk = size or _even(k, scale.shape[1] if len(scale.shape) == 2 else 1, 16 if kind == "nvfp4" else 128)
    scales = on_grid(scale, (blocks(n, bn), blocks(k, bk)))
    if kind == "nvfp4":
        global_scale = m["weight_scale_2"].number()
        demand(np.isfinite(global_scale), "a global scale that is not finite")
        with np.errstate(all="ignore"):
            scales = (scales.astype(F64) * global_scale).astype(F32)
    extras = bias_of(m, n) | _inputs(m, ALGORITHMS[algorithm][1])
    if "pre_quant_scale" in m:
        extras["input_multiplier"] = m["pre_quant_scale"].scales().reshape(k)
    return Layer(product(values, expand(scales, n, k, bn, bk)), extras)


def _values(weight: Stored, kind: str, rows: int, columns: int) -> np.ndarray:
    raw = weight.bytes().reshape(rows, columns)
    if kind in ("fp8", "mxfp8"):
        return weight.floats()
    if kind in ("nvfp4", "mxfp4"):
        return E2M1[stream(raw, 4, 2 * columns)]
    if kind == "int8":
        return raw.view(np.int8)
    pairs = np.stack((raw & 15, raw >> 4), 1).reshape(2 * rows, columns).astype(np.int64)  # two rows per byte
    return np.where(pairs > 7, pairs - 16, pairs)


def _even(size: int, blocks: int, default: int) -> int:
    if blocks < 1 or -(-size // default) == blocks or size % blocks:
        return default
    return size // blocks


def _inputs(m: Tensors, how: str) -> dict[str, np.ndarray]:
    if how == "" or (how == "if calibrated" and "input_scale" not in m):
        return {}
    value = positive(m["input_scale"].number())
    if how != "inverse":
        return {"input_scale": value}
    demand(1e-35 < value < 1e35, "an input scale without a reciprocal")
    return {"input_scale": (1 / value.astype(F64)).astype(F32)}


# ---- gpt-oss -------------------------------------------------------------------------------------------------------------


def mxfp4(files: Files) -> dict[str, Layer]:
    """Every expert of every stack."""
    out = {}
    for name in files.tensors:
        if name.endswith("_blocks"):
            stack = name.removesuffix("_blocks")
            packed, scale, bias = files.tensors[name], files.tensors[f"{stack}_scales"], files.tensors.get(f"{stack}_bias")
            experts, n, groups, block_bytes = packed.shape
            demand(block_bytes == 16 and scale.shape == (experts, n, groups) and packed.dtype == "U8", "no stack of experts")
            demand(bias is None or bias.shape == (experts, n), "a bias of another shape")
            values = E2M1[stream(packed.bytes().reshape(experts * n, -1), 4, 32 * groups)].reshape(experts, n, -1)
            scales = np.repeat(E8M0[scale.bytes()].reshape(scale.shape), 32, axis=2)
            for i in range(experts):
                own = {} if bias is None else {"bias": Stored(bias.dtype, (n,), bias.raw[i * len(bias.raw) // experts :])}
                if own:
                    own["bias"].raw = own["bias"].raw[: len(bias.raw) // experts]
                out[f"{stack}.{i}"] = Layer(product(values[i], scales[i]), bias_of(own, n))
    return out
