"""Byte ranges of a file as memory-mapped tensors, and parts of tensors. Small ranges are read instead."""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline import memory
from bitline.errors import CheckpointError
from bitline.formats.base import Range

# Up to this size a tensor is read instead of mapped: page faults cost more than copying so few bytes.
MAX_READ_BYTES = 1 << 18
# Columns of rows: from this many bytes of a row on each row's are read alone, below it this many bytes of whole rows at a time.
MIN_RUN_BYTES = 1 << 11
CHUNK_BYTES = 1 << 20


def map_bytes(path: Path, offset: int, nbytes: int, name: str) -> Tensor:
    """Bytes [offset, offset + nbytes) of a file as uint8 [nbytes]: a private (copy-on-write) mapping, or a copy if small.

    One mapping per tensor rather than per file, so that a model read layer by layer has no more than one layer of the file
    resident: the pages are released with the tensor. Writes never reach the file. name: the tensor's, for errors.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with _opened(path, offset + nbytes, name) as file:
        if nbytes <= MAX_READ_BYTES:
            data = bytearray(nbytes)
            file.seek(offset)
            if file.readinto(data) == nbytes:
                return torch.frombuffer(data, dtype=torch.uint8)
        mapped = mmap.mmap(file.fileno(), offset + nbytes - start, access=mmap.ACCESS_COPY, offset=start)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=offset - start)


def map_part(path: Path, offset: int, shape: Sequence[int], itemsize: int, ranges: Sequence[Range], name: str) -> Tensor:
    """The bytes of a part of a row-major tensor, uint8 [nbytes]: a view of the file where they follow each other, else a copy.

    offset: of the tensor in the file. ranges: one for each dimension, none empty. name: for errors.
    """
    row_bytes, (first, last) = math.prod(shape[1:]) * itemsize, ranges[0]
    begin, rows = offset + first * row_bytes, last - first
    if all(part == (0, size) for part, size in zip(ranges[1:], shape[1:], strict=True)):
        return map_bytes(path, begin, rows * row_bytes, name)
    if rows == 1:
        return map_part(path, begin, shape[1:], itemsize, ranges[1:], name)
    if any(part != (0, size) for part, size in zip(ranges[2:], shape[2:], strict=True)):
        return torch.cat([map_part(path, begin + r * row_bytes, shape[1:], itemsize, ranges[1:], name) for r in range(rows)])
    left, right = (at * math.prod(shape[2:]) * itemsize for at in ranges[1])
    return _read_columns(path, begin, rows, row_bytes, (left, right), name)


def _read_columns(path: Path, begin: int, rows: int, row_bytes: int, columns: Range, name: str) -> Tensor:
    """Bytes `columns` of each row, uint8 [rows * width]. begin: of the first row in the file."""
    (left, right), width = columns, columns[1] - columns[0]
    out = memory.empty(rows, width, dtype=torch.uint8)
    with _opened(path, begin + (rows - 1) * row_bytes + right, name) as file:
        if width >= MIN_RUN_BYTES:
            numbers: Any = out.view(-1).numpy()
            into = memoryview(numbers)
            for r in range(rows):
                _read_into(file, begin + r * row_bytes + left, into[r * width : (r + 1) * width])
            return out.view(-1)
        step = max(1, CHUNK_BYTES // row_bytes)
        buffer = bytearray(min(step, rows) * row_bytes)
        for r in range(0, rows, step):
            count = min(step, rows - r)
            wanted = (count - 1) * row_bytes + right  # the file may end with the last row's columns
            _read_into(file, begin + r * row_bytes, memoryview(buffer)[:wanted])
            whole_rows = torch.frombuffer(buffer, dtype=torch.uint8, count=count * row_bytes).view(count, row_bytes)
            out[r : r + count] = whole_rows[:, left:right]
    return out.view(-1)


def _read_into(file: io.FileIO, offset: int, into: memoryview) -> None:
    """Fill a buffer from this offset on."""
    file.seek(offset)
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])
        if not count:
            raise OSError("the file ended while it was read")
        done += count


@contextlib.contextmanager
def _opened(path: Path, end: int, name: str) -> Iterator[io.FileIO]:
    """The file, which must have so many bytes, unbuffered: a layer has several small tensors. Its errors name file and tensor."""
    try:
        with io.FileIO(path) as file:
            size = os.fstat(file.fileno()).st_size
            if end > size:
                raise CheckpointError("the file became shorter after it was opened", file=path, tensor=name,
                                      found=f"{size} bytes", expected=f"at least {end}")  # fmt: skip
            yield file
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("cannot map the file", file=path, tensor=name, found=error) from error
