"""Safetensors files written tensor by tensor, in shards, without a second copy of anything in memory or on disk."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from bitline.conversion.packing import raw_bytes
from bitline.errors import ConversionError
from bitline.formats.io.safetensors_source import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER = 1 << 20  # bytes that are kept free for a shard's header; a shard that needs more is closed
_FIRST = 64  # bytes of a header before its first tensor
_ALIGNED = 8
_LATE = 64 << 20  # bytes that are kept in memory for the end of a shard, at most, but for a larger tensor


def header_bytes(names: list[str], per_name: int) -> int:
    """Room for the header of a file with `per_name` tensors for each of these names, about."""
    need = _FIRST + sum(per_name * (len(json.dumps(name)) + 120) for name in names)
    return min(_MOST_HEADER, -(-need // _ALIGNED) * _ALIGNED)


class ShardWriter:
    """Write tensors into a folder. A header comes before its data, so that room is kept for it, and filled up with spaces.

    limit: bytes of data after which a new shard is begun. room: bytes kept for each header. Data has no gaps, by the format's
    rule: what would leave the next tensor unaligned is kept in memory and comes last, 64 MB at most in a shard.
    """

    def __init__(self, folder: Path, limit: int, room: int) -> None:
        self.folder, self.limit, self.room = folder, limit, room
        self.total = 0
        self._shards: list[dict[str, str]] = []  # each header, a tensor's entry as JSON
        self._file: BinaryIO | None = None
        self._late: list[tuple[str, Tensor]] = []
        self._at = self._bytes = self._used = self._kept = 0
        self._known: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor."""
        if name in self._known:
            raise ConversionError("two tensors of the result have one name", tensor=name, fix="rename the plain tensor")
        self._known.add(name)
        need = len(json.dumps(name)) + len(_entry(tensor, 10**15)) + 2
        odd = tensor.nbytes % _ALIGNED != 0
        full = self._bytes and self._bytes + tensor.nbytes > self.limit
        full = full or (odd and self._kept and self._kept + tensor.nbytes > _LATE)
        if self._file is None or full or self._used + need > self.room:
            self._begin(need)
        self._bytes, self._used = self._bytes + tensor.nbytes, self._used + need
        self.total += tensor.nbytes
        if odd:
            self._late.append((name, tensor))
            self._kept += tensor.nbytes
        else:
            self._write(name, tensor)

    def finish(self) -> None:
        """Close the last shard, and give the files their names; an index where there are several."""
        self._end()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, entries in enumerate(self._shards):
            name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._part(i).rename(self.folder / name)
            weight_map |= dict.fromkeys(entries, name)
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        write_json(self.folder / "model.safetensors.index.json", index)

    def close(self) -> None:
        """Close what is open, finished or not."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _part(self, i: int) -> Path:
        return self.folder / f"{i}.part"

    def _begin(self, need: int) -> None:
        self._end()
        self.room = max(self.room, -(-(need + _FIRST) // _ALIGNED) * _ALIGNED)
        self._shards.append({})
        self._file = self._part(len(self._shards) - 1).open("wb")
        self._file.seek(8 + self.room)
        self._at = self._bytes = self._kept = 0
        self._used = _FIRST

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._file is not None
        self._shards[-1][name] = _entry(tensor, self._at)
        if tensor.numel():
            self._file.write(raw_bytes(tensor))
        self._at += tensor.nbytes

    def _end(self) -> None:
        if self._file is None:
            return
        for name, tensor in sorted(self._late, key=lambda late: -late[1].dtype.itemsize):
            self._write(name, tensor)
        self._late = []
        entries = "".join(f",{json.dumps(name)}:{entry}" for name, entry in self._shards[-1].items())
        header = ('{"__metadata__":{"format":"pt"}' + entries + "}").encode()
        assert len(header) <= self.room
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self.room) + header + b" " * (self.room - len(header)))
        sync(self._file)
        self.close()


def _entry(tensor: Tensor, start: int) -> str:
    entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, start + tensor.nbytes]}
    return json.dumps(entry, separators=(",", ":"))


def write_json(path: Path, value: object) -> None:
    """A JSON file as transformers writes them."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        sync(file)


def sync(file: object) -> None:
    """Bytes on the disk, so that a name that is given afterwards never stands for half a file."""
    file.flush()  # type: ignore[attr-defined]
    os.fsync(file.fileno())  # type: ignore[attr-defined]
