"""Virtual environments with a wheel of Bitline, the packages that it requires and nothing else, neither pip nor a compiler."""

from __future__ import annotations

import email
import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement


def required(wheel: Path, extra: str = "") -> set[str]:
    """The installed packages that a wheel of Bitline requires, and those that they require in turn; with an extra's."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    found, todo = set(), [(email.message_from_bytes(metadata).get_all("Requires-Dist"), extra)]
    while todo:
        lines, extra = todo.pop()
        for requirement in map(Requirement, lines):
            wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {"", extra})
            if wanted and requirement.name not in found:
                found.add(requirement.name)
                todo += [(importlib.metadata.requires(requirement.name) or (), e) for e in requirement.extras or ("",)]
    return found


def top_level(package: str) -> set[Path]:
    """The files and folders of an installed package in site-packages."""
    files = [f for f in importlib.metadata.files(package) or () if f.parts[0] not in ("..", "__pycache__")]
    return {Path(f.locate()).parents[len(f.parts) - 2] if len(f.parts) > 1 else Path(f.locate()) for f in files}


class WheelEnvironment:
    """A virtual environment in a new folder. Packages are links to this environment's; the wheel is installed by pip."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "") -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        for path in set().union(*map(top_level, required(wheel, extra))):
            (packages / path.name).symlink_to(path)
        install = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--no-index", "--no-deps", "--quiet"]
        subprocess.run([*install, "--disable-pip-version-check", wheel], check=True)

    def run(self, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, with no other folder on PATH."""
        program, *arguments = map(str, command)
        kept = {k: v for k, v in os.environ.items() if k in ("HOME", "BITLINE_CACHE", "XDG_CACHE_HOME", "OMP_NUM_THREADS")}
        settings = kept | {"PATH": str(self.bin), "COLUMNS": "200", "BITLINE_NO_TUNED": "1"} | variables
        return subprocess.run([self.bin / program, *arguments], capture_output=True, text=True, env=settings, timeout=600)
