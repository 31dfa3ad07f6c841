"""What a result was measured on: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from bitline.platform import Platform


def machine(device: str = "cpu") -> dict[str, Any]:
    versions = {}
    for name in ("torch", "triton", "transformers", "gguf", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "platform": str(Platform.detect(device)), "device": device,
        "name": torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_name(),
        "threads": torch.get_num_threads(), "python": platform.python_version(), "versions": versions, "commit": commit(),
    }  # fmt: skip


def commit() -> str:
    """The commit that was measured, with "+" where files differ from it."""
    root = Path(__file__).parents[1]
    git = lambda *words: subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip()
    head = git("rev-parse", "--short=12", "HEAD")
    return (head or "unknown") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
