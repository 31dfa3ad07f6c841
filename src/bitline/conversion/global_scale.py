"""NVFP4's global scale under its two conventions: a factor (ModelOpt, Quark) and a divisor (compressed-tensors)."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline.conversion.base import NotExact
from bitline.weight import QuantizedWeight


def divisor(weight: QuantizedWeight) -> Tensor:
    """The float32 [1] that divides every block's scale to the float32 that the weight has; NotExact where none does."""
    return _search(weight, lambda value: 1.0 / value, "global scale is a factor whose reciprocal is no float32")


def factor(weight: QuantizedWeight) -> Tensor:
    """The float32 [] that multiplies every block's scale to the float32 that the weight has; NotExact where none does."""
    return _search(weight, lambda value: value, "global scale is a divisor whose reciprocal is no float32").reshape(())


def reciprocal(value: Tensor) -> Tensor:
    """The float32 [] whose own reciprocal, rounded once to float32, is this value; NotExact where there is none."""
    for candidate in _around(1.0 / value.double().reshape(())):
        if torch.equal((1.0 / candidate.double()).float(), value.float().reshape(())):
            return candidate
    raise NotExact("its input's global scale has no reciprocal in float32 that gives it back")


def _search(weight: QuantizedWeight, meaning, what: str) -> Tensor:  # type: ignore[no-untyped-def]
    """Scales of scales are exact if every E4M3 scale that occurs becomes the same float32; the neighbours are tried too."""
    assert weight.scale2 is not None
    used = weight.scale.view(torch.uint8).unique().view(torch.float8_e4m3fn).double()
    exact = weight.scale2.double().reshape(())
    wanted = (used * exact).float()
    for candidate in _around(meaning(exact)):
        if torch.equal((used * meaning(candidate.double())).float(), wanted):
            return candidate.reshape(1)
    raise NotExact(f"its {what}, so that some scales would change in their last bit")


def _around(value: Tensor) -> list[Tensor]:
    """A float64 rounded to float32, and its neighbours."""
    middle = value.float()
    up, down = (torch.nextafter(middle, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    return [middle, up, down]
