"""The matrix of attacks: every kind of invalid value for every tensor, header entry and config value of every base.

`attacks(base)` yields them. The outcome is the right weight or an error that says where; a case with `refused` must not load.
write_corpus.py writes them as files.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bases_more  # noqa: F401  (its families are among the bases once it is imported)
import corpus_float  # noqa: F401
import torch
from bases import FAMILIES, safetensors_bytes
from outcomes import replace_file

Tensors = dict[str, Any]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)


@dataclass(frozen=True)
class Case:
    """One attack. build: writes it into an empty folder and returns the path to open. refused: it must not load. located: a
    refusal names a tensor or a field, not only the file.
    """

    name: str
    build: Callable[[Path], Path]
    refused: bool = False
    located: bool = True


# ---- one tensor replaced -------------------------------------------------------------------------------------------------


def _grown(t: torch.Tensor, dim: int, by: int) -> torch.Tensor:
    """One more or one less along a dimension."""
    if by < 0:
        return t.narrow(dim, 0, t.shape[dim] - 1)
    raw = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
    return torch.cat((raw, raw.narrow(dim, 0, 1)), dim).view(t.dtype)


def _filled(t: torch.Tensor, number: float) -> torch.Tensor:
    return torch.full(t.shape, number, dtype=torch.float32).to(t.dtype)


def _bytes(t: torch.Tensor, byte: int) -> torch.Tensor:
    return torch.full((t.numel() * t.dtype.itemsize,), byte, dtype=torch.uint8).view(t.dtype).view(t.shape)


def _tensor_kinds(t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Replacements of a tensor, by name."""
    yield "missing", None
    yield "empty", t.reshape(-1)[:0]
    yield "flat", t.reshape(-1)
    yield "deep", t.unsqueeze(0)
    yield "wrapped", t.unsqueeze(-1)
    yield "number", t.reshape(-1)[0].clone()
    if t.dim() == 2:
        yield "transposed", t.t().contiguous()
        yield "halved", t.reshape(t.shape[0] * 2, -1) if t.shape[1] % 2 == 0 else t[: t.shape[0] // 2]
    for dim in range(t.dim()):
        if t.shape[dim]:
            yield f"none-in-dim-{dim}", t.narrow(dim, 0, 0)
            yield f"longer-in-dim-{dim}", _grown(t, dim, 1)
            yield f"shorter-in-dim-{dim}", _grown(t, dim, -1)
            yield (
                f"doubled-in-dim-{dim}",
                torch.cat((t.view(torch.uint8),) * 2, dim).view(t.dtype) if t.dtype.itemsize == 1 else (torch.cat((t, t), dim)),
            )
    for dtype in (*INTEGERS, *FLOATS):
        if dtype != t.dtype:
            yield f"as-{str(dtype)[6:]}", t.float().to(dtype) if dtype.is_floating_point else t.float().clamp(-100, 100).to(dtype)
            if dtype.itemsize == t.dtype.itemsize:
                yield f"called-{str(dtype)[6:]}", t.view(dtype)
    if t.dtype.is_floating_point:
        numbers = {"nan": math.nan, "infinite": math.inf, "minus-infinite": -math.inf, "negative": -1.0, "zero": 0.0,
                   "huge": 3e38, "tiny": 1e-45, "one": 1.0}  # fmt: skip
        for name, number in numbers.items():
            yield name, _filled(t, number)
            poked = t.clone().reshape(-1).view(torch.uint8)
            poked[: t.dtype.itemsize] = _filled(t.reshape(-1)[:1], number).view(torch.uint8)
            yield f"first-{name}", poked.view(t.dtype).view(t.shape)
    for byte in (0x00, 0x7F, 0x80, 0xFF, 0x88):
        yield f"bytes-{byte:02x}", _bytes(t, byte)
    if t.dtype in (torch.int32, torch.int64):
        for number in (-1, -2, 1 << 30, -(1 << 31), (1 << 31) - 1):
            poked = t.clone()
            poked.view(-1)[-1] = number
            yield f"last-{number}", poked


# ---- one entry of a header -----------------------------------------------------------------------------------------------

_HEADER: dict[str, dict[str, Any]] = {
    "shape": {"negative": [-1], "fraction": [1.0], "text": "4", "null": None, "true": [True], "2^70": [1 << 70], "list": [[4]],
              "overflows": [1 << 32, 1 << 32], "65-dimensions": [1] * 65, "nan": [math.nan]},
    "dtype": {"unknown": "F42", "number": 3, "null": None, "list": ["F16"], "lower": "f16", "empty": ""},
    "data_offsets": {"reversed": [8, 0], "negative": [-8, 0], "one": [0], "three": [0, 4, 8], "fraction": [0.0, 4.0],
                     "2^63": [0, 1 << 63], "text": "0,4", "null": None, "past-the-end": [1 << 40, (1 << 40) + 8]},
}  # fmt: skip


def _header_cases(base: str, tensors: Tensors, config: dict[str, Any]) -> Iterator[Case]:
    for name in [name for name in tensors if name != "__metadata__"][
        : 1 if base != "gptq" else None
    ]:  # the headers of all bases are alike
        short = name.rpartition("mlp.")[2]

        def case(kind: str, change: Callable[[dict[str, Any]], Any], short: str = short) -> Case:
            def build(folder: Path) -> Path:
                replace_file(folder / "config.json", json.dumps({"quantization_config": config}).encode())
                replace_file(folder / "model.safetensors", safetensors_bytes(tensors, change))
                return folder

            return Case(f"{base}/header/{short}/{kind}", build, True, kind != "shape-nan")  # NaN is not JSON

        for field, values in _HEADER.items():
            for what, value in values.items():
                yield case(f"{field}-{what}", lambda h, n=name, f=field, v=value: h[n].update({f: v}))
            yield case(f"{field}-missing", lambda h, n=name, f=field: h[n].pop(f) and None)
        yield case("entry-null", lambda h, n=name: h.update({n: None}))
        yield case("entry-list", lambda h, n=name: h.update({n: [1]}))
        yield case("entry-twice", lambda h, n=name: _twice(h, n))
        yield case("overlap", lambda h, n=name: _moved(h, n, -1))
        yield case("gap", lambda h, n=name: _moved(h, n, 1))
        for what, new in {"nul": "a\0", "cursor": "\x1b[2J", "long": "a" * 5000, "empty": "", "line": "a\n"}.items():
            yield case(f"name-{what}", lambda h, n=name, w=new: h.update({w: h.pop(n)}))


def _twice(header: dict[str, Any], name: str) -> bytes:
    """The header as bytes, with one entry twice."""
    text = json.dumps(header)
    return (text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}").encode()


def _moved(header: dict[str, Any], name: str, by: int) -> None:
    header[name]["data_offsets"] = [at + by for at in header[name]["data_offsets"]]


# ---- one value of a config -----------------------------------------------------------------------------------------------

_VALUES: dict[str, Any] = {
    "null": None, "true": True, "false": False, "0": 0, "1": 1, "-1": -1, "-2": -2, "9": 9, "33": 33, "2^31": 1 << 31,
    "2^63": 1 << 63, "2^70": 1 << 70, "fraction": 0.5, "4.0": 4.0, "nan": math.nan, "infinite": math.inf, "text": "x",
    "empty": "", "number-as-text": "4", "nul": "\0", "list": [], "list-of-null": [None], "object": {}, "objects": [{}],
    "deep": json.loads("[" * 500 + "]" * 500),
    "long": "x" * 100_000,
}  # fmt: skip


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values: keys of objects, indices of lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*at, key)
        yield from _paths(part, (*at, key))


def _changed(config: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    out = json.loads(json.dumps(config))
    holder = out
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return out


def _config_cases(base: str, tensors: Tensors, config: dict[str, Any]) -> Iterator[Case]:
    weights = safetensors_bytes(tensors)

    def case(name: str, text: bytes, refused: bool = False, located: bool = True) -> Case:
        def build(folder: Path) -> Path:
            replace_file(folder / "model.safetensors", weights)
            replace_file(folder / "config.json", text)
            return folder

        return Case(f"{base}/config/{name}", build, refused, located)

    def whole(quantization: Any) -> bytes:
        return json.dumps({"model_type": "llama", "quantization_config": quantization}).encode()

    for path in _paths(config):
        name = ".".join(str(key) for key in path)[:100]
        for what, value in _VALUES.items():
            yield case(f"{name}/{what}", whole(_changed(config, path, lambda h, k, v=value: h.__setitem__(k, v))))
        yield case(f"{name}/missing", whole(_changed(config, path, lambda h, k: h.pop(k))))
        if isinstance(path[-1], str):
            yield case(f"{name}/upper", whole(_changed(config, path, lambda h, k: h.update({k.upper(): h.pop(k)}))))
            mark = json.dumps(_changed(config, path, lambda h, k: h.update({k: h.pop(k), f"{k}@": 17})))
            yield case(
                f"{name}/twice",
                b'{"quantization_config": ' + mark.replace("@", "").encode() + b"}",
                path[-1] != "" and _not_17(config, path),
            )
    valid = whole(config)
    yield case("bom", b"\xef\xbb\xbf" + valid)
    yield case("utf-16", valid.decode().encode("utf-16"), True, False)
    yield case("latin-1", valid[:-1] + b', "x": "\xe9"}', True, False)
    yield case("cut", valid[:-7], True, False)
    yield case("nul-after-it", valid + b"\0", True, False)
    yield case("nested-deeply", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", True, False)
    yield case("empty", b"", True, False)
    yield case("a-list", b"[]", True, False)
    yield case("quantization-a-list", whole([config]), True)
    yield case("quantization-a-text", whole("gptq"), True)


def _not_17(config: Any, path: tuple[Any, ...]) -> bool:
    for key in path:
        config = config[key]
    return config != 17


# ---- whole files ---------------------------------------------------------------------------------------------------------


def _file_cases(base: str, tensors: Tensors, config: dict[str, Any]) -> Iterator[Case]:
    raw = safetensors_bytes(tensors)
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length]

    def case(name: str, make: Callable[[Path], Any], refused: bool = True) -> Case:
        def build(folder: Path) -> Path:
            replace_file(folder / "config.json", json.dumps({"quantization_config": config}).encode())
            make(folder / "model.safetensors")
            return folder

        return Case(f"{base}/file/{name}", build, refused, False)

    def content(name: str, data: bytes, refused: bool = True) -> Case:
        return case(name, lambda path: replace_file(path, data), refused)

    for cut in (0, 1, 7, 8, 9, 8 + length // 2, 8 + length - 1, 8 + length, len(raw) - 1):
        yield content(f"cut-at-{cut}", raw[:cut])
    yield content("a-byte-more", raw + b"\0")
    yield content("a-page-more", raw + bytes(4096))
    for what, number in {
        "one-less": length - 1,
        "one-more": length + 1,
        "zero": 0,
        "2^63": 1 << 63,
        "2^64-1": (1 << 64) - 1,
    }.items():
        yield content(f"header-length-{what}", struct.pack("<Q", number) + raw[8:])
    yield content("header-bom", struct.pack("<Q", length + 3) + b"\xef\xbb\xbf" + raw[8:])
    yield content("header-latin-1", raw.replace(b'"shape"', b'"sh\xe4pe"', 1))
    yield content(
        "header-metadata-twice", _with_header(raw, text.rstrip()[:-1] + b', "__metadata__": {}, "__metadata__": {"a": "b"}}')
    )
    yield content(
        "header-nested-deeply", _with_header(raw, text.rstrip()[:-1] + b', "x": ' + b"[" * 99_999 + b"]" * 99_999 + b"}")
    )
    yield content(
        "header-number-of-5000-digits", _with_header(raw, text.replace(b'"shape": [', b'"shape": [' + b"9" * 5000 + b", ", 1))
    )
    yield case("pipe", os.mkfifo)
    yield case("folder", lambda path: path.mkdir())
    yield case("link-to-itself", lambda path: path.symlink_to(path.name))
    yield case("link-to-nothing", lambda path: path.symlink_to("gone"))
    yield case("link-to-a-device", lambda path: path.symlink_to("/dev/zero"))
    yield case("link-to-the-file", lambda path: (replace_file(path.with_name("blob"), raw), path.symlink_to("blob")), False)


def _with_header(raw: bytes, text: bytes) -> bytes:
    old = 8 + int.from_bytes(raw[:8], "little")
    return struct.pack("<Q", len(text)) + text + raw[old:]


_SHARDS: dict[str, Any] = {
    "absent": "c.safetensors", "absolute": "/etc/passwd", "above": "../a.safetensors", "number": 7, "null": None, "empty": "",
    "nul": "a\0", "list": ["a.safetensors"], "config": "config.json", "long": "a" * 4000,
}  # fmt: skip


def _shard_cases(base: str, tensors: Tensors, config: dict[str, Any]) -> Iterator[Case]:
    names = [name for name in tensors if name != "__metadata__"]
    rest = {key: value for key, value in tensors.items() if key == "__metadata__"}
    valid = {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(names)}

    def case(name: str, weight_map: Any, shards: dict[str, list[str]] | None = None, refused: bool = True) -> Case:
        def build(folder: Path) -> Path:
            replace_file(folder / "config.json", json.dumps({"quantization_config": config}).encode())
            for shard, held in (shards or {s: [n for n in names if valid[n] == s] for s in sorted(set(valid.values()))}).items():
                replace_file(folder / shard, safetensors_bytes({n: tensors[n] for n in held} | rest))
            replace_file(folder / "model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
            return folder

        return Case(f"{base}/shards/{name}", build, refused, not name.endswith(("shard-config", "shard-long")))

    yield case("valid", valid, refused=False)
    for name in names:
        short = name.rpartition("mlp.")[2]
        shards = {s: [n for n in names if valid[n] == s] for s in sorted(set(valid.values()))}
        both = {s: [*held, *([] if valid[name] == s else [name])] for s, held in shards.items()}
        if len(shards) > 1:
            yield case(f"{short}/in-two", valid, both)
        yield case(f"{short}/in-none", valid, {s: [n for n in held if n != name] for s, held in shards.items()})
        yield case(f"{short}/left-out", {n: s for n, s in valid.items() if n != name} or {"x": "a.safetensors"}, refused=False)
        for what, value in _SHARDS.items() if name == names[0] else ():
            yield case(f"{short}/shard-{what}", valid | {name: value})


# ---- all -----------------------------------------------------------------------------------------------------------------


def attacks(base: str) -> Iterator[Case]:
    """Every attack on a base."""
    tensors, config = FAMILIES[base]()
    for name, t in tensors.items():
        if name == "__metadata__":
            continue
        for kind, new in _tensor_kinds(t):
            yield Case(f"{base}/tensor/{name.rpartition('mlp.')[2]}/{kind}", _rewriter(tensors, config, name, new))
    yield from _header_cases(base, tensors, config)
    yield from _config_cases(base, tensors, config)
    yield from _file_cases(base, tensors, config)
    yield from _shard_cases(base, tensors, config)


def _rewriter(tensors: Tensors, config: dict[str, Any], name: str, new: torch.Tensor | None) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        changed = {key: (new if key == name else t) for key, t in tensors.items() if key != name or new is not None}
        replace_file(folder / "config.json", json.dumps({"quantization_config": config}).encode())
        replace_file(folder / "model.safetensors", safetensors_bytes(changed))
        return folder

    return build
