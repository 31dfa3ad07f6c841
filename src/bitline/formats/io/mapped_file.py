"""Parts of a file as tensors, mapped and not read: the pages go back to the system with the tensor. Small ones are read."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from bitline.errors import CheckpointError

# Up to this size a tensor is read: a page fault brings in more of the file, and takes longer, than its bytes do.
SMALL = 1 << 18


def map_bytes(path: Path, offset: int, nbytes: int, name: str) -> Tensor:
    """Bytes [offset, offset + nbytes) of a file as uint8 [nbytes], one private mapping of its own, or a copy if it is small.

    A mapping per tensor, and not one of the whole file, so that a model which is read a layer at a time never has more
    than a layer of the file resident. Writing to the tensor never reaches the file. `name` is the tensor's, for errors.
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
            if nbytes <= SMALL:
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
