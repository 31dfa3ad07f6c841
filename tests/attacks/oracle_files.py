"""The oracle's reader of files: safetensors, configs and dtypes, with json and numpy and no code of Bitline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

F32, F64 = np.float32, np.float64


class Unreadable(Exception):
    """The checkpoint has no valid reading: it must be refused."""


def demand(truth: object, why: str) -> None:
    """Raise Unreadable unless this is true."""
    if not truth:
        raise Unreadable(why)


# ---- numbers -------------------------------------------------------------------------------------------------------------


def _minifloat(exponent: int, mantissa: int, bias: int, code: int) -> float:
    sign = -1.0 if code >> (exponent + mantissa) else 1.0
    e, m = (code >> mantissa) & ((1 << exponent) - 1), code & ((1 << mantissa) - 1)
    return sign * (m * 2.0 ** (1 - bias - mantissa) if e == 0 else (1 + m / (1 << mantissa)) * 2.0 ** (e - bias))


def _table(exponent: int, mantissa: int, bias: int, special: Mapping[int, float]) -> np.ndarray:
    codes = range(1 << (1 + exponent + mantissa))
    return np.array([special.get(c, _minifloat(exponent, mantissa, bias, c)) for c in codes], F32)


_NAN = math.nan
E4M3 = _table(4, 3, 7, {0x7F: _NAN, 0xFF: _NAN})
E5M2 = _table(5, 2, 15, {0x7C: math.inf, 0xFC: -math.inf} | dict.fromkeys([0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], _NAN))
E4M3FNUZ = _table(4, 3, 8, {0x80: _NAN})
E5M2FNUZ = _table(5, 2, 16, {0x80: _NAN})
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
E2M3, E3M2 = _table(2, 3, 1, {}), _table(3, 2, 3, {})
UE5M3 = np.array([m * 2.0**-17 if not e else (8 + m) * 2.0 ** (e - 18) for e in range(32) for m in range(8)], F32)
UE5M3[255] = _NAN  # unsigned E5M3, bias 15
E8M0 = np.array([2.0 ** (code - 127) for code in range(255)] + [_NAN], F32)

_PLAIN = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "I32": np.int32, "U32": np.uint32,
    "I64": np.int64, "U64": np.uint64, "F16": np.float16, "F32": F32, "F64": F64,
}  # fmt: skip
_CODED = {"F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E4M3FNUZ": E4M3FNUZ, "F8_E5M2FNUZ": E5M2FNUZ, "F8_E8M0": E8M0}
SIZES = {name: np.dtype(kind).itemsize for name, kind in _PLAIN.items()} | dict.fromkeys(_CODED, 1) | {"BF16": 2, "C64": 8}
FLOATS = ("F16", "BF16", "F32")  # dtypes of scales and biases


@dataclass
class Stored:
    """A stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes

    def bytes(self) -> np.ndarray:
        """uint8, one dimension."""
        return np.frombuffer(self.raw, np.uint8)

    def uint32(self) -> np.ndarray:
        """uint32, in the tensor's shape."""
        demand(self.dtype in ("I32", "U32"), f"{self.dtype} is not int32")
        return np.frombuffer(self.raw, "<u4").reshape(self.shape)

    def integers(self) -> np.ndarray:
        """int64, in the tensor's shape."""
        demand(self.dtype[0] in "IU", f"{self.dtype} is not an integer")
        return np.frombuffer(self.raw, _PLAIN[self.dtype]).reshape(self.shape).astype(np.int64)

    def floats(self) -> np.ndarray:
        """Any float dtype as float32, in the tensor's shape."""
        if self.dtype == "BF16":
            return (np.frombuffer(self.raw, "<u2").astype(np.uint32) << 16).view(F32).reshape(self.shape)
        if self.dtype in _CODED:
            return _CODED[self.dtype][self.bytes()].reshape(self.shape)
        demand(self.dtype in ("F16", "F32", "F64"), f"{self.dtype} is not a float")
        return np.frombuffer(self.raw, _PLAIN[self.dtype]).reshape(self.shape).astype(F32)

    def scales(self) -> np.ndarray:
        """Scales as float32: floats, which must be finite, or E8M0, which may be NaN."""
        if self.dtype in ("U8", "F8_E8M0"):
            return E8M0[self.bytes()].reshape(self.shape)
        values = self.floats()
        demand(np.isfinite(values).all(), "scales that are not finite")
        return values

    def number(self) -> float:
        """The value of a scalar tensor."""
        demand(self.shape in ((), (1,), (1, 1)), "not a scalar")
        values = self.floats() if self.dtype[0] in "BF" else self.integers()
        return float(values.reshape(()))


Tensors = dict[str, Stored]


@dataclass
class Layer:
    """The reading of a quantized layer: its weight, float32 [N, K], and the other inputs of a kernel.

    tolerance: allowed error relative to the largest term of the formula, where float32 rounds more than once.
    """

    weight: np.ndarray
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    tolerance: float = 0.0


@dataclass
class Files:
    """A checkpoint: its tensors, its quantization config, and the metadata of its files."""

    tensors: Tensors
    config: dict[str, Any]
    metadata: dict[str, str]

    def modules(self, *suffixes: str) -> list[str]:
        """Names of the modules that hold a tensor of one of these suffixes."""
        found = [name[: -len(s) - 1] for name in self.tensors for s in suffixes if name.endswith(f".{s}")]
        return list(dict.fromkeys(found))

    def module(self, base: str) -> Tensors:
        """A module's tensors by suffix."""
        return {name[len(base) + 1 :]: t for name, t in self.tensors.items() if name.startswith(f"{base}.")}


# ---- codes ---------------------------------------------------------------------------------------------------------------


def stream(raw: np.ndarray, code_bits: int, count: int) -> np.ndarray:
    """Rows of bytes, uint8 [n, bytes], as `count` codes of a little-endian bit stream, int64 [n, count]."""
    bits = np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little")
    demand(bits.shape[1] >= count * code_bits, "fewer bits than codes")
    return bits[:, : count * code_bits].reshape(len(raw), count, code_bits).astype(np.int64) @ (1 << np.arange(code_bits))


def stream_int32(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The same for rows of uint32."""
    return stream(np.ascontiguousarray(packed, "<u4").view(np.uint8).reshape(len(packed), -1), bits, count)


def expand(grid: np.ndarray, n: int, k: int, rows: int, columns: int) -> np.ndarray:
    """Scales on a grid of blocks [rows, columns], expanded to [n, k]."""
    demand(rows >= 1 and columns >= 1, "an empty block")
    rows, columns = min(rows, n), min(columns, k)
    demand(grid.shape == (-(-n // rows), -(-k // columns)), f"a grid {grid.shape} of blocks {rows} x {columns}")
    return grid[np.arange(n) // rows][:, np.arange(k) // columns]


def product(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 products, each rounded once."""
    with np.errstate(all="ignore"):
        return values.astype(F32) * scales.astype(F32)


def bias_of(module: Tensors, n: int) -> dict[str, np.ndarray]:
    """The bias among a layer's extras, if there is one."""
    if "bias" not in module:
        return {}
    bias = module["bias"]
    demand(bias.shape in ((n,), (1, n)) and np.isfinite(bias.floats()).all(), "an invalid bias")
    return {"bias": bias.floats().reshape(n)}


# ---- files ---------------------------------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Tensors and metadata of one file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        part = raw[start + begin : start + end]
        demand(len(part) == end - begin == math.prod(entry["shape"]) * SIZES[entry["dtype"]], "bytes that do not fit a shape")
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), part)
    return tensors, metadata


def _weights(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        shards = json.loads(indexes[0].read_bytes())["weight_map"].values()
        return [folder / name for name in dict.fromkeys(shards)]
    return sorted(folder.glob("*.safetensors"))


def read_files(path: Path) -> Files:
    """A checkpoint folder, or a .safetensors file in one."""
    folder = path if path.is_dir() else path.parent
    tensors: Tensors = {}
    metadata: dict[str, str] = {}
    for file in _weights(folder) if path.is_dir() else [path]:
        more, facts = read_safetensors(file)
        demand(not more.keys() & tensors.keys(), "a tensor in two files")
        tensors |= more
        metadata |= facts
    return Files(tensors, _quantization(folder), metadata)


_SIDES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json")


def _object(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes().decode("utf-8-sig")) if file.is_file() else {}


def _quantization(folder: Path) -> dict[str, Any]:
    """What config.json says of the quantization, else the first side file, with `hf` for ModelOpt's own side file."""
    config = _object(folder / "config.json")
    side = next((name for name in _SIDES if (folder / name).is_file()), None)
    more = _object(folder / "hf_quant_config.json").get("quantization") or {}
    found = [
        part[key]
        for part in [config, *(config.get(name) for name in ("text_config", "llm_config", "language_config"))]
        if isinstance(part, dict)
        for key in ("quantization_config", "compression_config")
        if part.get(key)
    ]
    chosen = found[0] if found else _object(folder / side) if side else {}
    if isinstance(chosen.get("quantization"), dict):  # ModelOpt nests what it says
        chosen = {**chosen, **chosen["quantization"]}
    method = chosen.get("quant_method") or chosen.get("quantization_method") or ("modelopt" if more else "")
    return {**chosen, "quant_method": str(method).strip().lower(), "hf": more}
