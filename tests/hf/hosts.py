"""What a host process may have set before it calls Bitline: torch's defaults, autograd modes, threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As vLLM sets while it builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's threads within an operator."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


HOSTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default bfloat16": lambda: default_dtype(torch.bfloat16), "default float16": lambda: default_dtype(torch.float16),
    "default float64": lambda: default_dtype(torch.float64), "default meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode, "no grad": torch.no_grad, "grad": torch.enable_grad,
    "1 thread": lambda: threads(1), "3 threads": lambda: threads(3),
}  # fmt: skip
