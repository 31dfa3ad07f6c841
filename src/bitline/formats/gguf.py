"""GGUF: one file that holds a model's metadata, its plain tensors and its quantized ones.

The parser trusts nothing: every count, length, type and offset is held against the file's size before it is used.
"""

from __future__ import annotations

import array
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.formats._mapped import map_bytes
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, in_tensor
from bitline.formats.gguf_blocks import BLOCKS, GGML_TYPES, PLAIN_TYPES, RETIRED_TYPES, SUPPORTED, to_weight
from bitline.weight import QuantizedWeight

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}  # struct's and array's codes
_MAX_NESTING = 4
_MAX_NAME = 1024
_SMALLEST_VALUE = 8 + 4 + 1  # an empty key, a type and one byte
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, a type and an offset
_DAMAGED = "the file is damaged or was not downloaded to its end: download it again"


class _Cursor:
    """A read position in a mapped file. Every step is checked against the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def error(self, what: str, found: object, expected: object, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(what, file=self.path, tensor=tensor, found=found, expected=expected, fix=_DAMAGED)

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.at:
            raise self.error(
                f"{what} ends outside the file", f"{nbytes} bytes at offset {self.at}", f"at most {self.size - self.at}"
            )

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def text(self, what: str, errors: str = "strict") -> str:
        length = self.scalar("Q", what)
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8", errors)
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8", raw[:40], "UTF-8 text") from None

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
        if kind == _STRING:
            return self.texts(count, what)
        if smallest == 0:
            raise self.error(f"{what} is an array of a type that GGUF does not have", kind, "0..12")
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
            out.append(data[start:stop].decode("utf-8", "surrogateescape"))
            at = stop
        self.at = at
        return out


class GGUFSource:
    """The tensors of one .gguf file (version 2 or 3, little-endian), for format readers.

    metadata: key to int, float, bool, str, list[str], list[bool], list of arrays, or array.array for numbers. Strings
        that are not UTF-8 (some vocabularies hold raw bytes) are decoded with "surrogateescape".
    tensors: plain tensors have their own dtype and row-major shape; a quantized tensor is uint8 [..., K / block * bytes].
    ggml: for every tensor its ggml type ("F32", "Q4_K", "IQ4_XS", …) and its logical row-major shape, [N, K] for a matrix.
    config: {"quantization_config": {"quant_method": "gguf"}}.

    A header that lies or ends early is a CheckpointError on opening; nothing is allocated on its word before the check.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config: Mapping[str, Any] = {"quantization_config": {"quant_method": "gguf"}}
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.ggml: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._offsets: dict[str, int] = {}
        try:
            size = self.path.stat().st_size
            if size < 24:
                raise CheckpointError(
                    "too short for a GGUF file", file=self.path, found=f"{size} bytes", expected="at least 24", fix=_DAMAGED
                )
            with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._parse(_Cursor(data, self.path))
        except OSError as error:
            raise CheckpointError("cannot open the GGUF file", file=self.path, found=error.strerror) from error

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """The tensor as a view of the mapped file, with the dtype and shape of `tensors[name]`; writing to it never
        reaches the file. rows: only so many of its first rows. A missing name is a CheckpointError.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError("no such tensor", file=self.path, tensor=name, expected=f"one of {len(self.tensors)} names")
        raw = map_bytes(self.path, self._offsets[name], info.nbytes, name)
        return raw.view(info.dtype).view(info.shape)[slice(rows) if info.shape else ...]

    # ---- the header ------------------------------------------------------------------------------------------------

    def _parse(self, cursor: _Cursor) -> None:
        magic = cursor.data[:4]
        if magic != b"GGUF":
            raise cursor.error("not a GGUF file", magic, b"GGUF")
        cursor.at = 4
        version = cursor.scalar("I", "version")
        if version & 0xFFFF == 0 and version:
            raise CheckpointError(
                "a big-endian GGUF file", file=self.path, found=f"version {version:#x}", expected="little-endian version 2 or 3",
                fix="convert it with gguf-convert-endian",
            )  # fmt: skip
        if version not in (2, 3):
            raise CheckpointError(
                "a GGUF version that is not read", file=self.path, found=version, expected="2 or 3",
                fix="convert the model again with a current llama.cpp",
            )  # fmt: skip
        n_tensors, n_values = cursor.scalar("Q", "tensor count"), cursor.scalar("Q", "metadata count")
        for what, count, smallest in (("metadata", n_values, _SMALLEST_VALUE), ("tensor", n_tensors, _SMALLEST_TENSOR)):
            if count * smallest > cursor.size - cursor.at:
                raise cursor.error(f"the {what} count cannot be true", count, f"what {cursor.size} bytes can hold")
        for _ in range(n_values):
            key = cursor.text("a metadata key")
            if key in self.metadata:
                raise cursor.error("a metadata key comes twice", key, "each key once")
            what = f"metadata {key[:80]!r}"
            self.metadata[key] = cursor.value(cursor.scalar("I", what), what)
        if (parts := self.metadata.get("split.count", 0)) not in (0, 1):
            raise CheckpointError(
                "one part of a model that is split over several files", file=self.path, found=f"split.count = {parts}",
                expected="a whole model", fix="join the parts with llama-gguf-split --merge",
            )  # fmt: skip
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise cursor.error("general.alignment is not usable", alignment, "a power of two, at least 8")
        for _ in range(n_tensors):
            self._parse_tensor(cursor, alignment)
        data_start = -(-cursor.at // alignment) * alignment
        self._place(cursor, data_start)

    def _parse_tensor(self, cursor: _Cursor, alignment: int) -> None:
        name = cursor.text("a tensor name")
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise cursor.error("a tensor's name is not printable text", ascii(name[:_MAX_NAME]), f"1 to {_MAX_NAME} characters")
        if name in self.tensors:
            raise cursor.error("a tensor name comes twice", name, "each name once", name)
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
                file=self.path, tensor=name, found=retired or f"type {number}", expected=f"a plain type or {SUPPORTED}",
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
        dtype = PLAIN_TYPES.get(kind, torch.uint8)
        stored = shape if kind in PLAIN_TYPES else (*shape[:-1], dims[0] // block * nbytes)
        self.tensors[name] = TensorInfo(name, dtype, stored, self.path, size)
        self.ggml[name] = (kind, shape)
        self._offsets[name] = offset

    def _place(self, cursor: _Cursor, data_start: int) -> None:
        """Turn offsets into file positions; refuse what lies outside the file or over another tensor."""
        end, last = data_start, ""
        for name in sorted(self._offsets, key=self._offsets.__getitem__):
            start = data_start + self._offsets[name]
            stop = start + self.tensors[name].nbytes
            if stop > cursor.size:
                raise cursor.error("a tensor ends outside the file", f"bytes {start}..{stop}", f"within {cursor.size}", name)
            if start < end:
                raise cursor.error(f"a tensor overlaps {last}", f"start at {start}", f"at least {end}", name)
            end, last = stop, name
            self._offsets[name] = start


class GGUFReader:
    """Layer records of a GGUF file: one for each quantized matrix, named as in the file without ".weight".

    A bias of the same name is part of the layer. Mapping llama.cpp's names to a model's modules is done elsewhere.
    """

    name = "gguf"

    def matches(self, source: TensorSource) -> bool:
        """True for a GGUFSource."""
        return isinstance(source, GGUFSource)

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """A record for every quantized tensor. One that cannot be read is a CheckpointError; see `record`."""
        assert isinstance(source, GGUFSource)
        for name, (kind, _) in source.ggml.items():
            if kind not in PLAIN_TYPES:
                yield record(source, name)


def record(source: GGUFSource, name: str) -> LayerRecord:
    """The record of the quantized matrix `name`. Another ggml type, or a stack of experts, is a CheckpointError."""
    info, (kind, shape) = source.tensors[name], source.ggml[name]
    if kind not in BLOCKS:
        raise CheckpointError(
            f"ggml type {kind} is not supported", file=source.path, tensor=name, found=kind, expected=f"one of {SUPPORTED}",
            fix="use a file quantized to one of these types, for example Q4_K_M",
        )  # fmt: skip
    if len(shape) != 2:
        raise CheckpointError(
            "not a matrix: stacked expert weights are not read from GGUF" if len(shape) == 3 else "not a matrix",
            file=source.path, tensor=name, found=f"{kind} {list(shape)}", expected="[N, K]",
        )  # fmt: skip
    (n, k), base = shape, name.removesuffix(".weight")
    bias = f"{base}.bias" if name.endswith(".weight") and f"{base}.bias" in source.tensors else None
    names: tuple[str, ...] = (name,)
    nbytes = info.nbytes
    if bias is not None:
        other = source.tensors[bias]
        if other.shape != (n,) or not other.dtype.is_floating_point:
            raise CheckpointError(
                "a bias does not fit its weight", file=source.path, tensor=bias,
                found=f"{source.ggml[bias][0]} {list(other.shape)}", expected=f"floats [{n}]",
            )  # fmt: skip
        names, nbytes = (name, bias), nbytes + other.nbytes
    return LayerRecord(
        base, f"gguf {kind}", BLOCKS[kind].spec(n, k, bias=bias is not None), names, _reader(source, name, bias), nbytes
    )


def _reader(source: GGUFSource, name: str, bias: str | None) -> Callable[[], QuantizedWeight]:
    def read() -> QuantizedWeight:
        kind, (_, k) = source.ggml[name]
        try:
            return to_weight(kind, source.read(name), k, None if bias is None else source.read(bias), name)
        except WeightError as error:
            raise in_tensor(error, source.tensors[name], {"bias": source.tensors.get(bias or "")}) from error

    return read


READER = GGUFReader()
