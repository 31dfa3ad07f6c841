"""Poisoned memory: elements that a kernel allocates and does not write are NaN, so that comparisons catch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# torch's functions and Tensor's methods that return uninitialized memory.
_FUNCTIONS = ("empty", "empty_like", "empty_strided", "empty_permuted")
_METHODS = ("new_empty", "new_empty_strided")


@contextmanager
def poison() -> Iterator[None]:
    """Context manager in which torch.empty and its variants return poisoned memory.

    Floats are NaN, integers have bytes of 0xAA, bools are True. It covers allocations from Python on any device, not those inside
    native libraries. torch's functions are replaced while the context is active, so use it in single-threaded tests only.
    """
    saved = {name: getattr(torch, name) for name in _FUNCTIONS}
    own = {name: torch.Tensor.__dict__[name] for name in _METHODS if name in torch.Tensor.__dict__}
    for name, function in saved.items():
        setattr(torch, name, _poisoned(function))
    for name in _METHODS:
        setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(torch, name, function)
        for name in _METHODS:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)


def _poisoned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        return fill(function(*args, **kwargs))

    return call


def fill(tensor: Tensor) -> Tensor:
    """Poison a tensor in place, and return it."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            tensor.fill_(True)
        elif tensor.dtype.is_complex or (tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1):
            tensor.fill_(float("nan"))
        elif tensor.dtype.itemsize == 1 and tensor.dtype != torch.int8:
            # 0xFF is NaN in every one-byte float of torch but the FNUZ types, whose NaN is 0x80.
            byte = 0x80 if "fnuz" in str(tensor.dtype) else 0xFF
            tensor.view(torch.uint8).fill_(byte if tensor.dtype.is_floating_point else 0xAA)
        else:
            tensor.fill_(int.from_bytes(b"\xaa" * tensor.dtype.itemsize, "little", signed=tensor.dtype.is_signed))
    return tensor
