"""Exchanges of ranks that are processes of one machine through a file in shared memory: no socket, no kernel call but to wait.

The native core (csrc/ranks.cpp) and the methods here exchange in the same way: a rank's call may be native and another's not.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitline import native
from bitline.errors import BitlineError

FOLDER = Path("/dev/shm")
LINE = 64  # bytes of a cache line: each rank's counter has its own
SPINS = 2_000  # looks at a counter before the processor is given to others
SECONDS = 1800.0  # of waiting for a rank that lives
CHECK_SECONDS = 0.2  # of waiting, between looks whether the others live
_CODES = {torch.float32: 0, torch.bfloat16: 2}  # csrc/gemm.h: Dtype
_Waits = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


class _View(ctypes.Structure):
    """csrc/ranks.h: Ranks."""

    _fields_ = (("memory", ctypes.c_void_p), ("rank", ctypes.c_int64), ("world", ctypes.c_int64), ("capacity", ctypes.c_int64),
                ("calls", ctypes.c_int64), ("waits", _Waits))  # fmt: skip


class SharedGather:
    """Each rank's bytes for all ranks, up to `capacity` of them. All ranks call it in the same order.

    A rank writes into one of two buffers in turn, then its counter. It writes a buffer again when all have counted one more call,
    which they do after they have read it. A rank that ends gives up its lock on a byte of the file, so that the others see it.

    Args:
        file: Descriptor of a file that all ranks have open, of `size_of` bytes, zero when it is new.
        rank: This process's number.
        world: Ranks.
        capacity: Bytes of the largest part.
        seconds: Of waiting for a rank that lives, after which it counts as lost.

    Raises:
        OSError: Where the file cannot be mapped or locked.
    """

    def __init__(self, file: int, rank: int, world: int, capacity: int, seconds: float) -> None:
        self.file, self.rank, self.world, self.capacity, self.seconds = file, rank, world, capacity, seconds
        self._map = mmap.mmap(file, size_of(world, capacity))
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._parts = whole[world * LINE :].view(2, world, capacity)
        self._counters = [ctypes.c_int64.from_buffer(self._map, r * LINE) for r in range(world)]
        self._view = _View(whole.data_ptr(), rank, world, capacity, 0, _Waits(self._waits))
        self.address = ctypes.addressof(self._view)  # of a csrc/ranks.h: Ranks
        self._waiting = (0, 0.0)  # the number of the call in which this rank waits, and since when
        self._error: BaseException | None = None

    def __call__(self, flat: Tensor) -> Tensor:
        """[n] of one shape on all ranks to [world, n].

        Raises:
            BitlineError: For a rank that has ended, or has not come here within `seconds`.
        """
        core = None if flat.requires_grad else native.core_for(flat)
        if core is not None:
            y = flat.new_empty(self.world, flat.numel())
            self.check(core.ranks_gather(self.address, flat.data_ptr(), flat.nbytes, y.data_ptr()))
            return y
        calls = self._view.calls
        parts = self._parts[calls & 1, :, : flat.nbytes].view(flat.dtype)
        parts[self.rank].copy_(flat)
        self._view.calls = self._counters[self.rank].value = calls + 1
        for rank in range(self.world):
            self._wait(rank)
        return parts.clone()

    def sum(self, flat: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The sum of all ranks' [n] in rank order, in float32, rounded once to `dtype`; None where native code does not do it,
        and then nothing was exchanged. Errors as of a gather.
        """
        core = None if flat.requires_grad else native.core_for(flat)
        codes = _CODES.get(flat.dtype), _CODES.get(dtype)
        if core is None or None in codes:
            return None
        y = torch.empty_like(flat, dtype=dtype)
        self.check(core.ranks_sum(self.address, flat.data_ptr(), flat.numel(), codes[0], y.data_ptr(), codes[1]))
        return y

    def check(self, failed: int) -> None:
        """Raise the error of a native function that exchanges something, for its result. 0: there is none."""
        if failed:
            fix = "the first rank that failed printed why"
            raise self._error or BitlineError("native code of a tensor-parallel rank failed", found=f"code {failed}", fix=fix)

    def _wait(self, rank: int) -> None:
        counter, calls = self._counters[rank], self._view.calls
        for _ in range(SPINS):
            if counter.value >= calls:
                return
        checked = time.monotonic()
        while counter.value < calls:
            time.sleep(0)
            if time.monotonic() - checked > CHECK_SECONDS:
                self._check_alive(rank)
                checked = time.monotonic()

    def _waits(self, rank: int) -> int:
        """`_check_alive` for native code: 1 for an error, which `check` raises."""
        try:
            self._check_alive(rank)
        except BaseException as error:  # an interrupt too
            self._error = error
            return 1
        return 0

    def _check_alive(self, rank: int) -> None:
        """Raise for a rank that has been waited for too long, or has ended."""
        calls, now = self._view.calls, time.monotonic()
        if self._waiting[0] != calls:
            self._waiting = calls, now - CHECK_SECONDS
        fix = "the first rank that failed printed why"
        if self._counters[rank].value >= calls:
            return
        if self._has_ended(rank) and self._counters[rank].value < calls:
            raise BitlineError("a rank of the tensor-parallel group has failed or ended", found=f"rank {rank}", fix=fix)
        if now - self._waiting[1] > self.seconds:
            found = f"rank {rank}, for {self.seconds:.0f} s"
            raise BitlineError("a rank of the tensor-parallel group does not answer", found=found, fix=fix)

    def _has_ended(self, rank: int) -> bool:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
        return True


def size_of(world: int, capacity: int) -> int:
    """Bytes of the file: a counter of each rank, and two buffers with a part of each."""
    return world * (LINE + 2 * capacity)


def open_shared_gather(group: Any, capacity: int) -> SharedGather | None:
    """A SharedGather where every rank can have one; None on all ranks where one cannot.

    Stores of one processor must be seen in their order by others, as on x86-64: Python has no fences.
    """
    able = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and FOLDER.is_dir()
    if not _all(able, group):
        return None
    rank, world, made = dist.get_rank(group), dist.get_world_size(group), None
    number = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        number[0] = _create(size_of(world, capacity))
    dist.broadcast(number, dist.get_global_rank(group, 0) if group else 0, group=group)
    path = _path(int(number))
    if int(number):
        with contextlib.suppress(OSError):
            made = SharedGather(os.open(path, os.O_RDWR), rank, world, capacity, SECONDS)
    everyone = _all(made is not None, group)
    if rank == 0:
        path.unlink(missing_ok=True)
    return made if everyone else None


def _path(number: int) -> Path:
    return FOLDER / f"bitline-{number:016x}"


def _create(size: int) -> int:
    """A new file's number, 0 where there is no room for it."""
    number = secrets.randbits(62) | 1
    try:
        file = os.open(_path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return 0
    try:
        os.posix_fallocate(file, 0, size)  # a sparse file in a full file system would end the process by a signal
    except OSError:
        _path(number).unlink()
        return 0
    finally:
        os.close(file)
    return number


def _all(able: bool, group: Any) -> bool:
    """Whether every rank is."""
    flag = torch.tensor([able], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())
