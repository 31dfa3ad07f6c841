"""Byte ranges of a file as memory-mapped tensors. Small ranges are read instead."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from bitline.errors import CheckpointError

# Up to this size a tensor is read instead of mapped: page faults cost more than copying so few bytes.
MAX_READ_BYTES = 1 << 18


def map_bytes(path: Path, offset: int, nbytes: int, name: str) -> Tensor:
    """Bytes [offset, offset + nbytes) of a file as uint8 [nbytes]: a private (copy-on-write) mapping, or a copy if small.

    One mapping per tensor rather than per file, so that a model read layer by layer has no more than one layer of the file
    resident: the pages are released with the tensor. Writes never reach the file. name: the tensor's, for errors.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if offset + nbytes > size:
                raise CheckpointError("the file became shorter after it was opened", file=path, tensor=name,
                                      found=f"{size} bytes", expected=f"at least {offset + nbytes}")  # fmt: skip
            if nbytes <= MAX_READ_BYTES:
                data = bytearray(nbytes)
                file.seek(offset)
                if file.readinto(data) == nbytes:
                    return torch.frombuffer(data, dtype=torch.uint8)
            mapped = mmap.mmap(file.fileno(), offset + nbytes - start, access=mmap.ACCESS_COPY, offset=start)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("cannot map the file", file=path, tensor=name, found=error) from error
    return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=offset - start)
