# mypy: ignore-errors
"""A kernel of two specialised parts that share no memory: what a tool says of it, it says of Triton's own start of the parts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def one(out):
    gl.store(out, 1)


@gluon.jit
def other(out):
    gl.store(out + 1, 2)


@gluon.jit
def specialized(out):
    """out int32 [2] = 1, 2."""
    gl.warp_specialize([(one, (out,)), (other, (out,))], [1], [24])
