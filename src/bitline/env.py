"""All environment variables that Bitline reads. Each has an equivalent argument, which takes precedence."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    """An environment variable as `bitline doctor` lists it: its name, its effect, and the equivalent argument."""

    name: str
    effect: str
    argument: str


VARIABLES = (
    Variable("BITLINE_CACHE", "directory for downloaded models and measured costs", "model.packaged.fetch(cache=…)"),
    Variable("BITLINE_DISABLED_KERNELS", "kernel class names never to use, comma-separated", "Policy(disabled=…)"),
    Variable("BITLINE_KERNEL", "class name of the kernel to use", "Policy(kernel=…)"),
    Variable("BITLINE_BACKEND", "backend (provider) whose kernels to use", "Policy(backend=…)"),
    Variable("BITLINE_CPU_ISA", "instruction set of the native core: a level of the CPU, such as avx2", "native.use_isa(…)"),
    Variable("BITLINE_NO_NATIVE", "1: run without the native core", "Platform(native=False)"),
    Variable("BITLINE_NO_STEP", "1: disable the native decode step", "load_model(native_step=False)"),
    Variable("BITLINE_NO_TUNED", "1: ignore the costs that `bitline tune` measured", "Policy(tuned=False)"),
    Variable("BITLINE_VLLM", "what Bitline does in vLLM: kernels (default), all, off", "quantization='bitline'"),
    Variable("BITLINE_VERIFY", "1: check every layer against the reference after loading", "load_model(verify=True)"),
    Variable("BITLINE_NATIVE_LIBRARY", "path of a native core to load instead of the installed one", "native.Core(path)"),
)


def _read(name: str) -> str:
    return os.environ.get(name, "").strip()


def _is_set(name: str) -> bool:
    return _read(name) not in ("", "0")


def _number(name: str, default: int) -> int:
    text = _read(name)
    return int(text) if text.isdigit() else default


def cache_dir() -> Path:
    """`$BITLINE_CACHE`, else `$XDG_CACHE_HOME/bitline`, else `~/.cache/bitline`."""
    cache = _read("BITLINE_CACHE")
    if cache:
        return Path(cache).expanduser()
    xdg_cache = _read("XDG_CACHE_HOME")
    return (Path(xdg_cache).expanduser() if xdg_cache else Path.home() / ".cache") / "bitline"


def disabled_kernels() -> frozenset[str]:
    """The class names in `$BITLINE_DISABLED_KERNELS`, stripped, without empty entries."""
    return frozenset(part.strip() for part in _read("BITLINE_DISABLED_KERNELS").split(",") if part.strip())


def kernel() -> str:
    """`$BITLINE_KERNEL`, else "auto"."""
    return _read("BITLINE_KERNEL") or "auto"


def backend() -> str:
    """`$BITLINE_BACKEND`, else "auto"."""
    return _read("BITLINE_BACKEND") or "auto"


def cpu_isa() -> str:
    """`$BITLINE_CPU_ISA` in lower case, "" where it is not set."""
    return _read("BITLINE_CPU_ISA").lower()


def no_native() -> bool:
    """True where `$BITLINE_NO_NATIVE` is set to anything but 0."""
    return _is_set("BITLINE_NO_NATIVE")


def no_step() -> bool:
    """True where `$BITLINE_NO_STEP` is set to anything but 0."""
    return _is_set("BITLINE_NO_STEP")


def no_tuned() -> bool:
    """True where `$BITLINE_NO_TUNED` is set to anything but 0."""
    return _is_set("BITLINE_NO_TUNED")


def vllm_mode() -> str:
    """`$BITLINE_VLLM` in lower case, else "kernels"."""
    return _read("BITLINE_VLLM").lower() or "kernels"


def verify() -> bool:
    """True where `$BITLINE_VERIFY` is set to anything but 0."""
    return _is_set("BITLINE_VERIFY")


def native_library() -> Path | None:
    """`$BITLINE_NATIVE_LIBRARY` as a path, None where it is not set."""
    path = _read("BITLINE_NATIVE_LIBRARY")
    return Path(path).expanduser() if path else None


def triton_interpret() -> bool:
    """True where Triton runs its interpreter instead of compiling (`$TRITON_INTERPRET`, Triton's own variable)."""
    return _read("TRITON_INTERPRET") in ("1", "true", "True", "on")


def set_default(name: str, value: str) -> str | None:
    """Set another library's variable unless it is set. Returns the previous value, None where there was none."""
    previous = os.environ.get(name)
    os.environ.setdefault(name, value)
    return previous


def environment() -> dict[str, str]:
    """A copy of the whole environment, for child processes."""
    return dict(os.environ)


def launched_ranks() -> int:
    """Processes that torchrun started: `$WORLD_SIZE`, 1 where it is not set or no number."""
    return max(1, _number("WORLD_SIZE", 1))


def launched_rank() -> int:
    """This process's number among them: `$RANK`."""
    return _number("RANK", 0)


def local_ranks() -> int:
    """Processes that torchrun started on this machine: `$LOCAL_WORLD_SIZE`, 1 where it is not set or no number."""
    return max(1, _number("LOCAL_WORLD_SIZE", 1))


def local_rank() -> int:
    """This process's number on its machine: `$LOCAL_RANK`."""
    return _number("LOCAL_RANK", 0)
