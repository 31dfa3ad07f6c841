# mypy: disable-error-code="no-untyped-def"
"""Device code that sorts (token, slot) pairs by expert: stable, without atomics, launched the same whatever the routing is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_experts(index_ptr, pair, valid, num_experts):
    """The experts' numbers of pairs, int32; num_experts where `valid` is false or the number is out of range."""
    expert = tl.load(index_ptr + pair, mask=valid, other=-1).to(tl.int64)  # before the comparison: int32 would wrap around
    return tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "num_experts"])
def sort_kernel(index_ptr, sorted_ptr, ranges_ptr, pairs, num_experts, BLOCK_SIZE: tl.constexpr):
    """Pairs of each expert in ascending order, one program per expert, each of which reads the whole index.

    index [pairs] -> sorted int32 [pairs], of which those without an expert leave the end unwritten; ranges int32
    [2, num_experts]: where each expert's pairs start and end.
    """
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK_SIZE)
    before = tl.zeros((BLOCK_SIZE,), tl.int32)
    for first in range(0, pairs, BLOCK_SIZE):
        before += (load_experts(index_ptr, first + offs, first + offs < pairs, num_experts) < expert).to(tl.int32)
    start = tl.sum(before, 0)
    end = start
    for first in range(0, pairs, BLOCK_SIZE):
        mine = load_experts(index_ptr, first + offs, first + offs < pairs, num_experts) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(sorted_ptr + end + rank, first + offs, mask=mine)
        end += tl.sum(mine.to(tl.int32), 0)
    tl.store(ranges_ptr + expert, start)
    tl.store(ranges_ptr + num_experts + expert, end)


@triton.jit(do_not_specialize=["num_blocks", "num_experts"])
def blocks_kernel(
    ranges_ptr, blocks_ptr, num_blocks, num_experts,
    BLOCK_SIZE_M: tl.constexpr, MAX_EXPERTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Each expert's range cut into blocks of BLOCK_SIZE_M pairs; BLOCK_SIZE blocks per program.

    ranges: of `sort_kernel`. blocks int32 [3, num_blocks]: a block's expert, where its pairs start in `sorted`, and where the
    expert's end; and after them how many blocks the routing uses. The others have the expert num_experts. MAX_EXPERTS: a power
    of two.
    """
    experts = tl.arange(0, MAX_EXPERTS)
    exists = experts < num_experts
    starts = tl.load(ranges_ptr + experts, mask=exists, other=0)
    ends = tl.load(ranges_ptr + num_experts + experts, mask=exists, other=0)
    count = (ends - starts + BLOCK_SIZE_M - 1) // BLOCK_SIZE_M
    block = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    earlier = tl.cumsum(count, 0)[None, :] <= block[:, None]  # whether all of an expert's blocks come before this one
    expert = tl.minimum(tl.sum(earlier.to(tl.int32), 1), num_experts)
    first_block = tl.sum(tl.where(earlier, count[None, :], 0), 1)
    used = expert < num_experts
    start = tl.load(ranges_ptr + expert, mask=used, other=0) + (block - first_block) * BLOCK_SIZE_M
    end = tl.load(ranges_ptr + num_experts + expert, mask=used, other=0)
    valid = block < num_blocks
    tl.store(blocks_ptr + block, expert, mask=valid)
    tl.store(blocks_ptr + num_blocks + block, start, mask=valid)
    tl.store(blocks_ptr + 2 * num_blocks + block, end, mask=valid)
    if tl.program_id(0) == 0:
        tl.store(blocks_ptr + 3 * num_blocks, tl.sum(count, 0))


@triton.jit(do_not_specialize=["pairs_per_x", "num_blocks", "num_experts"])
def gather_kernel(
    x_ptr, sorted_ptr, blocks_ptr, out_ptr, rows_ptr, pairs_per_x, num_blocks, num_experts,
    K: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    """out[row] = x[pair // pairs_per_x] and rows[pair] = row for the pairs of `blocks_kernel`'s blocks, a program for each row.

    x [T, K]; out [num_blocks * BLOCK_SIZE_M, K], rows int32 [pairs]. Rows past an expert's last pair, and entries of pairs
    without an expert, stay unwritten.
    """
    row = tl.program_id(0)
    block = row // BLOCK_SIZE_M
    at = tl.load(blocks_ptr + num_blocks + block) + row % BLOCK_SIZE_M
    if (tl.load(blocks_ptr + block) >= num_experts) | (at >= tl.load(blocks_ptr + 2 * num_blocks + block)):
        return
    pair = tl.load(sorted_ptr + at)
    tl.store(rows_ptr + pair, row)
    source = x_ptr + (pair // pairs_per_x).to(tl.int64) * K
    target = out_ptr + row.to(tl.int64) * K
    for k in range(0, K, BLOCK_SIZE_K):
        offs = k + tl.arange(0, BLOCK_SIZE_K)
        tl.store(target + offs, tl.load(source + offs, mask=offs < K), mask=offs < K)
