"""A GGUF v3 file written tensor by tensor. The header's size follows from names and shapes, so it is written last."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline.conversion.tensor_bits import raw_bytes

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # GGUF's metadata value types
_STRUCT_FORMATS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<B"}
_ALIGNMENT = 32
_FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


class Array(NamedTuple):
    """A metadata array of one value type."""

    value_type: int
    values: list[Any]


class Value(NamedTuple):
    """A metadata scalar or string."""

    value_type: int
    value: Any


Metadata = Mapping[str, Value | Array]


def float_type(tensor: Tensor) -> int:
    """The ggml type of a float tensor: F32, F16 or BF16."""
    return _FLOAT_TYPES[tensor.dtype]


class GGUFWriter:
    """Writes `path`: call `add` for every name in `shapes`, then `finish`. shapes: row-major."""

    def __init__(self, path: Path, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._metadata = b"".join(_encode_string(key) + _encode_value(value) for key, value in metadata.items())
        self._metadata_count, self._shapes = len(metadata), dict(shapes)
        self._written: dict[str, tuple[int, int]] = {}  # ggml type and offset by name
        self._file = path.open("wb")
        self._data_start = -(-len(self._header()) // _ALIGNMENT) * _ALIGNMENT
        self._file.seek(self._data_start)

    def add(self, name: str, tensor: Tensor, ggml_type: int) -> None:
        """Write the next tensor's bytes, padded to the alignment."""
        offset = self._file.tell() - self._data_start
        self._written[name] = (ggml_type, offset)
        self._file.write(raw_bytes(tensor))
        self._file.write(bytes(-tensor.nbytes % _ALIGNMENT))

    def finish(self) -> None:
        """Write the header and close the file."""
        assert self._written.keys() == self._shapes.keys()
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()

    def _header(self) -> bytes:
        """The header, with the tensors in offset order once there are any; its size does not depend on offsets."""
        out = [b"GGUF", struct.pack("<IQQ", 3, len(self._shapes), self._metadata_count), self._metadata]
        for name in self._written or self._shapes:
            dims = self._shapes[name][::-1]
            ggml_type, offset = self._written.get(name, (0, 0))
            out.append(_encode_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ggml_type, offset))
        return b"".join(out)


def _encode_string(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _encode_value(value: Value | Array) -> bytes:
    if isinstance(value, Array):
        head = struct.pack("<IIQ", ARRAY, value.value_type, len(value.values))
        if value.value_type == STRING:
            return head + b"".join(map(_encode_string, value.values))
        return head + struct.pack(f"<{len(value.values)}{_STRUCT_FORMATS[value.value_type][1]}", *value.values)
    head = struct.pack("<I", value.value_type)
    return head + (
        _encode_string(value.value) if value.value_type == STRING else struct.pack(_STRUCT_FORMATS[value.value_type], value.value)
    )
