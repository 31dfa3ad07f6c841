"""Memory for large tensors on a CPU.

A system takes longer to bring the pages of new memory than a core takes to write to them, so they are brought in advance and
by all threads (csrc/memory.cpp), and memory that is soon dropped again is used again.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import torch
from torch import Tensor

from bitline import native

LARGE = 4 << 20  # bytes: memory of this size has a large page of its own wherever it begins
SMALL = 1 << 18  # bytes up to which memory is not worth keeping

_lock = threading.Lock()
_spare: list[mmap.mmap] = []  # at most one


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """torch.empty, with its pages there."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.device.type == "cpu" and type(out) is Tensor:
        _prepare(out)
    return out


def passing(*shape: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized CPU memory for a tensor that lives until the next one of its kind is asked for, as the codes of a weight do
    between reading and packing.

    A tensor that lives longer keeps its memory. Of those that were dropped, the largest one's memory is kept for the next;
    `release` gives it back.
    """
    out = torch.empty(0, dtype=dtype)
    count, size = torch.Size(shape).numel(), torch.Size(shape).numel() * out.itemsize
    if size <= SMALL or type(out) is not Tensor:
        return torch.empty(shape, dtype=dtype)
    with _lock:
        region = _spare.pop() if _spare and len(_spare[0]) >= size else None
    if region is None:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(region)  # the tensor holds the view, and the view's end is the tensor's
    weakref.finalize(view, _give_back, region).atexit = False
    out = torch.frombuffer(view, dtype=dtype, count=count).view(shape)
    _prepare(out)
    return out


def release() -> None:
    """Give the memory that `passing` keeps back to the system."""
    with _lock:
        _spare.clear()


def _give_back(region: mmap.mmap) -> None:
    with _lock:
        if not _spare or len(_spare[0]) < len(region):
            _spare[:] = [region]


def _prepare(out: Tensor) -> None:
    core = native.core()
    if core is not None and out.nbytes >= LARGE:
        core.prepare(out.data_ptr(), out.nbytes)
