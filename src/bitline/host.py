"""Independence of what the host process has set in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import _C

_P = ParamSpec("_P")
_T = TypeVar("_T")


def without_default_device(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function as if the host had not set torch's default device (`torch.set_default_device`, `with torch.device(…)`).

    Engines build their models under a meta or GPU default; a new tensor without a device would land there.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not _C._is_torch_function_mode_enabled():  # a default device is such a mode
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return call
