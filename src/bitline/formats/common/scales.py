"""How scales and zero points are stored: dtypes, and the shapes that a grid of scale blocks may have in a file."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline.types import ufloat8_e5m3

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
SCALAR_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


def grid_of(n: int, k: int, block: tuple[int, int]) -> tuple[int, int]:
    """Scale blocks along N and along K of an [n, k] weight; the last ones may be partial."""
    return -(-n // block[0]), -(-k // block[1])


def stored_shapes(grid: tuple[int, int], n: int) -> tuple[tuple[int, ...], ...]:
    """The shapes in which a grid of scales is stored: as it is, per tensor also as a scalar, per channel also as [N]."""
    if grid == (1, 1):
        return grid, *SCALAR_SHAPES
    return (grid, (n,)) if grid == (n, 1) else (grid,)


def e5m3_scales(stored: Tensor) -> Tensor:
    """Unsigned E5M3 scales, uint8, as bfloat16, which represents them exactly; torch has no E5M3 dtype."""
    return torch.tensor(ufloat8_e5m3.values(), dtype=torch.bfloat16)[stored.int()]
