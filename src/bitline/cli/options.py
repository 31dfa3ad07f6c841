"""Option texts parsed into platforms, devices, dtypes and policies. A malformed option is a usage error (exit code 2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import typer

from bitline.errors import BitlineError
from bitline.model.generate import Sampling
from bitline.platform import Platform, as_device
from bitline.select import Policy, resolve_names

GPUS = ("cuda", "xpu")  # types of torch devices that Bitline has kernels for
_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype of --dtype, None for auto."""
    if name not in _DTYPES:
        raise _usage_error("--dtype", f"unknown dtype {name!r}; it is one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def platform_of(text: str) -> Platform | None:
    """The platform of --platform, None where none was given."""
    try:
        return Platform.parse(text) if text else None
    except BitlineError as error:
        raise _usage_error("--platform", str(error)) from error


def device_of(text: str) -> torch.device:
    """The device of --device. "auto" is the first GPU that torch has, else the CPU."""
    if text == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None or accelerator.type not in GPUS else accelerator
    try:
        return as_device(text)
    except BitlineError as error:
        raise _usage_error("--device", str(error)) from error


def sampling_of(temperature: float, top_k: int, top_p: float, seed: int) -> Sampling | None:
    """The sampling of --temperature, --top-k, --top-p and --seed; None for greedy decoding."""
    if temperature == 0.0:
        if top_k or top_p < 1.0:
            raise _usage_error("--temperature", "greedy decoding has no --top-k and --top-p; give a temperature above 0")
        return None
    if not math.isfinite(temperature) or top_p == 0.0:
        raise _usage_error("--temperature", "give a finite temperature, and a --top-p above 0")
    return Sampling(temperature, top_k, top_p, seed)


def policy_of(
    kernel: str | None, backend: str | None, strict: bool, flags: str | None = None, disable: str | None = None, **more: Any
) -> Policy:
    """The policy of the command's options, which override the environment's."""
    disabled = frozenset(name for part in (disable or "").split(",") if (name := part.strip()))
    for option, given in (("--kernel", Policy(kernel or "auto")), ("--backend", Policy(backend=backend or "auto")),
                          ("--disable", Policy(disabled=disabled))):  # fmt: skip
        try:
            resolve_names(given)
        except BitlineError as error:
            raise _usage_error(option, str(error)) from error
    try:
        base = Policy.of(flags)
    except BitlineError as error:
        raise _usage_error("--policy", str(error)) from error
    base = replace(base, kernel=kernel or base.kernel, backend=backend or base.backend)
    return resolve_names(replace(base, strict=strict, disabled=base.disabled | disabled, **more))


def _usage_error(option: str, message: str) -> Exception:
    error: Exception = typer.BadParameter(message, param_hint=option)
    return error
