"""The one place where environment variables are read. Each is also an argument somewhere; the argument wins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    """A documented environment variable: `bitline doctor` prints this table."""

    name: str
    effect: str
    argument: str


VARIABLES = (
    Variable("BITLINE_CACHE", "folder for downloaded models", "models.fetch(cache=…)"),
    Variable("BITLINE_DISABLED_KERNELS", "kernel class names never to use, separated by commas", "Policy(disabled=…)"),
    Variable("BITLINE_KERNEL", "the one kernel class to use", "Policy(kernel=…)"),
    Variable("BITLINE_BACKEND", "the provider whose kernels to use", "Policy(backend=…)"),
    Variable("BITLINE_CPU_ISA", "the native core's CPU features: portable, avx2, avx512 or amx", "native.use_isa(…)"),
    Variable("BITLINE_NO_NATIVE", "1: as if the native core had not been built", "Platform(native=False)"),
    Variable("BITLINE_NO_STEP", "1: transformers' own code between the linear layers", "load_model(native_step=False)"),
    Variable("BITLINE_NATIVE_LIBRARY", "file of the native core to load instead of the installed one", "native.Core(path)"),
)


def _read(name: str) -> str:
    return os.environ.get(name, "").strip()


def cache_dir() -> Path:
    """`$BITLINE_CACHE`, else `$XDG_CACHE_HOME/bitline`, else `~/.cache/bitline`."""
    own = _read("BITLINE_CACHE")
    if own:
        return Path(own).expanduser()
    base = _read("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "bitline"


def disabled_kernels() -> frozenset[str]:
    """Class names in `$BITLINE_DISABLED_KERNELS`, blanks trimmed, empty entries dropped."""
    return frozenset(part.strip() for part in _read("BITLINE_DISABLED_KERNELS").split(",") if part.strip())


def kernel() -> str:
    """`$BITLINE_KERNEL`, else "auto"."""
    return _read("BITLINE_KERNEL") or "auto"


def backend() -> str:
    """`$BITLINE_BACKEND`, else "auto"."""
    return _read("BITLINE_BACKEND") or "auto"


def cpu_isa() -> str:
    """`$BITLINE_CPU_ISA`, "" where it is not set."""
    return _read("BITLINE_CPU_ISA").lower()


def no_native() -> bool:
    """True where `$BITLINE_NO_NATIVE` is set to anything but 0."""
    return _read("BITLINE_NO_NATIVE") not in ("", "0")


def no_step() -> bool:
    """True where `$BITLINE_NO_STEP` is set to anything but 0."""
    return _read("BITLINE_NO_STEP") not in ("", "0")


def native_library() -> Path | None:
    """`$BITLINE_NATIVE_LIBRARY`."""
    named = _read("BITLINE_NATIVE_LIBRARY")
    return Path(named).expanduser() if named else None


def triton_interpret() -> bool:
    """True where Triton runs its interpreter instead of compiling (`$TRITON_INTERPRET`, Triton's own variable)."""
    return _read("TRITON_INTERPRET") in ("1", "true", "True", "on")


def set_default(name: str, value: str) -> str | None:
    """Set a variable of another library where it is not set, for code of this process that reads it later; its value before."""
    before = os.environ.get(name)
    os.environ.setdefault(name, value)
    return before


def environment() -> dict[str, str]:
    """A copy of the whole environment, to start a child process with."""
    return dict(os.environ)
