"""The header of one .gguf file: its metadata, and where each tensor lies.

The parser trusts nothing: every count, length, type and offset is held against the file's size before it is used.
"""

from __future__ import annotations

import array
import mmap
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.base import MEMORY_MARGIN_BYTES, PYTHON_VALUE_BYTES
from bitline.formats.gguf.blocks import GGML_TYPES, RETIRED_TYPES, SUPPORTED

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}  # struct's and array's codes
_MAX_NESTING = 4
_MAX_NAME = 1024
_LONG = MEMORY_MARGIN_BYTES // 4
_SMALLEST_VALUE = 8 + 4 + 1  # an empty key, a type and one byte
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, a type and an offset
_DAMAGED = "the file is damaged or was not downloaded to its end: download it again"


class _Cursor:
    """A read position in a mapped file. Every step is checked against the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.size = data, path, 0, len(data)
        self.field = "magic"  # what is being read, in GGUF's own words, or a metadata key
        self.left = (self.size + MEMORY_MARGIN_BYTES) // PYTHON_VALUE_BYTES  # values that memory may be taken for

    def error(self, what: str, found: object, expected: object, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(
            what, file=self.path, tensor=tensor, field=self.field, found=found, expected=expected, fix=_DAMAGED
        )

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.at:
            raise self.error(
                f"{what} ends outside the file", f"{nbytes} bytes at offset {self.at}", f"at most {self.size - self.at}"
            )

    def count(self, values: int, what: str) -> None:
        """Values that Python makes objects of: the file may take a byte for one."""
        if values > self.left:
            raise self.error(f"{what} is too long", f"{values} values", f"at most {self.left} more in {self.size} bytes")
        self.left -= values

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def text(self, what: str, errors: str = "strict") -> str:
        length = self.scalar("Q", what)
        self.need(length, what)
        self.short(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8", errors)
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8", raw[:40], "UTF-8 text") from None

    def short(self, length: int, what: str) -> None:
        """A text of this many bytes may become four times as long: a character has as many bytes as its widest one."""
        if 4 * length > self.size + MEMORY_MARGIN_BYTES:
            raise self.error(f"{what} is too long", f"a text of {length} bytes", f"at most {(self.size + MEMORY_MARGIN_BYTES) // 4}")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _BOOL:
            flag = self.scalar("B", what)
            if flag > 1:
                raise self.error(f"{what} is not a truth value", flag, "0 or 1")
            return bool(flag)
        if kind == _STRING:
            return self.text(what, "surrogateescape")
        if kind != _ARRAY:
            raise self.error(f"{what} has a type that GGUF does not have", kind, "0..12")
        if depth == _MAX_NESTING:
            raise self.error(f"{what} nests too deeply", f"more than {depth} arrays", f"at most {depth}")
        return self.array(what, depth)

    def array(self, what: str, depth: int) -> Any:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if kind in _SCALARS:
            values = array.array(_SCALARS[kind])
            self.need(count * values.itemsize, what)
            stop = self.at + count * values.itemsize
            values.frombytes(self.data[self.at : stop])
            self.at = stop
            if sys.byteorder == "big":
                values.byteswap()
            return values
        smallest = {_BOOL: 1, _STRING: 8, _ARRAY: 12}.get(kind, 0)
        self.need(count * smallest, what)
        if smallest == 0:
            raise self.error(f"{what} is an array of a type that GGUF does not have", kind, "0..12")
        self.count(count, what)
        if kind == _STRING:
            return self.texts(count, what)
        return [self.value(kind, what, depth + 1) for _ in range(count)]

    def texts(self, count: int, what: str) -> list[str]:
        """Many strings at once: a vocabulary has a quarter of a million, so the loop body is all that it can be."""
        data, at, size, length_at = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            start = at + 8
            if start > size or (stop := start + length_at(data, at)[0]) > size:
                self.at = at
                raise self.error(f"{what} ends outside the file", f"string {len(out)} at offset {at}", f"{count} strings")
            if stop - start > _LONG:
                self.short(stop - start, what)
            out.append(data[start:stop].decode("utf-8", "surrogateescape"))
            at = stop
        self.at = at
        return out


@dataclass(frozen=True)
class Entry:
    """One tensor: its ggml type, its logical row-major shape, and the bytes of the file that it is."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass
class Header:
    """A parsed file. metadata: key to int, float, bool, str, list[str], list[bool], list of arrays, or array.array."""

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)


def read_header(path: Path) -> Header:
    """The header of a version 2 or 3, little-endian file. One that lies or ends early is a CheckpointError; nothing is
    allocated on its word before the check.
    """
    try:
        size = path.stat().st_size
        if size < 24:
            raise CheckpointError(
                "too short for a GGUF file", file=path, found=f"{size} bytes", expected="at least 24", fix=_DAMAGED
            )
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path))
    except OSError as error:
        raise CheckpointError("cannot open the GGUF file", file=path, found=error.strerror) from error


def _parse(cursor: _Cursor) -> Header:
    header = Header(cursor.path)
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise cursor.error("not a GGUF file", magic, b"GGUF")
    cursor.at = 4
    cursor.field = "version"
    version = cursor.scalar("I", "version")
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(
            "a big-endian GGUF file", file=cursor.path, field="version", found=f"version {version:#x}",
            expected="little-endian version 2 or 3", fix="convert it with gguf-convert-endian",
        )  # fmt: skip
    if version not in (2, 3):
        raise CheckpointError(
            "a GGUF version that is not read", file=cursor.path, field="version", found=version, expected="2 or 3",
            fix="convert the model again with a current llama.cpp",
        )  # fmt: skip
    n_tensors, n_values = cursor.scalar("Q", "tensor count"), cursor.scalar("Q", "metadata count")
    for what, count, smallest in (("metadata", n_values, _SMALLEST_VALUE), ("tensor", n_tensors, _SMALLEST_TENSOR)):
        cursor.field = "metadata_kv_count" if what == "metadata" else "tensor_count"
        if count * smallest > cursor.size - cursor.at:
            raise cursor.error(f"the {what} count cannot be true", count, f"what {cursor.size} bytes can hold")
        cursor.count(5 * count, f"the list of {what} entries")  # each with a name
    for _ in range(n_values):
        cursor.field = "metadata_kv"
        key = cursor.text("a metadata key")
        if key in header.metadata:
            raise cursor.error("a metadata key comes twice", key, "each key once")
        what, cursor.field = f"metadata {key[:80]!r}", key or "metadata_kv"
        header.metadata[key] = cursor.value(cursor.scalar("I", what), what)
    cursor.field = "general.alignment"
    alignment = header.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.error("general.alignment is not usable", alignment, "a power of two, at least 8")
    entries: dict[str, Entry] = {}
    cursor.field = "tensor_infos"
    for _ in range(n_tensors):
        name, entry = _parse_tensor(cursor, alignment)
        if name in entries:
            raise cursor.error("a tensor name comes twice", name, "each name once", name)
        entries[name] = entry
    header.tensors = _placed(entries, cursor, -(-cursor.at // alignment) * alignment)
    return header


def _parse_tensor(cursor: _Cursor, alignment: int) -> tuple[str, Entry]:
    """A tensor's name and entry; the offset is still the header's, from the start of the data."""
    name = cursor.text("a tensor name")
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise cursor.error("a tensor's name is not printable text", ascii(name[:_MAX_NAME]), f"1 to {_MAX_NAME} characters")
    what = f"the header of tensor {name[:80]!r}"
    rank = cursor.scalar("I", what)
    if not 1 <= rank <= 4:
        raise cursor.error("a tensor's number of dimensions is not valid", rank, "1..4", name)
    dims = tuple(cursor.scalar("Q", what) for _ in range(rank))
    number, offset = cursor.scalar("I", what), cursor.scalar("Q", what)
    if number not in GGML_TYPES:
        retired = RETIRED_TYPES.get(number)
        raise CheckpointError(
            "a tensor of a type that ggml no longer has" if retired else "a tensor of an unknown ggml type",
            file=cursor.path, tensor=name, field="type", found=retired or f"type {number}",
            expected=f"a plain type or {SUPPORTED}",
            fix="quantize the model again with a current llama.cpp",
        )  # fmt: skip
    kind, block, nbytes = GGML_TYPES[number]
    if any(d < 1 for d in dims):
        raise cursor.error("a tensor has an empty dimension", list(dims), "dimensions of at least 1", name)
    if dims[0] % block:
        raise cursor.error(f"a {kind} row does not end on a block", f"{dims[0]} columns", f"a multiple of {block}", name)
    if offset % alignment:
        raise cursor.error("a tensor's offset is not aligned", offset, f"a multiple of {alignment}", name)
    shape = tuple(reversed(dims))  # the file lists the fastest dimension first
    size = dims[0] // block * nbytes
    for d in dims[1:]:
        size *= d  # Python integers: no overflow to fear
    if size > cursor.size:
        raise cursor.error(
            f"a {kind} tensor is larger than the file", f"{size} bytes for {list(shape)}", f"≤ {cursor.size}", name
        )
    return name, Entry(kind, shape, offset, size)


def _placed(entries: dict[str, Entry], cursor: _Cursor, data_start: int) -> dict[str, Entry]:
    """The entries with positions in the file; what lies outside the file or over another tensor is refused."""
    end, last = data_start, ""
    placed = dict(entries)  # in the header's order
    for name in sorted(entries, key=lambda name: entries[name].offset):
        entry = entries[name]
        start = data_start + entry.offset
        stop = start + entry.nbytes
        if stop > cursor.size:
            raise cursor.error("a tensor ends outside the file", f"bytes {start}..{stop}", f"within {cursor.size}", name)
        if start < end:
            raise cursor.error(f"a tensor overlaps {last}", f"start at {start}", f"at least {end}", name)
        end, last = stop, name
        placed[name] = Entry(entry.kind, entry.shape, start, entry.nbytes)
    return placed
