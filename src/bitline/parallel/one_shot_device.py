# mypy: disable-error-code="no-untyped-def"
"""Device code of the one-shot all-reduce: one launch writes, waits, and sums what all ranks wrote, in the order of ranks.

`buffers` and `signals` are int64 [WORLD]: where each rank's buffer and its signals lie in this rank's address space. A signal is
an int32, one for each block and other rank. A block of one rank waits for the same block of the others alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _trap(lost):
    """End the kernel with an error where `lost` is not 0."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p trap; mov.u32 $0, $1; }", "=r,r", [lost], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _meet(signals, RANK: tl.constexpr, WORLD: tl.constexpr, TRIES: tl.constexpr):
    """Wait until this block has come here on all ranks; what they wrote before is visible after it.

    A signal goes 0 -> 1 by its sender and back by its receiver, so that nothing has to be reset between calls or replays.
    """
    block = tl.program_id(0)
    tl.debug_barrier()
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            theirs = tl.load(signals + peer).to(tl.pointer_type(tl.int32)) + block * WORLD + RANK
            tries = 0
            while (tries < TRIES) and (tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0):
                tries += 1
            _trap((tries >= TRIES).to(tl.int32))
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            mine = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + block * WORLD + peer
            tries = 0
            while (tries < TRIES) and (tl.atomic_cas(mine, 1, 0, sem="acquire", scope="sys") != 1):
                tries += 1
            _trap((tries >= TRIES).to(tl.int32))
    tl.debug_barrier()


@triton.jit
def one_shot_sum_kernel(
    x, y, buffers, signals, n, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, TRIES: tl.constexpr
):
    """y [n] = the sum of all ranks' x [n] in float32, rounded once to y's dtype."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < n
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    own = tl.multiple_of(tl.load(buffers + RANK).to(kind), 16)
    tl.store(own + element, tl.load(x + element, mask=inside), mask=inside)
    _meet(signals, RANK, WORLD, TRIES)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(WORLD):
        theirs = tl.multiple_of(tl.load(buffers + peer).to(kind), 16)
        part = tl.load(theirs + element, mask=inside, cache_modifier=".cg")
        total = part.to(tl.float32) if peer == 0 else total + part.to(tl.float32)
    tl.store(y + element, total.to(y.dtype.element_ty), mask=inside)
    _meet(signals, RANK, WORLD, TRIES)  # nobody writes again before all have read
