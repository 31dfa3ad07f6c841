"""The nibble layout of torch's CPU int4 operator, learnt from torch itself, and its inverse.

`aten::_convert_weight_to_int4pack_for_cpu` lays codes out in blocks of rows whose size and order depend on the vector
width that torch was built for and found at start-up. No document fixes it, so it is measured: codes that name their
own position are packed, and what comes out says which row and column every nibble belongs to.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 64  # the widest block; weights are padded to whole ones, so that no block has a tail of another layout


@dataclass(frozen=True)
class Layout:
    """Bytes of `block` rows lie as [K, block / 2]; low nibbles are the rows `low` of a block, high nibbles `high`."""

    block: int
    low: slice
    high: slice

    def blocks(self, packed: Tensor, k: int) -> Tensor:
        """Packed bytes [n, k / 2] as uint8 [n / block, k, block / 2], a view."""
        return packed.view(-1, k, self.block // 2)

    def unpack(self, packed: Tensor, k: int) -> Tensor:
        """Packed bytes [n, k / 2] to codes uint8 [n, k]."""
        data = self.blocks(packed, k)
        out = packed.new_empty(data.shape[0], k, self.block)
        out[..., self.low] = data & 15
        out[..., self.high] = data >> 4
        return out.transpose(1, 2).reshape(-1, k)


def convert(codes: Tensor) -> Tensor:
    """Codes uint8 [n, k] in 0..15, n a multiple of 16 and k even, to torch's packed bytes uint8 [n, k / 2]."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)


@functools.cache
def layout() -> Layout | None:
    """This process's layout, or None where it follows no pattern that `Layout` can say (seen nowhere so far)."""
    position = torch.arange(ROWS * 2).view(ROWS, 2)
    digits = [convert(digit.to(torch.uint8)).flatten() for digit in (position & 15, position >> 4)]
    rows_low = (((digits[0] & 15) | (digits[1] << 4)) >> 1).tolist()
    rows_high = (((digits[0] >> 4) | (digits[1] & 0xF0)) >> 1).tolist()
    for block in (64, 32, 16):
        low, high = _progression(rows_low[: block // 2]), _progression(rows_high[: block // 2])
        if low is not None and high is not None:
            found = Layout(block, low, high)
            if _holds(found):
                return found
    return None


def _progression(rows: list[int]) -> slice | None:
    """Rows a, a+d, a+2d, … as a slice."""
    step = rows[1] - rows[0]
    if step < 1 or rows != list(range(rows[0], rows[0] + step * len(rows), step)):
        return None
    return slice(rows[0], rows[-1] + 1, step)


def _holds(found: Layout) -> bool:
    """True where random codes come back."""
    codes = torch.randint(0, 16, (3 * ROWS, 70), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return torch.equal(found.unpack(convert(codes), 70), codes)
