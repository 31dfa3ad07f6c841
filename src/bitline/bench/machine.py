"""What a result was measured on: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import platform as host
import subprocess
from pathlib import Path
from typing import Any

import torch

from bitline.platform import Platform, device_name
from bitline.version import __version__

_PACKAGES = ("torch", "triton", "transformers", "gguf", "numpy")


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The facts of this machine and of the software, JSON-compatible: platform, device, name, threads, python, versions, commit.

    `commit` is None where Bitline does not run from a clone of its repository.
    """
    versions: dict[str, str | None] = {"bitline": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "platform": str(Platform.detect(device)), "device": str(device), "name": device_name(str(device)),
        "threads": torch.get_num_threads(), "python": host.python_version(), "versions": versions, "commit": commit(),
    }  # fmt: skip


def commit() -> str | None:
    """The commit that runs, with "+" where files other than results differ from it; None outside of a clone."""
    root = Path(__file__).parents[3]
    if not (root / "csrc").is_dir() or not (root / "src" / "bitline").is_dir():  # an installed package
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    except OSError:  # no git
        return None
    return head + ("+" if changes else "") if head else None


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()
