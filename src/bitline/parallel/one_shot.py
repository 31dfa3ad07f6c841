"""The one-shot all-reduce of ranks whose GPUs reach each other's memory: each reads all parts and sums them in rank order."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitline import env

BLOCK = 1024  # elements of a block
# Of waiting for a lost rank, about 1 us each; then the kernel traps, and the process ends with an error of CUDA.
TRIES = 120_000_000


class OneShotSum:
    """Sums of up to `capacity` bytes in one launch that a CUDA graph can hold. Calls of one object are ordered by one stream.

    Args:
        group: The process group, of NCCL; None for the default one.
        device: This rank's GPU.
        capacity: Bytes of the largest x.

    Raises:
        RuntimeError: Where this rank's GPU cannot share memory with the others'; the other ranks may wait for it then.
    """

    def __init__(self, group: Any, device: torch.device, capacity: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        group = group or dist.group.WORLD
        self.rank, self.world, self.capacity = dist.get_rank(group), dist.get_world_size(group), capacity
        blocks = capacity // (2 * BLOCK)  # of 16-bit elements; the fewer of 32-bit ones need fewer
        size = capacity + 4 * blocks * self.world
        self._memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, group)
        self._memory.zero_()
        addresses = [int(address) for address in self._handle.buffer_ptrs]
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._signals = torch.tensor([address + capacity for address in addresses], dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[device.index])  # all signals are zero before anyone sends one

    def fits(self, x: Tensor) -> bool:
        """Whether it sums x [n]."""
        return x.nbytes <= self.capacity and x.element_size() >= 2

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of all ranks' x [n], contiguous and of one shape, in float32 and rank order, rounded once to `dtype`."""
        y = torch.empty(x.numel(), dtype=dtype, device=x.device)
        grid = (-(-x.numel() // BLOCK),)
        _kernel()[grid](x, y, self._buffers, self._signals, x.numel(), self.rank, self.world, BLOCK, TRIES, num_warps=4)
        return y


def open_one_shot(group: Any, device: torch.device, capacity: int) -> OneShotSum | None:
    """A OneShotSum where every rank can have one; None on all ranks where one cannot."""
    made, ok = None, torch.zeros(1, device=device)
    env.set_default("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here uses it
    try:
        reachable = all(
            torch.cuda.can_device_access_peer(device, i) for i in range(torch.cuda.device_count()) if i != device.index
        )
        made = OneShotSum(group, device, capacity) if reachable else None
        ok += made is not None
    except (RuntimeError, ImportError):
        pass
    dist.all_reduce(ok, dist.ReduceOp.MIN, group=group)
    return made if ok.item() else None


@functools.cache
def _kernel() -> Any:
    from bitline.parallel.one_shot_device import one_shot_sum_kernel

    return one_shot_sum_kernel
