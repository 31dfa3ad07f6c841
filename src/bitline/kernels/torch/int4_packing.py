"""The nibble layout of torch's CPU int4 operator, inferred from torch itself, and its inverse.

`aten::_convert_weight_to_int4pack_for_cpu` packs codes in blocks of output channels whose size and order depend on the vector
width that torch was built for and detected at start-up. It is undocumented, so it is probed: codes that encode their own
position are packed, and the result says which channel and column every nibble belongs to.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_N = 64  # the largest block; N is padded to a multiple of it, so that no block is a partial one with another layout


@dataclass(frozen=True)
class NibbleLayout:
    """Bytes of `block` output channels lie as [K, block / 2]: low nibbles hold channels `low` of a block, high nibbles `high`."""

    block: int
    low: slice
    high: slice

    def blocks(self, packed: Tensor, k: int) -> Tensor:
        """Packed bytes [n, k / 2] viewed as uint8 [n / block, k, block / 2]."""
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
def layout() -> NibbleLayout | None:
    """This process's layout, or None where it has no form that `NibbleLayout` can express (not seen so far)."""
    position = torch.arange(BLOCK_N * 2).view(BLOCK_N, 2)
    digits = [convert(digit.to(torch.uint8)).flatten() for digit in (position & 15, position >> 4)]
    rows_low = (((digits[0] & 15) | (digits[1] << 4)) >> 1).tolist()
    rows_high = (((digits[0] >> 4) | (digits[1] & 0xF0)) >> 1).tolist()
    for block in (64, 32, 16):
        low, high = _as_slice(rows_low[: block // 2]), _as_slice(rows_high[: block // 2])
        if low is not None and high is not None:
            found = NibbleLayout(block, low, high)
            if _round_trips(found):
                return found
    return None


def _as_slice(rows: list[int]) -> slice | None:
    """Rows a, a + d, a + 2 d, ... as a slice; None for any other sequence."""
    step = rows[1] - rows[0]
    if step < 1 or rows != list(range(rows[0], rows[0] + step * len(rows), step)):
        return None
    return slice(rows[0], rows[-1] + 1, step)


def _round_trips(found: NibbleLayout) -> bool:
    """Whether random codes survive packing by torch and unpacking by the layout."""
    codes = torch.randint(0, 16, (3 * BLOCK_N, 70), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return torch.equal(found.unpack(convert(codes), 70), codes)
