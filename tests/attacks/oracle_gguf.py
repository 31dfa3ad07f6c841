"""The oracle's GGUF: an independent parser, and the dequantization of the `gguf` package."""

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
    """Codes times the scale at the start of their block."""
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
    if name in _INVALID_SCALES:
        size, first = TYPES[NUMBERS[name]][2], _INVALID_SCALES[name]
        bad = (blocks.reshape(-1, size)[:, first[0]] >= first[1]).any(1)
        values.reshape(len(bad), -1)[bad] = np.nan
    return values


# Scale bytes that are NaN or invalid in their own dtype, which ggml computes with: which bytes, and from which value on.
_INVALID_SCALES = {"MXFP4": (slice(0, 1), 255), "NVFP4": (slice(0, 4), 128)}


class _Header:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.offset = raw, 4

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.raw, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        return value

    def text(self) -> bytes:
        size = self.take("Q")
        demand(size <= len(self.raw), "a text longer than the file")
        self.offset += size
        return self.raw[self.offset - size : self.offset]

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.take("I"), self.take("Q")
            demand(count <= len(self.raw), "an array longer than the file")
            return [self.value(inner) for _ in range(count)]
        return self.take(_SCALARS[kind])


def layers(path: Path) -> dict[str, Layer]:
    """Every quantized matrix of a file, or of all files of a split model."""
    named = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    files = [path]
    if named and b"split.count" in path.read_bytes():
        files = [path.with_name(f"{named[1]}-{i + 1:05d}-of-{named[2]}.gguf") for i in range(int(named[2]))]
    out: dict[str, Layer] = {}
    for file in files:
        more = _layers(file)
        demand(not more.keys() & out.keys(), "a layer in two files")
        out |= more
    return out


def _layers(path: Path) -> dict[str, Layer]:
    raw = path.read_bytes()
    head = _Header(raw)
    demand(raw[:4] == b"GGUF" and head.take("I") in (2, 3), "not GGUF")
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
    start = -(-head.offset // align) * align
    arrays = {name: _read_tensor(raw, start + at, shape, kind) for name, shape, kind, at in tensors}
    out = {}
    for name, shape, kind, _ in tensors:
        if kind[0] in _PLAIN:
            continue
        demand(len(shape) in (2, 3), "neither a matrix nor a stack of matrices")
        base, stack = name.removesuffix(".weight"), shape[:-2]
        bias = arrays.get(f"{base}.bias") if base != name else None
        factor = arrays.get(f"{base}.scale") if base != name else None
        if factor is not None and (factor.shape != (tuple(stack) or (1,)) or factor.dtype.kind != "f"):
            factor = None  # another tensor of that name
        demand(bias is None or (bias.shape == (*stack, shape[-2]) and bias.dtype.kind == "f"), "an invalid bias")
        demand(bias is None or np.isfinite(bias).all(), "a bias that is not finite")
        for i in range(stack[0]) if stack else (None,):
            pick = (lambda t, i=i: t) if i is None else (lambda t, i=i: t[i])
            layer = Layer(pick(arrays[name]).astype(F32))
            if bias is not None:
                layer.extras["bias"] = pick(bias)
            if factor is not None:
                with np.errstate(all="ignore"):
                    layer.weight = (layer.weight.astype(F64) * float(factor[i or 0])).astype(F32)
                layer.tolerance = 2.0**-20
            out[base if i is None else f"{base}.{i}"] = layer
    return out


def _read_tensor(raw: bytes, at: int, shape: list[int], kind: tuple[str, int, int]) -> np.ndarray:
    name, block, size = kind
    demand(shape and shape[-1] % block == 0 and min(shape) >= 1, "rows that do not end on a block")
    rows, row = math.prod(shape[:-1]), shape[-1] // block * size
    part = raw[at : at + rows * row]
    demand(len(part) == rows * row, "a tensor outside the file")
    if _PLAIN.get(name):
        return np.frombuffer(part, _PLAIN[name]).reshape(shape)
    return dequantize(np.frombuffer(part, np.uint8).reshape(rows, row), name).reshape(shape)
