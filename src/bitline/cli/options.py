"""Options of the command as what they mean. A word that nothing can mean is a wrong command line, and not a wrong input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import typer

from bitline.errors import BitlineError
from bitline.platform import Platform, as_device
from bitline.select import Policy, check_names

_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype of --dtype, None for auto."""
    if name not in _DTYPES:
        raise _wrong("--dtype", f"unknown dtype {name!r}; it is one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def platform_of(text: str) -> Platform | None:
    """The platform of --platform, None where none was given."""
    try:
        return Platform.parse(text) if text else None
    except BitlineError as error:
        raise _wrong("--platform", str(error)) from error


def device_of(text: str) -> torch.device:
    """The device of --device."""
    try:
        return as_device(text)
    except BitlineError as error:
        raise _wrong("--device", str(error)) from error


def policy_of(
    kernel: str | None, backend: str | None, strict: bool, words: str | None = None, disable: str | None = None, **more: Any
) -> Policy:
    """The policy of the command's options over the environment's."""
    off = frozenset(name for part in (disable or "").split(",") if (name := part.strip()))
    for option, given in (("--kernel", Policy(kernel or "auto")), ("--backend", Policy(backend=backend or "auto")),
                          ("--disable", Policy(disabled=off))):  # fmt: skip
        try:
            check_names(given)
        except BitlineError as error:
            raise _wrong(option, str(error)) from error
    try:
        base = Policy.of(words)
    except BitlineError as error:
        raise _wrong("--policy", str(error)) from error
    base = replace(base, kernel=kernel or base.kernel, backend=backend or base.backend)
    return replace(base, strict=strict, disabled=base.disabled | off, **more)


def _wrong(option: str, message: str) -> Exception:
    wrong: Exception = typer.BadParameter(message, param_hint=option)
    return wrong
