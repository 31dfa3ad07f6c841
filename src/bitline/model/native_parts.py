"""What native code reads of single modules, and the checks that a module computes no more than that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitline.kernels.cpu.native_linear import OP
from bitline.linear import QuantLinear


def readable_weight(module: nn.Module) -> Tensor | None:
    """A module's weight where native code may read it."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype is not torch.bfloat16 or not weight.is_cpu or not weight.is_contiguous():
        return None
    return weight


def is_modified(module: Any, own_forward: Any = None) -> bool:
    """Whether a module has hooks, or a forward on the instance that is not `own_forward`."""
    attributes = module.__dict__
    if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
        return True
    return "forward" in attributes and (
        own_forward is None or getattr(attributes["forward"], "__func__", None) is not own_forward
    )


def packed_linear(linear: Any) -> tuple[Tensor, Tensor | None, int] | None:
    """Packed weight, bias and N of a linear layer; None where it does not run the native kernel directly."""
    if type(linear) is not QuantLinear or is_modified(linear):
        return None
    direct = linear._direct
    if direct is None or direct[0] is not OP or linear._multiplier is not None:
        return None
    if linear.choice.spec.act_dtype is not torch.bfloat16:
        return None
    found: tuple[Tensor, Tensor | None, int] = direct[1]
    return found
