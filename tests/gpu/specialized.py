# mypy: ignore-errors
"""A kernel of specialised warps that share one barrier: what a tool says of it, it says of Triton's own start of the parts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def one(out, ready):
    mbarrier.wait(ready.index(0), 0)
    gl.store(out, 1)


@gluon.jit
def other(out, ready):
    mbarrier.wait(ready.index(0), 0)
    gl.store(out + 1, 2)


@gluon.jit
def last(out, ready):
    gl.store(out + 2, 3)
    mbarrier.arrive(ready.index(0), count=1)


@gluon.jit
def specialized(out):
    """out int32 [3] = 1, 2, 3."""
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    gl.warp_specialize([(one, (out, ready)), (other, (out, ready)), (last, (out, ready))], [4, 1], [232, 40])
