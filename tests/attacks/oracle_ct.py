"""The oracle's compressed-tensors, and AutoRound in its layout, from the descriptions of the formats. No code of Bitline."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from oracle_files import (
    E2M1,
    E2M3,
    F32,
    F64,
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
)
from oracle_float import blocks, on_grid, positive
from oracle_int import AUTO_ROUND

INT4, INT8, FP8 = ({"num_bits": 4}, {"num_bits": 8}, {"num_bits": 8, "type": "float"})
FP4 = {"num_bits": 4, "type": "float"}
_STATIC = {"strategy": "tensor", "dynamic": False}
_TOKEN = {"strategy": "token", "dynamic": True}
_PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "FP8": (FP8 | {"strategy": "tensor"}, FP8 | _STATIC), "FP8_DYNAMIC": (FP8 | {"strategy": "channel"}, FP8 | _TOKEN),
    "FP8_BLOCK": (FP8 | {"strategy": "block", "block_structure": [128, 128]}, FP8 | _TOKEN),
    "NVFP4": (FP4 | {"strategy": "tensor_group", "group_size": 16}, FP4 | {"strategy": "tensor_group", "dynamic": "local"}),
    "NVFP4A16": (FP4 | {"strategy": "tensor_group", "group_size": 16}, None), "MXFP4A16": (FP4 | {"group_size": 32}, None),
    "MXFP4": (FP4 | {"group_size": 32}, FP4 | _TOKEN), "MXFP8": (FP8 | {"group_size": 32}, FP8 | _TOKEN),
    "MXFP4XFP8": (FP4 | {"group_size": 32}, FP8 | _TOKEN), "MXFP8A16": (FP8 | {"group_size": 32}, None),
    "MXFP6A8": ({"num_bits": 6, "type": "float", "group_size": 32}, FP8 | _TOKEN),
    "MXFP6A16": ({"num_bits": 6, "type": "float", "group_size": 32}, None),
}  # fmt: skip


def layers(files: Files) -> dict[str, Layer]:
    """Every module whose `weight_packed` or `weight` is codes."""
    out = {}
    for name in files.modules("weight_packed", "weight"):
        m = files.module(name)
        if "weight_packed" in m or m["weight"].dtype in ("I8", "F8_E4M3", "F8_E5M2"):
            out[name] = _layer(m, _Scheme(files.config, name))
    return out


class _Scheme:
    """The scheme of one module. infer_sizes: group sizes follow from the shape of the scales."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.infer_sizes, self.version = True, str(config.get("version") or "")[:40]
        self.format, self.mx_int = config.get("format"), str(config.get("data_type")).startswith("mx_int")
        if config["quant_method"] in AUTO_ROUND:
            self.weights, self.inputs = _auto_round(config, name)
            if config.get("data_type") == "nvfp4_v2":
                self.format = "nvfp4-e5m3-pack-quantized"
            return
        rules = [
            (target, group)
            for key, group in (config.get("config_groups") or {}).items()
            for target in (group if isinstance(group, list) else group["targets"])
            for group in [key if isinstance(group, list) else group]
            if (group != "UNQUANTIZED" if isinstance(group, str) else group.get("weights"))
        ]
        named = [g for t, g in rules if t == name]
        matched = [g for t, g in rules if t.startswith("re:") and re.match(t[3:], name)]
        classes = [g for t, g in rules if t.endswith("Linear") and not t.startswith("re:")]
        found = [*named, *matched, *classes]
        demand(found, "no group targets the layer")
        if isinstance(found[0], str):
            self.weights, self.inputs = _preset(found[0].upper())
        else:
            self.infer_sizes, self.weights, self.inputs = False, found[0]["weights"], found[0].get("input_activations")
            self.format = found[0].get("format") or self.format

    @property
    def bits(self) -> int:
        return self.weights.get("num_bits", 8)

    @property
    def is_float(self) -> bool:
        return str(self.weights.get("type", "int")).lower() == "float"

    @property
    def symmetric(self) -> bool:
        return self.weights.get("symmetric", True)

    @property
    def dense(self) -> bool:
        """Whether this version packs 3, 5, 6 and 7 bits as one stream."""
        numbers = [int(number) for number in re.findall(r"\d+", self.version)[:2]]
        return len(numbers) < 2 or numbers >= [0, 18]

    def block(self, n: int, k: int, shape: tuple[int, ...]) -> tuple[int, int]:
        size = self.weights.get("group_size")
        strategy = self.weights.get("strategy") or ("tensor" if not size else "channel" if size == -1 else "group")
        strategy = strategy.lower()
        if self.infer_sizes and shape in ((), (1,), (1, 1)):
            strategy = "tensor"
        elif self.infer_sizes and strategy != "block":
            if len(shape) == 1 or shape[-1] == 1:
                strategy = "channel"
            elif strategy in ("group", "channel", "tensor"):
                fits = strategy == "group" and size and size > 0 and blocks(k, size) == shape[1]
                strategy, size = "group", size if fits else blocks(k, shape[1])
        if strategy == "block":
            sizes = self.weights["block_structure"]
            rows, columns = (int(s) for s in (sizes.lower().split("x") if isinstance(sizes, str) else sizes))
            return rows, columns
        return {"tensor": (n, k), "channel": (1, k), "group": (1, size), "tensor_group": (1, size)}[strategy]


def _preset(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    if name in _PRESETS:
        return _PRESETS[name]
    found = re.fullmatch(r"(?:INT8|W([2-8])A(4|8|16|FP8)(_ASYM)?)", name)
    demand(found, "no preset")
    weights = {"num_bits": int(found[1] or 8), "symmetric": not found[3], "strategy": "group", "group_size": 128}
    return weights, None if found[2] == "16" else _TOKEN


def _auto_round(config: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    chosen = dict(config)
    for key, change in (config.get("extra_config") or {}).items():
        if key == name or (not re.fullmatch(r"[\w.]*", key) and re.search(key, name)):
            chosen |= change
    kind, size = str(chosen.get("data_type", "int")), chosen["group_size"]
    strategy = "block" if isinstance(size, list) else {-1: "channel", 0: "tensor"}.get(size, "group")
    weights = {"num_bits": chosen["bits"], "type": "int" if kind.startswith(("int", "mx_int")) else "float", "strategy": strategy,
               "symmetric": chosen.get("sym", True), "group_size": size, "block_structure": size}  # fmt: skip
    if strategy == "group" and kind.startswith("nv"):
        weights["strategy"] = "tensor_group"
    if (chosen.get("act_bits") or 16) >= 16:
        return weights, None
    act_size = chosen.get("act_group_size") or 0
    fourth = (chosen.get("act_data_type") or kind).startswith("nv")
    dynamic = "local" if fourth and act_size > 0 else chosen.get("act_dynamic", True)
    strategy = "tensor_group" if fourth and act_size > 0 else "tensor" if act_size == 0 else "token"
    act_type = "int" if (chosen.get("act_data_type") or kind).startswith("int") else "float"
    return weights, {"type": act_type, "dynamic": dynamic, "strategy": strategy, "symmetric": chosen.get("act_sym", True)}


def _layer(m: Tensors, scheme: _Scheme) -> Layer:
    if "weight_packed" in m and m["weight_packed"].dtype == "I32":
        return _pack_quantized(m, scheme)
    if "weight_packed" in m and not scheme.is_float:
        return _mx_int(m, scheme)
    if "weight_packed" in m:
        bits = 6 if scheme.bits == 6 else 4
        n, columns = m["weight_packed"].shape
        k = columns * 8 // bits
        values = (E2M3 if bits == 6 else E2M1)[stream(m["weight_packed"].bytes().reshape(n, columns), bits, k)]
    else:
        n, k = m["weight"].shape
        floats = m["weight"].dtype.startswith("F8")
        demand(scheme.is_float == floats and (scheme.bits == 8 or not floats), "codes that contradict the config")
        values = m["weight"].floats() if floats else m["weight"].integers()
        half = 1 << (scheme.bits - 1)
        demand(floats or (values.min() >= -half and values.max() < half), "codes that do not fit their bits")
    block = scheme.block(n, k, m["weight_scale"].shape)
    grid = blocks(n, block[0]), blocks(k, block[1])
    scales = on_grid(_e5m3_values(m["weight_scale"]) if _is_e5m3(m, scheme) else m["weight_scale"], grid)
    demand(scheme.symmetric or not scheme.is_float or "weight_zero_point" not in m, "zero points of minifloats")
    if "weight" in m and "weight_packed" not in m and not scheme.is_float and not scheme.symmetric:
        values = values - expand(_zeros(m, scheme, grid), n, k, *block)
    if "weight_packed" in m and "weight_global_scale" in m:
        divisor = m["weight_global_scale"].number()
        demand(1e-35 < divisor < float("inf"), "a global scale without a reciprocal")
        with np.errstate(all="ignore"):
            scales = (scales.astype(F64) * (1 / F64(divisor))).astype(F32)
    return Layer(product(values, expand(scales, n, k, *block)), _extras(m, scheme, n))


def _is_e5m3(m: Tensors, scheme: _Scheme) -> bool:
    """FP4 with unsigned E5M3 scales and no global scale, as AutoRound writes it."""
    declared = scheme.format == "nvfp4-e5m3-pack-quantized" or scheme.weights.get("group_size") == 16
    return "weight_packed" in m and "weight_global_scale" not in m and declared


def _e5m3_values(scale: Stored) -> Stored:
    """E5M3 codes as float32."""
    demand(scale.dtype == "U8", "scales of another type")
    numbers = UE5M3[scale.bytes()]
    demand(np.isfinite(numbers).all(), "scales that are not finite")
    return Stored("F32", scale.shape, numbers.tobytes())


def _mx_int(m: Tensors, scheme: _Scheme) -> Layer:
    """AutoRound's MXINT4: sign and magnitude in quarters, under E8M0 scales."""
    demand(scheme.mx_int and scheme.bits == 4, "minifloats that the config calls integers")
    n, columns = m["weight_packed"].shape
    codes, k = stream(m["weight_packed"].bytes().reshape(n, columns), 4, 2 * columns), 2 * columns
    values = np.where(codes > 7, -(codes & 7), codes) / 4
    block = scheme.block(n, k, m["weight_scale"].shape)
    demand(m["weight_scale"].dtype in ("U8", "F8_E8M0") and (m["weight_scale"].bytes() != 255).all(), "scales of another type")
    scales = on_grid(m["weight_scale"], (blocks(n, block[0]), blocks(k, block[1])))
    return Layer(product(values, expand(scales, n, k, *block)), _extras(m, scheme, n))


def _zeros(m: Tensors, scheme: _Scheme, grid: tuple[int, int]) -> np.ndarray:
    """Signed zero points on the grid of the scales."""
    stored, half = m["weight_zero_point"], 1 << (scheme.bits - 1)
    if stored.dtype == "I8":
        zero = stored.integers().reshape(grid)
        demand((zero >= -half).all() and (zero < half).all(), "zero points out of range")
        return zero
    return _unpack(stored.uint32().T, scheme, grid[0]).T - half


def _unpack(packed: np.ndarray, scheme: _Scheme, count: int) -> np.ndarray:
    """Rows of uint32 to codes: one dense stream, or floor(32 / bits) codes per uint32; the number of uint32 tells which."""
    bits, per_int32 = scheme.bits, 32 // scheme.bits
    dense, padded = packed.shape[1] == -(-count * bits // 32), packed.shape[1] == -(-count // per_int32)
    demand(dense or padded, "int32 that fit no packing")
    if dense and (scheme.dense or not padded or 32 % bits == 0):
        return stream_int32(packed, bits, count)
    fields = [(packed.astype(np.int64) >> (bits * i)) & ((1 << bits) - 1) for i in range(per_int32)]
    return np.stack(fields, -1).reshape(len(packed), -1)[:, :count]


def _pack_quantized(m: Tensors, scheme: _Scheme) -> Layer:
    rows = m["weight_packed"].shape[0]
    n, k = (int(size) for size in m["weight_shape"].integers().reshape(-1))
    demand(n == rows and k >= 1 and not scheme.is_float and 2 <= scheme.bits <= 8, "not packed integers")
    half = 1 << (scheme.bits - 1)
    codes = _unpack(m["weight_packed"].uint32(), scheme, k) - half
    block = scheme.block(n, k, m["weight_scale"].shape)
    grid = blocks(n, block[0]), blocks(k, block[1])
    scales = on_grid(m["weight_scale"], grid)
    zeros = np.zeros(grid, np.int64) if scheme.symmetric else _zeros(m, scheme, grid)
    index = np.arange(k) // min(block[1], k)
    if "weight_g_idx" in m and not (m["weight_g_idx"].integers() == -1).all():
        index = m["weight_g_idx"].integers()
        demand(index.shape == (k,) and ((index >= 0) & (index < grid[1])).all(), "groups out of range")
    row = np.arange(n) // min(block[0], n)
    return Layer(product(codes - zeros[row][:, index], scales[row][:, index]), _extras(m, scheme, n))


def _extras(m: Tensors, scheme: _Scheme, n: int) -> dict[str, np.ndarray]:
    extras, act = bias_of(m, n), scheme.inputs
    if act is None or act.get("num_bits", 8) >= 16:
        return extras
    dynamic = act.get("dynamic", False)
    if not dynamic:
        extras["input_scale"] = positive(m["input_scale"].number())
        if not act.get("symmetric", True):
            extras["input_zero"] = np.array(m["input_zero_point"].number(), F32)
    elif act.get("strategy") == "tensor_group" and str(act.get("type", "int")).lower() == "float":
        extras["input_scale"] = positive(m["input_global_scale"].number())
    return extras
