"""The header of a safetensors file, parsed as untrusted input: nothing is believed before it is checked against the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeGuard

import torch

from bitline.errors import CheckpointError
from bitline.formats.base import TensorInfo
from bitline.formats.io.json_object import parse_object

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 64
MAX_NAME = 1024
_DAMAGED = "the file is damaged or incomplete: download it again"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32,
    "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


def read_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, int], dict[str, str]]:
    """(tensors by name, file offset of each, the file's metadata). Whatever contradicts the file is a CheckpointError."""
    raw, size = _read_header_bytes(file)
    entries = parse_object(raw, file, "header", size=size)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            "the header's __metadata__ is not text", file=file, field="__metadata__", expected="an object of strings"
        )
    infos: dict[str, TensorInfo] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        info, begin = _parse_entry(file, name, entry)
        infos[name] = info
        ranges.append((begin, begin + info.nbytes, name))
    data_start = 8 + len(raw)
    _check_ranges(file, ranges, size - data_start)
    return infos, {name: data_start + begin for begin, _, name in ranges}, metadata


def _read_header_bytes(file: Path) -> tuple[bytes, int]:
    """The JSON of the header, and the size of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise CheckpointError("this is a Git LFS pointer, not the file itself", file=file, fix="git lfs pull")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length < 2 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                "not a safetensors file: its header's length is impossible", file=file,
                found=f"{length} bytes in a file of {size}", expected=f"2 to {max(2, min(MAX_HEADER_BYTES, size - 8))}",
                fix=_DAMAGED,
            )  # fmt: skip
        raw = stream.read(length)
    if len(raw) < length or raw[:1] != b"{":
        raise CheckpointError("not a safetensors file: its header is not JSON", file=file, found=repr(raw[:8]), fix=_DAMAGED)
    return raw, size


def _parse_entry(file: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    """One tensor of a header, and where its bytes begin in the data. Python integers: sizes cannot overflow."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise CheckpointError("a tensor's name is not printable text", file=file, field="name", found=ascii(name[:MAX_NAME]),
                              expected=f"1 to {MAX_NAME} characters")  # fmt: skip
    fields = entry if isinstance(entry, dict) else {}
    label, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(label, str) or label not in DTYPES:
        raise CheckpointError(
            "a tensor's dtype is not known", file=file, tensor=name, field="dtype", found=repr(label),
            expected=", ".join(DTYPES),
        )  # fmt: skip
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(
            "a tensor's shape is not valid", file=file, tensor=name, field="shape", found=_short(shape),
            expected="a list of sizes >= 0",
        )  # fmt: skip
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            "a tensor's data_offsets are not valid", file=file, tensor=name, field="data_offsets", found=_short(offsets),
            expected="[begin, end]",
        )  # fmt: skip
    dtype, nbytes = DTYPES[label], offsets[1] - offsets[0]
    _check_size(file, name, dtype, shape, nbytes, label)
    return TensorInfo(name, dtype, tuple(shape), file, nbytes), offsets[0]


def _check_size(file: Path, name: str, dtype: torch.dtype, shape: list[int], nbytes: int, label: str) -> None:
    expected = math.prod(shape) * dtype.itemsize
    if expected != nbytes:
        raise CheckpointError(
            "a tensor's bytes do not fit its shape", file=file, tensor=name, field="data_offsets", found=f"{nbytes} bytes",
            expected=f"{expected} for {label} {_short(shape)}", fix=_DAMAGED,
        )  # fmt: skip
    if not nbytes and math.prod(max(1, size) for size in shape) >= 1 << 60:  # torch computes strides of empty tensors too
        raise CheckpointError("an empty tensor's shape is not valid", file=file, tensor=name, field="shape", found=_short(shape),
                              expected="a product of sizes below 2**60")  # fmt: skip


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    for v in value:  # noqa: SIM110  (a loop, since a header has a hundred thousand of these lists)
        if type(v) is not int or not 0 <= v < 1 << 63:
            return False
    return True


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_ranges(file: Path, ranges: list[tuple[int, int, str]], size: int) -> None:
    """Tensors fill the data without gap or overlap, as the format requires, so no byte can be read as two things."""
    end, previous = 0, "the header"
    for begin, stop, name in sorted(ranges):
        if begin != end:
            raise CheckpointError(
                f"a tensor {'overlaps' if begin < end else 'leaves a gap after'} {previous}", file=file, tensor=name,
                field="data_offsets", found=f"bytes [{begin}, {stop}) of the data", expected=f"a start at {end}", fix=_DAMAGED,
            )  # fmt: skip
        end, previous = stop, name
    if end != size:
        raise CheckpointError(
            "the file is truncated" if end > size else "the file has bytes that belong to no tensor", file=file,
            field="data_offsets", found=f"{size} bytes of data", expected=f"{end}, as the header says", fix=_DAMAGED,
        )  # fmt: skip
