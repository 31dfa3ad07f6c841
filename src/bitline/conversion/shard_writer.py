"""Sharded safetensors files written tensor by tensor, without a second copy of the data in memory or on disk."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from bitline.conversion.tensor_bits import raw_bytes
from bitline.errors import ConversionError
from bitline.formats.io.safetensors_header import DTYPES

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_RESERVED = 1 << 20  # bytes reserved for a shard's header; a shard that needs more is closed
_HEADER_START = 64  # bytes of a header before its first tensor
_ALIGNMENT = 8
_MAX_DEFERRED = 64 << 20  # bytes kept in memory for the end of a shard, unless one tensor is larger


def header_bytes(names: list[str], tensors_per_name: int) -> int:
    """Bytes to reserve for the header of a file with this many tensors for each of these names, approximately."""
    need = _HEADER_START + sum(tensors_per_name * (len(json.dumps(name)) + 120) for name in names)
    return min(_MAX_RESERVED, -(-need // _ALIGNMENT) * _ALIGNMENT)


class ShardWriter:
    """Writes tensors into a folder as safetensors shards.

    A header precedes its data, so space is reserved for it and padded with blanks. The format allows no gaps between tensors:
    tensors whose size would misalign the next one are deferred to the end of the shard, 64 MB at most.

    max_data: bytes of data after which a new shard begins. header_capacity: bytes reserved for each header.
    """

    def __init__(self, folder: Path, max_data: int, header_capacity: int) -> None:
        self.folder, self.max_data, self.header_capacity = folder, max_data, header_capacity
        self.total_bytes = 0
        self._headers: list[dict[str, str]] = []  # of each shard: tensor name to its header entry as JSON
        self._names: set[str] = set()
        # The open shard:
        self._file: BinaryIO | None = None
        self._deferred: list[tuple[str, Tensor]] = []
        self._deferred_bytes = self._offset = self._data_bytes = self._header_used = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. A name that was written before is a ConversionError."""
        if name in self._names:
            raise ConversionError("two tensors of the result have one name", tensor=name, fix="rename the unquantized tensor")
        self._names.add(name)
        entry_bytes = len(json.dumps(name)) + len(_header_entry(tensor, 10**15)) + 2
        defer = tensor.nbytes % _ALIGNMENT != 0
        full = self._data_bytes and self._data_bytes + tensor.nbytes > self.max_data
        full = full or (defer and self._deferred_bytes and self._deferred_bytes + tensor.nbytes > _MAX_DEFERRED)
        if self._file is None or full or self._header_used + entry_bytes > self.header_capacity:
            self._begin_shard(entry_bytes)
        self._data_bytes += tensor.nbytes
        self._header_used += entry_bytes
        self.total_bytes += tensor.nbytes
        if defer:
            self._deferred.append((name, tensor))
            self._deferred_bytes += tensor.nbytes
        else:
            self._write(name, tensor)

    def finish(self) -> None:
        """Close the last shard and give the files their names, with an index if there are several."""
        self._end_shard()
        count = len(self._headers)
        if count == 1:
            self._part(0).rename(self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, header in enumerate(self._headers):
            name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._part(i).rename(self.folder / name)
            weight_map |= dict.fromkeys(header, name)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        write_json(self.folder / "model.safetensors.index.json", index)

    def close(self) -> None:
        """Close the open file, finished or not."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _part(self, i: int) -> Path:
        return self.folder / f"{i}.part"

    def _begin_shard(self, entry_bytes: int) -> None:
        """Open the next shard, with space for a header of at least one entry."""
        self._end_shard()
        self.header_capacity = max(self.header_capacity, -(-(entry_bytes + _HEADER_START) // _ALIGNMENT) * _ALIGNMENT)
        self._headers.append({})
        self._file = self._part(len(self._headers) - 1).open("wb")
        self._file.seek(8 + self.header_capacity)
        self._offset = self._data_bytes = self._deferred_bytes = 0
        self._header_used = _HEADER_START

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._file is not None
        self._headers[-1][name] = _header_entry(tensor, self._offset)
        if tensor.numel():
            self._file.write(raw_bytes(tensor))
        self._offset += tensor.nbytes

    def _end_shard(self) -> None:
        """Write the deferred tensors, widest dtype first so that each is aligned, then the header."""
        if self._file is None:
            return
        for name, tensor in sorted(self._deferred, key=lambda item: -item[1].dtype.itemsize):
            self._write(name, tensor)
        self._deferred = []
        entries = "".join(f",{json.dumps(name)}:{entry}" for name, entry in self._headers[-1].items())
        header = ('{"__metadata__":{"format":"pt"}' + entries + "}").encode()
        assert len(header) <= self.header_capacity
        self._file.seek(0)
        padding = b" " * (self.header_capacity - len(header))
        self._file.write(struct.pack("<Q", self.header_capacity) + header + padding)
        sync(self._file)
        self.close()


def _header_entry(tensor: Tensor, start: int) -> str:
    entry = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, start + tensor.nbytes]}
    return json.dumps(entry, separators=(",", ":"))


def write_json(path: Path, value: object) -> None:
    """A JSON file, formatted as transformers does."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        sync(file)


def sync(file: object) -> None:
    """Flush a file to disk, so that a later rename never exposes a partial file."""
    file.flush()  # type: ignore[attr-defined]
    os.fsync(file.fileno())  # type: ignore[attr-defined]
