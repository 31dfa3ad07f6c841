"""The header of one .gguf file: its metadata, and the type, shape and position of each tensor.

The file is untrusted: every count, length, type and offset is checked against the file's size before it is used.
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
from bitline.formats.gguf.blocks import SUPPORTED
from bitline.formats.gguf.ggml_types import GGML_TYPES, RETIRED_TYPES

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}  # struct's and array's codes
_MAX_NESTING = 4
_MAX_NAME = 1024
_LONG_TEXT = MEMORY_MARGIN_BYTES // 4  # bytes; shorter texts need no check of their own
_MIN_VALUE_BYTES = 8 + 4 + 1  # an empty key, a type and one byte
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, a type and an offset
_DAMAGED = "the file is damaged or was not downloaded completely: download it again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its ggml type, its logical row-major shape, and its bytes in the file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass
class Header:
    """A parsed header. metadata: key to int, float, bool, str, list[str], list[bool], list of arrays, or array.array."""

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)


def read_header(path: Path) -> Header:
    """The header of a little-endian file of version 2 or 3. An invalid or truncated one is a CheckpointError; nothing is
    allocated by its counts and lengths before they are checked.
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


# ---- values --------------------------------------------------------------------------------------------------------------


class _Cursor:
    """A read position in a mapped file. Every read is checked against the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.offset, self.size = data, path, 0, len(data)
        self.field = "magic"  # what is being read: a field of the GGUF specification, or a metadata key
        self.values_left = (self.size + MEMORY_MARGIN_BYTES) // PYTHON_VALUE_BYTES

    def error(self, what: str, found: object, expected: object, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(
            what, file=self.path, tensor=tensor, field=self.field, found=found, expected=expected, fix=_DAMAGED
        )

    def require_bytes(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.offset:
            found, expected = f"{nbytes} bytes at offset {self.offset}", f"at most {self.size - self.offset}"
            raise self.error(f"{what} ends outside the file", found, expected)

    def count_values(self, values: int, what: str) -> None:
        """Account for values that become Python objects, for each of which the file may spend a single byte."""
        if values > self.values_left:
            expected = f"at most {self.values_left} more in {self.size} bytes"
            raise self.error(f"{what} is too long", f"{values} values", expected)
        self.values_left -= values

    def check_text_length(self, length: int, what: str) -> None:
        """A text of this many bytes may take four times as many: all characters are as wide as the widest."""
        if 4 * length > self.size + MEMORY_MARGIN_BYTES:
            expected = f"at most {(self.size + MEMORY_MARGIN_BYTES) // 4}"
            raise self.error(f"{what} is too long", f"a text of {length} bytes", expected)

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.require_bytes(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += size
        return value

    def text(self, what: str, errors: str = "strict") -> str:
        length = self.scalar("Q", what)
        self.require_bytes(length, what)
        self.check_text_length(length, what)
        raw = self.data[self.offset : self.offset + length]
        self.offset += length
        try:
            return raw.decode("utf-8", errors)
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8", raw[:40], "UTF-8 text") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """One metadata value of a GGUF type."""
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
            return self.numbers(_SCALARS[kind], count, what)
        min_bytes = {_BOOL: 1, _STRING: 8, _ARRAY: 12}.get(kind, 0)
        self.require_bytes(count * min_bytes, what)
        if min_bytes == 0:
            raise self.error(f"{what} is an array of a type that GGUF does not have", kind, "0..12")
        self.count_values(count, what)
        if kind == _STRING:
            return self.texts(count, what)
        return [self.value(kind, what, depth + 1) for _ in range(count)]

    def numbers(self, code: str, count: int, what: str) -> Any:
        """Many numbers at once."""
        values = array.array(code)
        self.require_bytes(count * values.itemsize, what)
        stop = self.offset + count * values.itemsize
        values.frombytes(self.data[self.offset : stop])
        self.offset = stop
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def texts(self, count: int, what: str) -> list[str]:
        """Many strings at once: a vocabulary has a quarter of a million, so the loop body is minimal."""
        data, offset, size, length_at = self.data, self.offset, self.size, struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            start = offset + 8
            if start > size or (stop := start + length_at(data, offset)[0]) > size:
                self.offset = offset
                raise self.error(f"{what} ends outside the file", f"string {len(out)} at offset {offset}", f"{count} strings")
            if stop - start > _LONG_TEXT:
                self.check_text_length(stop - start, what)
            out.append(data[start:stop].decode("utf-8", "surrogateescape"))
            offset = stop
        self.offset = offset
        return out


# ---- the header ----------------------------------------------------------------------------------------------------------


def _parse(cursor: _Cursor) -> Header:
    header = Header(cursor.path)
    _check_magic_and_version(cursor)
    tensor_count, metadata_count = _read_counts(cursor)
    header.metadata = _parse_metadata(cursor, metadata_count)
    cursor.field = "general.alignment"
    alignment = header.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.error("general.alignment is not usable", alignment, "a power of two, at least 8")
    entries: dict[str, TensorEntry] = {}
    cursor.field = "tensor_infos"
    for _ in range(tensor_count):
        name, entry = _parse_tensor(cursor, alignment)
        if name in entries:
            raise cursor.error("a tensor name comes twice", name, "each name once", name)
        entries[name] = entry
    header.tensors = _with_file_offsets(entries, cursor, -(-cursor.offset // alignment) * alignment)
    return header


def _check_magic_and_version(cursor: _Cursor) -> None:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise cursor.error("not a GGUF file", magic, b"GGUF")
    cursor.offset = 4
    cursor.field = "version"
    version = cursor.scalar("I", "version")
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(
            "a big-endian GGUF file", file=cursor.path, field="version", found=f"version {version:#x}",
            expected="little-endian version 2 or 3", fix="convert it with gguf-convert-endian",
        )  # fmt: skip
    if version not in (2, 3):
        raise CheckpointError(
            "a GGUF version that is not supported", file=cursor.path, field="version", found=version, expected="2 or 3",
            fix="convert the model again with a current llama.cpp",
        )  # fmt: skip


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """tensor_count and metadata_kv_count, as many as the file can hold."""
    tensor_count, metadata_count = cursor.scalar("Q", "tensor count"), cursor.scalar("Q", "metadata count")
    for what, spec_field, count, min_bytes in (
        ("metadata", "metadata_kv_count", metadata_count, _MIN_VALUE_BYTES),
        ("tensor", "tensor_count", tensor_count, _MIN_TENSOR_BYTES),
    ):
        cursor.field = spec_field
        if count * min_bytes > cursor.size - cursor.offset:
            raise cursor.error(f"the {what} count cannot be true", count, f"what {cursor.size} bytes can hold")
        cursor.count_values(5 * count, f"the list of {what} entries")  # the objects of one entry, its name included
    return tensor_count, metadata_count


def _parse_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        cursor.field = "metadata_kv"
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.error("a metadata key comes twice", key, "each key once")
        what, cursor.field = f"metadata {key[:80]!r}", key or "metadata_kv"
        metadata[key] = cursor.value(cursor.scalar("I", what), what)
    return metadata


def _parse_tensor(cursor: _Cursor, alignment: int) -> tuple[str, TensorEntry]:
    """A tensor's name and entry; its offset is still relative to the start of the data."""
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
        raise _unknown_type(cursor.path, name, number)
    kind, block, block_bytes = GGML_TYPES[number]
    if any(d < 1 for d in dims):
        raise cursor.error("a tensor has an empty dimension", list(dims), "dimensions of at least 1", name)
    if dims[0] % block:
        raise cursor.error(f"a {kind} row does not end on a block", f"{dims[0]} columns", f"a multiple of {block}", name)
    if offset % alignment:
        raise cursor.error("a tensor's offset is not aligned", offset, f"a multiple of {alignment}", name)
    shape = tuple(reversed(dims))  # the file lists the fastest dimension first
    nbytes = dims[0] // block * block_bytes
    for d in dims[1:]:
        nbytes *= d  # Python integers do not overflow
    if nbytes > cursor.size:
        found = f"{nbytes} bytes for {list(shape)}"
        raise cursor.error(f"a {kind} tensor is larger than the file", found, f"≤ {cursor.size}", name)
    return name, TensorEntry(kind, shape, offset, nbytes)


def _unknown_type(path: Path, name: str, number: int) -> CheckpointError:
    retired = RETIRED_TYPES.get(number)
    return CheckpointError(
        "a tensor of a type that ggml has removed" if retired else "a tensor of an unknown ggml type",
        file=path, tensor=name, field="type", found=retired or f"type {number}",
        expected=f"a plain type or {SUPPORTED}",
        fix="quantize the model again with a current llama.cpp",
    )  # fmt: skip


def _with_file_offsets(entries: dict[str, TensorEntry], cursor: _Cursor, data_start: int) -> dict[str, TensorEntry]:
    """The entries with offsets in the file; one outside the file or overlapping another is refused."""
    end, previous = data_start, ""
    placed = dict(entries)  # in the header's order
    for name in sorted(entries, key=lambda name: entries[name].offset):
        entry = entries[name]
        start = data_start + entry.offset
        stop = start + entry.nbytes
        if stop > cursor.size:
            raise cursor.error("a tensor ends outside the file", f"bytes {start}..{stop}", f"within {cursor.size}", name)
        if start < end:
            raise cursor.error(f"a tensor overlaps {previous}", f"start at {start}", f"at least {end}", name)
        end, previous = stop, name
        placed[name] = TensorEntry(entry.kind, entry.shape, start, entry.nbytes)
    return placed
