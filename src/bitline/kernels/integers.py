"""Weight types whose values are integers times a step: what integer kernels can compute with exactly."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitline.types import LinearSpec, ScalarType
from bitline.weight import QuantizedWeight


@dataclass(frozen=True)
class Integers:
    """The value of code c is step * values[c]."""

    scalar: ScalarType
    step: float
    values: tuple[int, ...]

    @property
    def low(self) -> int:
        """The smallest integer."""
        return min(self.values)

    @property
    def high(self) -> int:
        """The largest integer."""
        return max(self.values)

    def shifted(self, raw: Tensor, shift: int) -> Tensor:
        """Raw codes, one per byte, to integer + shift modulo 256, uint8; viewed as int8 it is signed."""
        if self.scalar.kind == "int":
            unsigned = raw ^ (1 << (self.scalar.bits - 1)) if self.scalar.signed else raw
            return unsigned + ((self.low + shift) & 255)
        table = torch.tensor([(v + shift) & 255 for v in self.values], dtype=torch.uint8, device=raw.device)
        return table.index_select(0, raw.reshape(-1).int()).view(raw.shape)


@functools.cache
def integers(scalar: ScalarType) -> Integers | None:
    """How a type's codes are integers within a byte's span (E2M1 is, in steps of a half), None where they are not."""
    values = scalar.values()
    if not all(map(math.isfinite, values)):
        return None
    for step in (1.0, 0.5, 0.25, 0.125):
        whole = [v / step for v in values]
        if all(v.is_integer() for v in whole):
            return Integers(scalar, step, tuple(map(int, whole))) if max(whole) - min(whole) < 256 else None
    return None


def signed_bytes(weight: QuantizedWeight) -> Tensor:
    """A weight's integers as int8 [N, K] in input column order (each of them fits: `fits_bytes`)."""
    known = integers(weight.spec.weight)
    assert known is not None, "can_implement refuses these types"
    out = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    step = max(1, (1 << 20) // weight.spec.k)
    for r in range(0, weight.spec.n, step):
        values = known.shifted(weight.unpacked(slice(r, r + step)), 0).view(torch.int8)
        if weight.perm is None:
            out[r : r + step] = values
        else:
            out[r : r + step].index_copy_(1, weight.perm.long(), values)
    return out


def row_scales(weight: QuantizedWeight) -> Tensor:
    """float32 [N], what a row's integers are multiplied by, of a weight whose scales do not change along K."""
    known = integers(weight.spec.weight)
    assert known is not None, "can_implement refuses these types"
    rows = (torch.arange(weight.spec.n, device=weight.device) + weight.spec.block_offset[0]) // weight.spec.block[0]
    return weight.scales()[:, 0].index_select(0, rows) * known.step


def fits_bytes(spec: LinearSpec) -> bool:
    """True where every value is an integer of -128..127 times a step."""
    known = integers(spec.weight)
    return known is not None and known.low >= -128 and known.high <= 127
