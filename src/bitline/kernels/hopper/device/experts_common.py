# mypy: ignore-errors
"""What the kernels of experts share: which pairs of token and slot a block has, and the gate between the projections.

A pair is t * k + j, slot j of token t. `experts` is an `experts_traits.ExpertsTraits`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bitline.kernels.triton.device.experts_gate import activate as activate_by_name
from bitline.kernels.triton.device.experts_gate import gate_up as gate_up_by_name


@gluon.jit
def block_of_pairs(block, index_ptr, sorted_ptr, blocks_ptr, num_blocks, num_experts, experts: gl.constexpr):
    """(expert, address of the block's first pair, number of pairs up to the expert's last): expert is num_experts where there is
    none.

    is_sorted: tables of `experts_sort`; else block b is pair b alone.
    """
    if experts.is_sorted:
        expert = gl.load(blocks_ptr + block)
        start = gl.load(blocks_ptr + num_blocks + block)
        end = gl.load(blocks_ptr + 2 * num_blocks + block)
        return expert, sorted_ptr + start, end - start
    else:
        number = gl.load(index_ptr + block).to(gl.int64)  # before the comparison: int32 would wrap around
        expert = gl.where((number >= 0) & (number < num_experts), number, num_experts).to(gl.int32)
        return expert, sorted_ptr, 1


@gluon.jit
def pairs_of(row, block, first_pair, count, experts: gl.constexpr):
    """The pairs of rows of a block; those past the last repeat it."""
    if experts.is_sorted:
        return gl.load(first_pair + gl.minimum(row, count - 1))
    else:
        return row * 0 + block


@gluon.jit
def of_expert(ptr, expert, units, UNIT: gl.constexpr):
    """The expert's part of a stack whose experts are `units` times UNIT elements apart."""
    return ptr + expert.to(gl.int64) * units * UNIT


@gluon.jit
def activate(v, experts: gl.constexpr):
    """An activation of float32; v itself without one."""
    ACTIVATION: gl.constexpr = experts.activation
    return activate_by_name(v, ACTIVATION)


@gluon.jit
def gate_up(gate, up, experts: gl.constexpr):
    """A gated ExpertGate of float32 gate and "up"."""
    ACTIVATION: gl.constexpr = experts.activation
    ALPHA: gl.constexpr = experts.alpha
    LIMIT: gl.constexpr = experts.limit
    return gate_up_by_name(gate, up, ACTIVATION, ALPHA, LIMIT)
