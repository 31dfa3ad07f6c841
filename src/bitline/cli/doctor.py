"""`bitline doctor`: this machine's devices, compilers and packages, and a test of every kernel that runs here."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform as host
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bitline import env, native
from bitline.cli.scheme_text import scheme_text
from bitline.formats import discovery
from bitline.kernels import registry
from bitline.kernels.base import Kernel
from bitline.linear import QuantLinear
from bitline.platform import PACKAGES, Platform, cpu_name, installed_packages
from bitline.rtn import quantize
from bitline.select import verdict_of
from bitline.testing.conformance import default_specs
from bitline.testing.generators import random_weight
from bitline.testing.tolerance import compare
from bitline.timing import read_bandwidth
from bitline.types import LinearSpec, float6_e2m3
from bitline.version import __version__
from bitline.weight import QuantizedWeight

_MXFP6 = LinearSpec(64, 256, float6_e2m3, (1, 32), scale_dtype=torch.float8_e8m0fnu)
_COMPILERS = {"C": ("cc", "gcc", "clang"), "C++": ("c++", "g++", "clang++"), "CUDA": ("nvcc",), "HIP": ("hipcc",)}
TESTED_SCHEMES = (
    "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4",
    "MXFP8A16", "MXFP8",
)  # fmt: skip


def doctor_report() -> dict[str, Any]:
    """The report of the command as JSON-compatible values. A failing probe is an entry with `error`, never an exception.

    docs/command-line.md describes the keys.
    """
    found = installed_packages()
    devices = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        devices.append("xpu")
    return {
        "bitline": __version__, "python": sys.version.split()[0], "system": host.platform(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "safetensors", "gguf", "numpy")},
        "compilers": {kind: _compiler(names) for kind, names in _COMPILERS.items()},
        "native": _guarded({"available": False}, native.report),
        "devices": [_guarded({"device": d}, functools.partial(_device, d)) for d in devices],
        "packages": [_guarded({"package": k.distribution}, functools.partial(_package, p, found, devices))
                     for p, k in PACKAGES.items()],
        "plugin_failures": _plugin_failures(),
        "environment": [{"name": v.name, "effect": v.effect, "argument": v.argument, "value": env.environment().get(v.name)}
                        for v in env.VARIABLES],
        "kernels": [row for d in devices for row in _kernels(d)],
    }  # fmt: skip


def _compiler(names: tuple[str, ...]) -> dict[str, str] | None:
    """The path of the first compiler found, and the first line of its version text."""
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        return None
    try:
        lines = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout.split("\n")
    except (OSError, subprocess.SubprocessError) as error:
        lines = [str(error)]
    line = next((x for x in lines if "release" in x), lines[0]) if "nvcc" in path else lines[0]  # nvcc prints its name first
    return {"path": path, "version": line.strip()}


def _package(name: str, found: dict[str, str], devices: list[str]) -> dict[str, Any]:
    """What a package adds, and which kernels need it on this machine's devices."""
    kernels: set[str] = set()
    for where in map(Platform.detect, devices):
        without, with_it = (replace(where, packages=packages) for packages in
                            (where.packages - {name}, where.packages | {name}))  # fmt: skip
        kernels |= {e.name for e in registry.entries() if where.vendor in e.platforms
                    and e.kernel.is_supported(with_it) and not e.kernel.is_supported(without)}  # fmt: skip
    known = PACKAGES[name]
    return {"package": known.distribution, "installed": found.get(name), "adds": known.adds, "install": known.install,
            "kernels_here": sorted(kernels)}  # fmt: skip


def _plugin_failures() -> dict[str, str]:
    for _ in discovery.readers():  # imports each of them
        pass
    return {**registry.plugin_failures, **discovery.plugin_failures}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _guarded(base: dict[str, Any], probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return base | probe()
    except Exception as error:  # a broken driver must not prevent the report
        return base | {"error": f"{type(error).__name__}: {error}"}


def _device(device: str) -> dict[str, Any]:
    where = Platform.detect(device)
    facts: dict[str, Any] = {"platform": str(where), "bandwidth": read_bandwidth(device)}
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        facts |= {"name": torch.cuda.get_device_name(device), "memory": total, "free": free}
    elif device == "cpu":
        facts |= {"name": cpu_name(), "threads": torch.get_num_threads()} | _memory()
    return facts


def _memory() -> dict[str, int]:
    """Bytes of physical memory, and of the memory that is available."""
    pages = {name: os.sysconf(f"SC_{name}") for name in ("PHYS_PAGES", "AVPHYS_PAGES", "PAGE_SIZE")}
    free = pages["AVPHYS_PAGES"] * pages["PAGE_SIZE"]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    return {"memory": pages["PHYS_PAGES"] * pages["PAGE_SIZE"], "free": free}


def _kernels(device: str) -> list[dict[str, Any]]:
    where = Platform.detect(device)
    rows = []
    for entry in registry.entries():
        supported = verdict_of(entry.kernel.is_supported, where) if where.vendor in entry.platforms else None
        row: dict[str, Any] = {"kernel": entry.name, "device": device, "ran": False, "ok": False, "scheme": None}
        if supported is None:
            continue
        if not supported:
            rows.append(row | {"detail": supported.reason})
            continue
        rows.append(_guarded(row, functools.partial(_test_kernel, entry.kernel, device)))
    return rows


def _test_kernel(kernel: type[Kernel], device: str) -> dict[str, Any]:
    """Compare a 64×256 GEMM at M=5, in the first scheme that the kernel supports, with float64."""
    small = [spec for spec in (*default_specs(), _MXFP6) if (spec.n, spec.k) == (64, 256)]
    makers: list[tuple[str, Callable[[], QuantizedWeight]]] = [
        *((scheme, functools.partial(quantize, torch.randn(64, 256), scheme)) for scheme in TESTED_SCHEMES),
        *((scheme_text(spec), functools.partial(random_weight, spec)) for spec in small),
    ]
    for scheme, make in makers:
        weight = make()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            spec: LinearSpec = weight.spec.replace(act_dtype=dtype)
            if dtype not in kernel.act_dtypes or not verdict_of(kernel.can_implement, spec):
                continue
            layer = QuantLinear(weight, act_dtype=dtype, device=device, kernel=kernel.__name__)
            x = torch.randn(5, 256).to(dtype)
            with torch.inference_mode():
                found = compare(layer(x.to(device)).cpu(), x, weight.with_act_dtype(dtype))
            return {"ran": True, "ok": found.ok, "scheme": scheme, "error": found.error, "allowed": found.allowed,
                    "detail": "ok" if found.ok else str(found)}  # fmt: skip
    return {"detail": "supports none of the schemes tried"}
