"""A correction of torch's compiler for CPUs, which can schedule a read of a buffer before the operator that fills it."""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.scheduler import SchedulerNode

NAME = "reads stay behind writes"  # part of the names of caches: a graph that was compiled without the correction may be wrong


def install() -> None:
    """Let the compiler keep what a node reads when it recomputes the node's loops to fuse it with another one.

    A node depends on an operator that writes an argument, as vLLM's matrix products and attention on a CPU do, by the new name
    that the written buffer gets (`mutation_renames`). `SchedulerNode.recompute_size_and_body` of torch 2.13.0 reads the
    dependencies from the loops again, where buffers have their old names, and renames them only where there are ordering
    dependencies beside (https://github.com/pytorch/pytorch/issues/185509). Renaming twice changes nothing, so that this is safe
    with a torch that does it.
    """
    original = SchedulerNode.recompute_size_and_body
    if getattr(original, "bitline", False):
        return

    @functools.wraps(original)
    def recompute_size_and_body(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self.mutation_renames:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    recompute_size_and_body.bitline = True  # type: ignore[attr-defined]
    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign]
