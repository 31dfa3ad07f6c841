"""Global-memory workspace of reductions between CTAs: float32 partials, and int32 flags that count their arrivals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bitline.kernels.hopper import runtime
from bitline.kernels.hopper.config import MAX_FLAGS

CAPTURED_LAUNCHES = 8192  # that get their flags from the pool of a device
_by_stream: dict[tuple[int, int], tuple[int, int, int, tuple[Tensor, Tensor]]] = {}
_flag_pools: dict[int, tuple[Tensor, Iterator[int]]] = {}


def workspace(x: Tensor, size: int, stream: int) -> tuple[Any, Any]:
    """(`size` float32 for partials, zeroed flags), as addresses or tensors, which no launch that may run at the same time uses.

    Every launch resets its flags to zero. A stream has a workspace of its own, since its launches are ordered. So has every
    captured launch, since graphs may run concurrently: flags from a pool allocated before the capture, or where it is used up or
    missing, fresh ones that are cleared in the graph itself.
    """
    device = x.get_device()
    if not runtime.is_capturing():
        found = _by_stream.get((device, stream))
        if found is None or found[0] < size:
            partials, flags = x.new_empty(size, dtype=torch.float32), x.new_zeros(MAX_FLAGS, dtype=torch.int32)
            found = _by_stream[device, stream] = (size, partials.data_ptr(), flags.data_ptr(), (partials, flags))
        if device not in _flag_pools:
            _flag_pools[device] = (x.new_zeros(CAPTURED_LAUNCHES, MAX_FLAGS, dtype=torch.int32), itertools.count())
            torch.cuda.current_stream(device).synchronize()  # before another stream uses it
        return found[1], found[2]
    partials = x.new_empty(size, dtype=torch.float32)
    pool = _flag_pools.get(device)
    i = next(pool[1]) if pool else CAPTURED_LAUNCHES
    return partials, pool[0][i] if pool and i < CAPTURED_LAUNCHES else x.new_zeros(MAX_FLAGS, dtype=torch.int32)
