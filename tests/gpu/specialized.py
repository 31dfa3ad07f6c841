# mypy: ignore-errors
"""A warp-specialized kernel with nothing but a shared mbarrier: what a sanitizer reports of it is about Triton's prologue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def default_partition(out, ready):
    mbarrier.wait(ready.index(0), 0)
    gl.store(out, 1)


@gluon.jit
def second_partition(out, ready):
    mbarrier.wait(ready.index(0), 0)
    gl.store(out + 1, 2)


@gluon.jit
def producer_partition(out, ready):
    gl.store(out + 2, 3)
    mbarrier.arrive(ready.index(0), count=1)


@gluon.jit
def specialized(out):
    """out int32 [3] = 1, 2, 3."""
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    # fmt: off
    gl.warp_specialize([
        (default_partition, (out, ready)),
        (second_partition, (out, ready)),
        (producer_partition, (out, ready)),
    ], [4, 1], [232, 40])
    # fmt: on
