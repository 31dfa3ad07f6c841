"""CPU memory for large tensors: pages faulted in ahead of use, and buffers of short-lived tensors reused.

Faulting in new pages takes the system longer than a core takes to write to them. So it is done in advance, on all threads and
with huge pages (csrc/prefault.cpp), and the memory of a tensor that is soon dropped serves the next one.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import torch
from torch import Tensor

from bitline import native

MIN_PREFAULT = 4 << 20  # bytes: from here on a region contains a whole huge page wherever it begins
MAX_UNPOOLED = 1 << 18  # bytes up to which reuse is not worth while

_lock = threading.Lock()
_pool: list[mmap.mmap] = []  # at most one region


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """torch.empty with its pages faulted in."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.device.type == "cpu" and type(out) is Tensor:
        _prefault(out)
    return out


def empty_pooled(*shape: int, dtype: torch.dtype) -> Tensor:
    """`empty` on the CPU for a short-lived tensor, such as a weight's codes between reading and packing.

    Of the tensors that have been dropped, the largest one's memory is pooled for the next call; `release` returns it to the
    system. A tensor that lives longer keeps its memory.
    """
    out = torch.empty(0, dtype=dtype)
    count, size = torch.Size(shape).numel(), torch.Size(shape).numel() * out.itemsize
    if size <= MAX_UNPOOLED or type(out) is not Tensor:
        return torch.empty(shape, dtype=dtype)
    with _lock:
        region = _pool.pop() if _pool and len(_pool[0]) >= size else None
    if region is None:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(region)  # owned by the tensor's storage, so that its finalizer runs when the tensor and its views are gone
    weakref.finalize(view, _return_to_pool, region).atexit = False
    out = torch.frombuffer(view, dtype=dtype, count=count).view(shape)
    _prefault(out)
    return out


def release() -> None:
    """Return the pooled memory to the system."""
    with _lock:
        _pool.clear()


def _return_to_pool(region: mmap.mmap) -> None:
    with _lock:
        if not _pool or len(_pool[0]) < len(region):
            _pool[:] = [region]


def _prefault(out: Tensor) -> None:
    core = native.core()
    if core is not None and out.nbytes >= MIN_PREFAULT:
        core.prefault_pages(out.data_ptr(), out.nbytes)
