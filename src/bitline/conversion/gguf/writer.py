"""A GGUF file, written tensor by tensor. Its header has a fixed size once names and shapes are known, and comes last."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline.conversion.packing import raw_bytes

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # GGUF's numbers of its value types
_FORMATS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<B"}
_ALIGNMENT = 32
_PLAIN = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


class Array(NamedTuple):
    """A metadata value that is a list of one type."""

    kind: int
    values: list[Any]


class Value(NamedTuple):
    """A metadata value."""

    kind: int
    value: Any


Metadata = Mapping[str, Value | Array]


def plain_type(tensor: Tensor) -> int:
    """ggml's number of a plain tensor's type."""
    return _PLAIN[tensor.dtype]


class GGUFWriter:
    """Write `path`: `add` for every name in `shapes` (row-major, in order), then `finish`."""

    def __init__(self, path: Path, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._pairs = b"".join(_text(key) + _payload(value) for key, value in metadata.items())
        self._counts, self._shapes = (len(shapes), len(metadata)), dict(shapes)
        self._entries: dict[str, tuple[int, int]] = {}
        self._file = path.open("wb")
        self._start = -(-len(self._header()) // _ALIGNMENT) * _ALIGNMENT
        self._file.seek(self._start)

    def add(self, name: str, tensor: Tensor, number: int) -> None:
        """The next tensor, as bytes of ggml type `number`."""
        at = self._file.tell() - self._start
        self._entries[name] = (number, at)
        self._file.write(raw_bytes(tensor))
        self._file.write(bytes(-tensor.nbytes % _ALIGNMENT))

    def finish(self) -> None:
        """Write the header and close the file."""
        assert self._entries.keys() == self._shapes.keys()
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()

    def _header(self) -> bytes:
        out = [b"GGUF", struct.pack("<IQQ", 3, *self._counts), self._pairs]
        names = self._entries or self._shapes  # the order of offsets, once there are any
        for name in names:
            dims = self._shapes[name][::-1]
            number, at = self._entries.get(name, (0, 0))
            out.append(_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, at))
        return b"".join(out)


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _payload(value: Value | Array) -> bytes:
    if isinstance(value, Array):
        head = struct.pack("<IIQ", ARRAY, value.kind, len(value.values))
        if value.kind == STRING:
            return head + b"".join(map(_text, value.values))
        return head + struct.pack(f"<{len(value.values)}{_FORMATS[value.kind][1]}", *value.values)
    head = struct.pack("<I", value.kind)
    return head + (_text(value.value) if value.kind == STRING else struct.pack(_FORMATS[value.kind], value.value))
