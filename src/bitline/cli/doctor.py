"""`bitline doctor`: what this machine has, what is missing, and whether each kernel here gives the right answer."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform as host
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from bitline import checkpoint, env, native
from bitline.cli.console import out
from bitline.cli.render import at_commas, facts, hanging, put, rate, size, table
from bitline.cli.scheme import scheme_text
from bitline.kernels import registry
from bitline.kernels.base import Kernel
from bitline.linear import QuantLinear
from bitline.platform import PACKAGES, Platform, cpu_name, installed_packages
from bitline.rtn import quantize
from bitline.select import short_name, verdict_of
from bitline.testing.conformance import default_specs
from bitline.testing.generators import random_weight
from bitline.testing.tolerance import compare
from bitline.types import LinearSpec, float6_e2m3
from bitline.version import __version__
from bitline.weight import QuantizedWeight

_MXFP6 = LinearSpec(64, 256, float6_e2m3, (1, 32), scale_dtype=torch.float8_e8m0fnu)
_COMPILERS = {"C": ("cc", "gcc", "clang"), "C++": ("c++", "g++", "clang++"), "CUDA": ("nvcc",), "HIP": ("hipcc",)}
TRIED_SCHEMES = (
    "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4",
    "MXFP8A16", "MXFP8",
)  # fmt: skip


def doctor_report() -> dict[str, Any]:
    """Every figure of the command. Each probe is guarded: the report always prints. docs/command-line.md describes the keys."""
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
    """The first of these that is there, and the first line of what it says of itself."""
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout.split("\n")
    except (OSError, subprocess.SubprocessError) as error:
        said = [str(error)]
    line = next((x for x in said if "release" in x), said[0]) if "nvcc" in path else said[0]  # nvcc begins with its name
    return {"path": path, "version": line.strip()}


def _package(name: str, found: dict[str, str], devices: list[str]) -> dict[str, Any]:
    """What a package would add, and which kernels of this machine's devices need it."""
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
    for _ in checkpoint._readers():  # each is imported when it is asked for
        pass
    return {**registry.plugin_failures, **checkpoint.plugin_failures}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _guarded(base: dict[str, Any], probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return base | probe()
    except Exception as error:  # a broken driver must not take the report down
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
    """Bytes of memory and of what a program could still get."""
    pages = {name: os.sysconf(f"SC_{name}") for name in ("PHYS_PAGES", "AVPHYS_PAGES", "PAGE_SIZE")}
    free = pages["AVPHYS_PAGES"] * pages["PAGE_SIZE"]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    return {"memory": pages["PHYS_PAGES"] * pages["PAGE_SIZE"], "free": free}


def read_bandwidth(device: str, nbytes: int = 1 << 27) -> float:
    """Bytes per second of summing a buffer of float32 that does not fit the cache: the best of a few passes."""
    data = torch.ones(nbytes // 4, device=device)
    best = float("inf")
    for _ in range(4):
        if data.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        float(data.sum())
        best = min(best, time.perf_counter() - started)
    return nbytes / best


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
        rows.append(_guarded(row, functools.partial(_try, entry.kernel, device)))
    return rows


def _try(kernel: type[Kernel], device: str) -> dict[str, Any]:
    """A 64×256 product in the first scheme that the kernel takes, against float64."""
    small = [spec for spec in (*default_specs(), _MXFP6) if (spec.n, spec.k) == (64, 256)]
    makers: list[tuple[str, Callable[[], QuantizedWeight]]] = [
        *((scheme, functools.partial(quantize, torch.randn(64, 256), scheme)) for scheme in TRIED_SCHEMES),
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
                    "detail": "right" if found.ok else str(found)}  # fmt: skip
    return {"detail": "takes none of the schemes tried"}


def _native_line(report: dict[str, Any]) -> str:
    core = report["native"]
    if core["available"]:
        return f"{core['isa']} of {', '.join(core['isas'])}; {_count(core['threads'], 'thread')}, {core['threads_from']}"
    compiler = "" if report["compilers"]["C++"] else ". There is no C++ compiler: install g++ or clang++, then Bitline again"
    return f"no: {core.get('reason') or core.get('error')}{compiler}"


def _head(report: dict[str, Any]) -> None:
    versions = ", ".join(f"{k} {v or 'not installed'}" for k, v in report["versions"].items())
    out.print(f"[bold]bitline {report['bitline']}[/], Python {report['python']}, {report['system']}", highlight=False)
    grid = facts()
    grid.add_row("libraries", versions)
    for kind, c in report["compilers"].items():
        if c or kind in ("C", "C++"):
            grid.add_row(f"{kind} compiler", f"{c['version']} ({c['path']})" if c else "none")
    grid.add_row("native core", Text(_native_line(report), "" if report["native"]["available"] else "yellow"))
    for d in report["devices"]:
        if "error" in d:
            grid.add_row(Text(d["device"], "red"), d["error"])
            continue
        said = [d.get("name") or d["device"], _count(d["threads"], "thread") if "threads" in d else ""]
        said += [f"{size(d['memory'])} of memory, {size(d['free'])} free" if "memory" in d else ""]
        said += [f"reads {rate(d['bandwidth'], 'B/s')}"]
        grid.add_row(Text(d["device"], "bold"), "; ".join(filter(None, said)))
        grid.add_row("", at_commas(d["platform"], out.width - 16))
    put(grid)


def _show_packages(report: dict[str, Any]) -> None:
    """Those that are there or could serve here with what they add, the others by name."""
    out.print("\n[bold]optional packages[/]", highlight=False)
    grid, elsewhere = facts(), []
    for p in report["packages"]:
        here = ", ".join(map(short_name, p.get("kernels_here", ())))
        if p.get("error"):
            grid.add_row(p["package"], Text(p["error"], "red"))
        elif p["installed"]:
            grid.add_row(p["package"], f"{p['installed']}: {p['adds']}; " + (f"here {here}" if here else "none for this machine"))
        elif here:
            said = Text("not installed", "yellow").append(f"; would add {here} here. {_first_upper(p['install'])}", "default")
            grid.add_row(p["package"], said)
        else:
            elsewhere.append(p)
    put(grid)
    if elsewhere:
        out.print("not installed, and for other machines", style="dim", highlight=False)
    grid = facts()
    for p in elsewhere:
        grid.add_row(Text(p["package"], "dim"), Text(f"{p['adds']}; {p['install']}", "dim"))
    put(grid)


def _first_upper(text: str) -> str:
    return text if text.startswith("pip ") else text[:1].upper() + text[1:]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _show_kernels(kernels: list[dict[str, Any]]) -> None:
    """Those that ran with the figures of a small product, then those that cannot run here by their reasons."""
    out.print("\n[bold]kernels[/], each on one small product", highlight=False)
    grid = table("", "kernel", "on", "tried", "error", "allowed")
    for k in (k for k in kernels if k["ran"]):
        mark = Text("ok", "green") if k["ok"] else Text("FAILED", "bold red")
        grid.add_row(mark, k["kernel"], k["device"], k["scheme"], f"{k['error']:.1e}", f"{k['allowed']:.1e}")
    put(grid)
    for k in (k for k in kernels if k["ran"] and not k["ok"]):
        put(hanging(k["kernel"], str(k.get("detail")), "red"))
    reasons: dict[str, list[str]] = {}
    for k in (k for k in kernels if not k["ran"]):
        where = f" ({k['device']})" if len({x["device"] for x in kernels}) > 1 else ""
        reasons.setdefault(k.get("detail") or k.get("error", ""), []).append(short_name(k["kernel"]) + where)
    for reason, names in reasons.items():
        put(hanging("not", f"{', '.join(names)}: {reason}", "dim"))


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    _head(report)
    _show_packages(report)
    _show_kernels(report["kernels"])
    out.print("\n[bold]environment[/] (the argument wins)", highlight=False)
    grid = facts()
    for v in report["environment"]:
        value = "" if v["value"] is None else f" = {v['value']}"
        grid.add_row(v["name"] + value, f"{v['effect']}; {v['argument']}")
    put(grid)
    for name, why in report["plugin_failures"].items():
        put(hanging("plug-in", f"{name} failed to load: {why}", "red"))
