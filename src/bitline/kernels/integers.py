"""Weight types whose values are integers times a fixed step, so that int8 kernels compute with them exactly."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitline.types import YES, LinearSpec, ScalarType, Verdict, no
from bitline.weight import QuantizedWeight


@dataclass(frozen=True)
class IntegerCodes:
    """A weight type as integers: the value of code c is step * values[c]."""

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
        """Unpacked codes uint8 to (integer + shift) modulo 256, uint8; view the result as int8 for a signed one."""
        if self.scalar.kind == "int":
            unsigned = raw ^ (1 << (self.scalar.bits - 1)) if self.scalar.signed else raw
            return unsigned + ((self.low + shift) & 255)
        table = torch.tensor([(v + shift) & 255 for v in self.values], dtype=torch.uint8, device=raw.device)
        return table.index_select(0, raw.reshape(-1).int()).view(raw.shape)


@functools.cache
def integer_codes(scalar: ScalarType) -> IntegerCodes | None:
    """The type as integers that span less than 256 (E2M1 with step 0.5, for example), or None where it has no such form."""
    values = scalar.values()
    if not all(map(math.isfinite, values)):
        return None
    for step in (1.0, 0.5, 0.25, 0.125):
        whole = [v / step for v in values]
        if all(v.is_integer() for v in whole):
            return IntegerCodes(scalar, step, tuple(map(int, whole))) if max(whole) - min(whole) < 256 else None
    return None


def int8_codes(weight: QuantizedWeight) -> Tensor:
    """The weight's integers as int8 [N, K] in the input's column order. Only for types that `fits_int8` accepts."""
    codes = integer_codes(weight.spec.weight)
    assert codes is not None, "can_implement refuses these types"
    out = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    step = max(1, (1 << 20) // weight.spec.k)
    for r in range(0, weight.spec.n, step):
        values = codes.shifted(weight.unpacked(slice(r, r + step)), 0).view(torch.int8)
        if weight.perm is None:
            out[r : r + step] = values
        else:
            out[r : r + step].index_copy_(1, weight.perm.long(), values)
    return out


def channel_scales(weight: QuantizedWeight) -> Tensor:
    """float32 [N], the factor of each output channel's integers, of a weight whose scales do not change along K."""
    codes = integer_codes(weight.spec.weight)
    assert codes is not None, "can_implement refuses these types"
    rows = (torch.arange(weight.spec.n, device=weight.device) + weight.spec.block_offset[0]) // weight.spec.block[0]
    return weight.scales()[:, 0].index_select(0, rows) * codes.step


def fits_int8(spec: LinearSpec) -> bool:
    """Whether every value of the weight type is an integer in [-128, 127] times a step."""
    codes = integer_codes(spec.weight)
    return codes is not None and codes.low >= -128 and codes.high <= 127


def per_channel_only(spec: LinearSpec) -> Verdict:
    """Yes for symmetric weights with one scale per output channel, or one for the whole weight."""
    if spec.zero != "none":
        return no(f"weights with {'zero points' if spec.zero == 'int' else 'offsets'}", "a symmetric weight")
    if spec.ragged or spec.grid[1] != 1:
        return no(f"the scale changes along K, in groups of {spec.block[1]}", "one scale per channel, or for the whole weight")
    return YES
