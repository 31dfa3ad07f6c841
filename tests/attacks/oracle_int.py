"""The oracle's GPTQ, AWQ and AutoRound: packed int32, from the descriptions of the formats. No code of Bitline."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from oracle_files import F32, FLOATS, Files, Layer, Tensors, bias_of, demand, expand, product, stream, stream_int32

AUTO_ROUND = ("auto-round", "intel/auto-round", "inc")
PLANES = {3: ((0, 2), (2, 1)), 5: ((0, 4), (4, 1)), 6: ((0, 4), (4, 2)), 7: ((0, 4), (4, 2), (6, 1))}
AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the column that each nibble holds
V2 = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2")


def layers(files: Files) -> dict[str, Layer]:
    """Every module with a qweight."""
    config, names = files.config, files.modules("qweight")
    auto = config["quant_method"] in AUTO_ROUND
    packing = str(config.get("packing_format", "auto"))
    awq = packing.endswith("awq") if auto else config["quant_method"] == "awq"
    if awq:
        version = {str(config[key]).lower() for key in ("version", "checkpoint_format", "format") if config.get(key)} or {"gemm"}
        read = {"gemv": _gemv, "gemv_fast": _gemv_fast, "llm-awq": _gemv_fast, "gemm": _awq}[version.pop()]
    else:
        read = _gptq
    out = {}
    for name in names:
        settings = _settings(config, auto, name, names)
        settings["v1"] = packing not in V2 if auto else _gptq_format(config) == "gptq"
        settings["gptqmodel"] = "gptqmodel" in str((config.get("meta") or {}).get("quantizer", "")).lower()
        settings["interleaved"] = config.get("pack_method") != "order"
        settings["planes"] = () if auto else (3, 5, 6, 7) if _gptq_format(config) == "gptq_p" else (5, 6, 7)
        out[name] = read(files.module(name), settings)
    return out


def _gptq_format(config: dict[str, Any]) -> str:
    return str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()


def _settings(config: dict[str, Any], auto: bool, name: str, names: list[str]) -> dict[str, Any]:
    """bits, group_size and sym of a module, after overrides."""
    chosen = dict(config)
    if auto:
        extra = config.get("extra_config") or {}
        if extra.get(name):
            chosen |= extra[name]
        else:
            chosen |= next((c for key, c in extra.items() if c and key not in names and re.search(key, name)), {})
    else:
        for key, change in (config.get("dynamic") or {}).items():
            if re.match(key.removeprefix("-:").removeprefix("+:"), name):
                chosen |= {} if key.startswith("-:") else change
                break
    bits = next(chosen[k] for k in ("bits", "w_bit") if chosen.get(k) is not None)
    if bits >= 16 and chosen != config:  # "not quantized", but it is: read like the others
        chosen = dict(config)
        bits = next(chosen[k] for k in ("bits", "w_bit") if chosen.get(k) is not None)
    size = next((chosen[k] for k in ("group_size", "q_group_size") if chosen.get(k) is not None), -1)
    sym = chosen.get("sym")
    if chosen.get("zero_point") is not None:
        sym = not chosen["zero_point"]
    elif sym is None:
        sym = config["quant_method"] != "awq"
    return {"bits": bits, "group_size": size, "sym": sym}


def _group(settings: dict[str, Any], k: int) -> int:
    size = settings["group_size"]
    demand(size == -1 or size >= 1, "an invalid group size")
    return k if size == -1 else size


def _unpack(packed: np.ndarray, bits: int, count: int, planar: bool) -> np.ndarray:
    """Rows of uint32 to codes: one bit stream, or bit planes for every 32 codes."""
    if not planar:
        return stream_int32(packed, bits, count)
    blocks = packed.reshape(len(packed), -1, bits)  # 32 codes are `bits` uint32
    out, start = np.zeros((len(packed), blocks.shape[1] * 32), np.int64), 0
    for shift, plane in PLANES[bits]:
        part = blocks[:, :, start : start + plane]
        out |= stream_int32(part.reshape(-1, plane), plane, 32).reshape(out.shape) << shift
        start += plane
    return out[:, :count]


def _gptq(m: Tensors, settings: dict[str, Any]) -> Layer:
    bits, planar = settings["bits"], settings["bits"] in settings["planes"]
    demand(2 <= bits <= 8 and m["scales"].dtype in FLOATS, "bits or scales")
    rows, n = m["qweight"].shape
    block_rows = bits if 32 % bits else 1  # int32 that hold whole codes
    demand(rows % block_rows == 0, "int32 that do not hold whole codes")
    k = full = rows * 32 // bits
    if "g_idx" in m and full - block_rows * 32 // bits < m["g_idx"].shape[0] <= full:
        k = m["g_idx"].shape[0]  # the last int32 are padded
    codes = _unpack(m["qweight"].uint32().T, bits, full, planar)
    demand(not codes[:, k:].any(), "padding that is not zero")
    codes = codes[:, :k]
    scales = m["scales"].scales()
    groups = len(scales)
    demand(scales.shape == (groups, n), "scales of another shape")
    zeros = np.full((groups, n), 1 << (bits - 1))
    if not settings["sym"]:
        packed = m["qzeros"].uint32()
        demand(packed.shape == (groups, -(-n * bits // 32)), "zero points of another shape")
        if settings["v1"] and 32 % bits == 0:
            ones = sum(1 << shift for shift in range(0, 32, bits))
            packed = (packed.astype(np.uint64) + ones).astype(np.uint32)
        zeros = _unpack(packed, bits, n, planar)
        if settings["v1"] and 32 % bits:
            zeros = (zeros + 1) & ((1 << bits) - 1)
    size = _group(settings, k)
    demand(groups == -(-k // size), "another number of groups")
    index = np.arange(k) // min(size, k)
    if "g_idx" in m:
        index = m["g_idx"].integers()
        demand(index.shape == (k,), "g_idx of another length")
        index = np.where(index < 0, index + groups, index)
        demand(((index >= 0) & (index < groups)).all(), "groups out of range")
    return Layer(product(codes - zeros.T[:, index], scales.T[:, index]), bias_of(m, n))


def _awq(m: Tensors, settings: dict[str, Any]) -> Layer:
    bits, (k, _) = settings["bits"], m["qweight"].shape
    groups, n = m["scales"].shape
    demand(2 <= bits <= 8 and m["scales"].dtype in FLOATS, "not AWQ")
    interleaved = settings["interleaved"] and (bits == 4 or (bits in (5, 6, 7) and not settings["gptqmodel"]))
    demand(n % 8 == 0 or not interleaved, "columns that are not a multiple of 8")

    def columns(packed: np.ndarray) -> np.ndarray:
        codes = stream_int32(packed, bits, n)
        return codes.reshape(len(packed), -1, 8)[:, :, np.argsort(AWQ_ORDER)].reshape(len(packed), n) if interleaved else codes

    demand(m["qweight"].shape[1] == -(-n * bits // 32), "qweight of another shape")
    zeros = np.full((groups, n), 1 << (bits - 1))
    if "qzeros" in m:
        demand(m["qzeros"].shape == (groups, -(-n * bits // 32)), "zero points of another shape")
        zeros = columns(m["qzeros"].uint32())
        implicit = zeros == 1 << (bits - 1)
        demand(not settings["sym"] or not implicit[0].all() or implicit.all(), "zero points where the config has none")
    else:
        demand(settings["sym"], "no zero points")
    values = (columns(m["qweight"].uint32()) - zeros[np.arange(k) // _group(settings, k)]).T
    return Layer(product(values, expand(m["scales"].scales().T, n, k, 1, _group(settings, k))), bias_of(m, n))


def _gemv(m: Tensors, settings: dict[str, Any]) -> Layer:
    n, columns = m["qweight"].shape
    k = 8 * columns
    size = _group(settings, k)
    groups = -(-k // size)
    zeros = stream_int32(m["qzeros"].uint32(), 4, m["qzeros"].shape[1] * 8)[:, :groups]
    scales = _unpadded(m["scales"].scales(), groups)
    values = stream_int32(m["qweight"].uint32(), 4, k) - expand(zeros, n, k, 1, size)
    return Layer(product(values, expand(scales, n, k, 1, size)), bias_of(m, n))


def _gemv_fast(m: Tensors, settings: dict[str, Any]) -> Layer:
    quarter, k = m["qweight"].shape
    n, size = 4 * quarter, _group(settings, k)
    groups = -(-k // size)
    # A row of qweight is k codes of four rows: 64 of the first, 64 of the second, …; 32 of them are (b, c, a) of 8a + 2b + c.
    raw = m["qweight"].bytes().reshape(quarter, -1)
    runs = stream(raw, 4, 4 * k).reshape(quarter, k // 64, 4, 2, 4, 2, 4)
    codes = runs.transpose(0, 2, 1, 3, 6, 4, 5).reshape(n, k)
    zeros = "scaled_zeros" if "scaled_zeros" in m else "qzeros"
    scales = _unpadded(m["scales"].floats().T, groups)
    offsets = m[zeros].floats().T[:, :groups]
    demand(np.isfinite(scales).all() and np.isfinite(offsets).all(), "scales that are not finite")
    weight = product(codes, expand(scales, n, k, 1, size)) + expand(offsets, n, k, 1, size).astype(F32)
    return Layer(weight, bias_of(m, n))


def _unpadded(scales: np.ndarray, groups: int) -> np.ndarray:
    demand(
        not scales[:, groups:].any() and scales[:, :groups][:, -1].any(),
        "padding that is not zero, or a last group without scales",
    )
    return scales[:, :groups]
