"""`bitline doctor`: what this machine has, what is missing, and whether each kernel here gives the right answer."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform as host
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.markup import escape
from rich.text import Text

from bitline import __version__, checkpoint, env, native
from bitline.cli.main import out
from bitline.cli.render import size, table
from bitline.kernels import registry
from bitline.kernels.base import Kernel
from bitline.linear import QuantLinear
from bitline.platform import PACKAGES, Platform, installed_packages
from bitline.rounding import quantize
from bitline.testing.tolerance import compare
from bitline.types import LinearSpec

# Package -> what it would add and how to get it.
ENABLES = {
    "triton": ("portable GPU kernels for every vendor", "pip install triton (comes with a GPU build of torch)"),
    "zentorch": ("AMD Zen CPU kernels", "pip install zentorch"),
    "auto_round_kernel": ("AutoRound's CPU and XPU kernels", "pip install auto-round-lib"),
    "flashinfer": ("FP4 and FP8 kernels for NVIDIA Blackwell", "pip install flashinfer-python"),
    "deep_gemm": ("block FP8 for NVIDIA Hopper", "pip install git+https://github.com/deepseek-ai/DeepGEMM"),
    "mslk": ("FBGEMM's FP4 kernels for NVIDIA Blackwell", "pip install mslk-cuda"),
    "fbgemm_gpu": ("the same kernels under their former name", "pip install fbgemm-gpu-genai"),
    "aiter": ("AMD Instinct kernels", "pip install amd-aiter"),
    "humming": ("weight-only kernels for NVIDIA GPUs", "pip install humming-kernels"),
    "vllm_xpu_kernels": ("Intel GPU kernels", "pip install vllm-xpu-kernels"),
}
TRIED_SCHEMES = (
    "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4",
    "MXFP8A16", "MXFP8",
)  # fmt: skip


def doctor_report() -> dict[str, Any]:
    """Every figure of the command. Each probe is guarded: the report always prints."""
    found = installed_packages()
    devices = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        devices.append("xpu")
    return {
        "bitline": __version__, "python": sys.version.split()[0], "system": host.platform(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "safetensors", "gguf", "numpy")},
        "compiler": shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"),
        "native": _guarded({"available": False}, native.report) | {"compiler": _cxx()},
        "devices": [_guarded({"device": d}, functools.partial(_device, d)) for d in devices],
        "packages": [_package(name, found) for name in ENABLES],
        "plugin_failures": _plugin_failures(),
        "environment": [{"name": v.name, "effect": v.effect, "argument": v.argument} for v in env.VARIABLES],
        "kernels": [row for d in devices for row in _kernels(d)],
    }  # fmt: skip


def _cxx() -> str | None:
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def _package(name: str, found: dict[str, str]) -> dict[str, Any]:
    adds, how = ENABLES[name]
    return {"package": PACKAGES[name], "installed": found.get(name), "adds": adds, "install": how}


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
        facts |= {"name": host.processor() or host.machine(), "threads": torch.get_num_threads()}
    return facts


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
        supported = entry.kernel.is_supported(where) if where.vendor in entry.platforms else None
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
    for scheme in TRIED_SCHEMES:
        weight = quantize(torch.randn(64, 256), scheme)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            spec: LinearSpec = weight.spec.replace(act_dtype=dtype)
            if dtype not in kernel.act_dtypes or not kernel.can_implement(spec):
                continue
            layer = QuantLinear(weight, act_dtype=dtype, device=device, kernel=kernel.__name__)
            x = torch.randn(5, 256).to(dtype)
            with torch.inference_mode():
                found = compare(layer(x.to(device)).cpu(), x, weight.with_act_dtype(dtype))
            return {"ran": True, "ok": found.ok, "scheme": scheme, "error": found.error, "allowed": found.allowed,
                    "detail": "right" if found.ok else str(found)}  # fmt: skip
    return {"detail": "takes none of the schemes tried"}


def _native_line(core: dict[str, Any]) -> str:
    if core["available"]:
        return f"native core: {core['isa']} of {', '.join(core['isas'])}; {core['threads']} threads, {core['threads_from']}"
    compiler = core["compiler"] or "none found: install g++ or clang++"
    return f"native core: [yellow]no[/], {escape(str(core.get('reason') or core.get('error')))}. C++ compiler: {escape(compiler)}"


def _show_kernels(kernels: list[dict[str, Any]]) -> None:
    """Those that ran with the figures of a small product, then those that cannot run here by their reasons."""
    grid = table("kernel", "on", "tried", "error (allowed)", "")
    for k in (k for k in kernels if k["ran"]):
        mark = Text("ok", "green") if k["ok"] else Text("FAILED", "bold red")
        grid.add_row(k["kernel"], k["device"], k["scheme"], f"{k['error']:.1e} ({k['allowed']:.1e})", mark)
    out.print(grid)
    for k in (k for k in kernels if k["ran"] and not k["ok"]):
        out.print(f"[red]{k['kernel']}[/]: {escape(str(k.get('detail')))}", highlight=False)
    reasons: dict[str, list[str]] = {}
    for k in (k for k in kernels if not k["ran"]):
        reasons.setdefault(k.get("detail") or k.get("error", ""), []).append(f"{k['kernel']} ({k['device']})")
    if reasons:
        out.print("not here:", highlight=False)
    for reason, names in reasons.items():
        out.print(f"  {escape(reason)}: [dim]{', '.join(names)}[/]", highlight=False)


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    versions = ", ".join(f"{k} {v or 'not installed'}" for k, v in report["versions"].items())
    out.print(f"[bold]bitline {report['bitline']}[/], Python {report['python']}, {report['system']}", highlight=False)
    out.print(versions, highlight=False)
    out.print(f"C compiler: {report['compiler'] or 'none (Triton needs one on a GPU)'}", highlight=False)
    out.print(_native_line(report["native"]), highlight=False)
    for d in report["devices"]:
        if "error" in d:
            out.print(f"[red]{d['device']}[/]: {escape(d['error'])}", highlight=False)
        else:
            out.print(f"[bold]{d['device']}[/]: {d['platform']}; reads {size(d['bandwidth'])}/s", highlight=False)
    grid = table("package", "installed", "adds; how to get it")
    for p in report["packages"]:
        grid.add_row(p["package"], p["installed"] or "-", p["adds"] if p["installed"] else f"{p['adds']}; {p['install']}")
    out.print(grid)
    _show_kernels(report["kernels"])
    grid = table("variable", "effect (the argument wins)")
    for v in report["environment"]:
        grid.add_row(v["name"], f"{v['effect']}; {v['argument']}")
    out.print(grid)
    for name, why in report["plugin_failures"].items():
        out.print(f"[red]plug-in {escape(name)} failed to load[/]: {escape(why)}", highlight=False)
