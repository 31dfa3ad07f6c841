"""NVFP4's global scale in its two conventions: a multiplier (ModelOpt, Quark) or a divisor (compressed-tensors)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitline.conversion.target import NotRepresentable
from bitline.weight import QuantizedWeight


def as_divisor(weight: QuantizedWeight) -> Tensor:
    """The float32 [1] that every block scale is divided by; NotRepresentable where no float32 gives the same products."""
    return _find(weight, lambda scale: 1.0 / scale, "global scale is a multiplier, and no float32 divisor is equivalent")


def as_multiplier(weight: QuantizedWeight) -> Tensor:
    """The float32 [] that every block scale is multiplied by; NotRepresentable where no float32 gives the same products."""
    return _find(weight, lambda scale: scale, "global scale is a divisor, and no float32 multiplier is equivalent").reshape(())


def reciprocal(value: Tensor) -> Tensor:
    """The float32 [] whose reciprocal rounds to this float32 value; NotRepresentable where there is none."""
    for candidate in _neighbors(1.0 / value.double().reshape(())):
        if torch.equal((1.0 / candidate.double()).float(), value.float().reshape(())):
            return candidate
    raise NotRepresentable("its activations' global scale has no float32 reciprocal that inverts exactly")


def _find(weight: QuantizedWeight, convention: Callable[[Tensor], Tensor], problem: str) -> Tensor:
    """The global scale under a convention, which maps a multiplier to its stored value and back, float32 [1].

    Equivalent means that every E4M3 block scale in use has the same float32 product. Neighbouring floats are tried too.
    """
    assert weight.scale2 is not None
    block_scales = weight.scale.view(torch.uint8).unique().view(torch.float8_e4m3fn).double()
    multiplier = weight.scale2.double().reshape(())
    expected = (block_scales * multiplier).float()
    for candidate in _neighbors(convention(multiplier)):
        if torch.equal((block_scales * convention(candidate.double())).float(), expected):
            return candidate.reshape(1)
    raise NotRepresentable(f"its {problem}: some scales would change in their last bit")


def _neighbors(value: Tensor) -> list[Tensor]:
    """A float64 rounded to float32, and the float32 values next to it."""
    nearest = value.float()
    up, down = (torch.nextafter(nearest, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    return [nearest, up, down]
