"""The oracle's GGUF: a parser of its own, and the `gguf` package's decoders, which are those of ggml's authors."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from oracle_files import F32, F64, Layer, demand, product, stream

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}

# Every type by its number: name, weights and bytes of a block.
TYPES = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType} | {42: ("Q2_0", 64, 18)}
NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}


def _one_scale(blocks: np.ndarray, scale: str, at: int, codes: np.ndarray) -> np.ndarray:
    """Codes times the number at the beginning of their block."""
    return product(codes, blocks[:, :at].copy().view(scale).astype(F32))


_BY_HAND = {
    "Q1_0": lambda b: _one_scale(b, "<f2", 2, 2 * stream(b[:, 2:], 1, 128) - 1),
    "Q2_0": lambda b: _one_scale(b, "<f2", 2, stream(b[:, 2:], 2, 64) - 1),
    "Q8_K": lambda b: _one_scale(b, "<f4", 4, b[:, 4:260].view(np.int8)),
}


def dequantize(blocks: np.ndarray, name: str) -> np.ndarray:
    """Blocks, uint8 [..., bytes of whole blocks], as float32 [..., weights]."""
    with np.errstate(all="ignore"):
        if name in _BY_HAND:
            parts = _BY_HAND[name](blocks.reshape(-1, TYPES[NUMBERS[name]][2]))
            return parts.reshape(*blocks.shape[:-1], -1)
        values = gguf.quants.dequantize(blocks, GGMLQuantizationType[name])
    if name in _NOT_NUMBERS:
        size, first = TYPES[NUMBERS[name]][2], _NOT_NUMBERS[name]
        bad = (blocks.reshape(-1, size)[:, first[0]] >= first[1]).any(1)
        values.reshape(len(bad), -1)[bad] = np.nan
    return values


# Scale bytes that are no numbers in their own format, whatever ggml's arithmetic makes of them: which bytes, and from which on.
_NOT_NUMBERS = {"MXFP4": (slice(0, 1), 255), "NVFP4": (slice(0, 4), 128)}


class _Header:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 4

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.raw, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> bytes:
        size = self.take("Q")
        demand(size <= len(self.raw), "a text that is longer than the file")
        self.at += size
        return self.raw[self.at - size : self.at]

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.take("I"), self.take("Q")
            demand(count <= len(self.raw), "an array that is longer than the file")
            return [self.value(inner) for _ in range(count)]
        return self.take(_SCALARS[kind])


def layers(path: Path) -> dict[str, Layer]:
    """Every quantized matrix of a file, or of all parts of a model that is split over several."""
    named = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    parts = [path]
    if named and b"split.count" in path.read_bytes():
        parts = [path.with_name(f"{named[1]}-{i + 1:05d}-of-{named[2]}.gguf") for i in range(int(named[2]))]
    out: dict[str, Layer] = {}
    for part in parts:
        more = _layers(part)
        demand(not more.keys() & out.keys(), "a layer in two parts")
        out |= more
    return out


def _layers(path: Path) -> dict[str, Layer]:
    raw = path.read_bytes()
    head = _Header(raw)
    demand(raw[:4] == b"GGUF" and head.take("I") in (2, 3), "no GGUF")
    count, pairs = head.take("Q"), head.take("Q")
    values = {}
    for _ in range(pairs):
        key = head.text()
        values[key] = head.value(head.take("I"))
    tensors = []
    for _ in range(count):
        name = head.text().decode()
        dims = [head.take("Q") for _ in range(head.take("I"))]
        tensors.append((name, dims[::-1], TYPES[head.take("I")], head.take("Q")))
    align = values.get(b"general.alignment", 32)
    start = -(-head.at // align) * align
    decoded = {name: _decode(raw, start + at, shape, kind) for name, shape, kind, at in tensors}
    out = {}
    for name, shape, kind, _ in tensors:
        if kind[0] in _PLAIN:
            continue
        demand(len(shape) in (2, 3), "not a matrix, nor a stack of them")
        base, stack = name.removesuffix(".weight"), shape[:-2]
        bias = decoded.get(f"{base}.bias") if base != name else None
        factor = decoded.get(f"{base}.scale") if base != name else None
        if factor is not None and (factor.shape != (tuple(stack) or (1,)) or factor.dtype.kind != "f"):
            factor = None  # another tensor of that name
        demand(bias is None or (bias.shape == (*stack, shape[-2]) and bias.dtype.kind == "f"), "a bias that is none")
        demand(bias is None or np.isfinite(bias).all(), "a bias that is not finite")
        for i in range(stack[0]) if stack else (None,):
            pick = (lambda t, i=i: t) if i is None else (lambda t, i=i: t[i])
            layer = Layer(pick(decoded[name]).astype(F32))
            if bias is not None:
                layer.extras["bias"] = pick(bias)
            if factor is not None:
                with np.errstate(all="ignore"):
                    layer.weight = (layer.weight.astype(F64) * float(factor[i or 0])).astype(F32)
                layer.slack = 2.0**-20
            out[base if i is None else f"{base}.{i}"] = layer
    return out


def _decode(raw: bytes, at: int, shape: list[int], kind: tuple[str, int, int]) -> np.ndarray:
    name, block, size = kind
    demand(shape and shape[-1] % block == 0 and min(shape) >= 1, "rows that do not end on a block")
    rows, row = math.prod(shape[:-1]), shape[-1] // block * size
    part = raw[at : at + rows * row]
    demand(len(part) == rows * row, "a tensor outside the file")
    if _PLAIN.get(name):
        return np.frombuffer(part, _PLAIN[name]).reshape(shape)
    return dequantize(np.frombuffer(part, np.uint8).reshape(rows, row), name).reshape(shape)
