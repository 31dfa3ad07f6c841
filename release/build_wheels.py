"""Builds what a release uploads: the sdist and, from it, a wheel with the native core for each machine. `make wheels` runs it.

    python release/build_wheels.py OUT [--work FOLDER] [--machine x86_64 …]

The environment needs scikit-build-core, cmake, ninja, ziglang and auditwheel (requirements.txt, requirements-dev.txt). zig has
the headers and the symbols of each glibc, so no container and no other compiler takes part.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import check_wheel
from scikit_build_core import build as backend
from zig_compiler import write_compiler

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"  # of RHEL 8, Debian 10 and Ubuntu 18.10; torch's own wheels need it too
MACHINES = ("x86_64", "aarch64")
# The core uses no C++ runtime: -nostdlib++ links none, so an object that needs one fails to link. -s: no symbols of debuggers.
FLAGS = ("-g0", "-s", "-nostdlib++", "-Wl,-z,defs")


def main() -> None:
    """Build what the command line asks for, and check every wheel."""
    parser = argparse.ArgumentParser(description="Build the sdist and the wheels.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels", help="compilers and zig's cache")
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES)
    options = parser.parse_args()
    out, work = options.out.resolve(), options.work.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time())
    sdist = build_sdist(out)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB", flush=True)
    for machine in options.machine:
        print(f"the wheel for {machine}: zig compiles the native core, which takes minutes", flush=True)
        wheel = build_wheel(sdist, machine, out, work)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {check_wheel.check(wheel)}", flush=True)


def commit_time() -> str:
    """Seconds since 1970 of the commit, for the files' times in the archives; in a source tree without git, of the changelog."""
    done = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture_output=True, text=True)
    return done.stdout.strip() or str(int((ROOT / "CHANGELOG.md").stat().st_mtime))


def build_sdist(out: Path) -> Path:
    """A source distribution of this tree."""
    os.chdir(ROOT)  # where a build backend is called
    return out / backend.build_sdist(str(out))


def build_wheel(sdist: Path, machine: str, out: Path, work: Path) -> Path:
    """A manylinux wheel from the sdist. Without a native core it fails: BITLINE_REQUIRE_NATIVE, in pyproject.toml."""
    compiler = write_compiler(work / f"{machine}-c++", f"{machine}-linux-gnu.{GLIBC}", *FLAGS)
    folder = work / machine
    shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "wheel.tags": f"py3-none-manylinux_{GLIBC.replace('.', '_')}_{machine}",
        "build-dir": str(work / f"{machine}-build"),
        "install.strip": "false",  # this machine's strip does not know the other's files
        "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
        "cmake.define.CMAKE_SYSTEM_PROCESSOR": machine,
        "cmake.define.CMAKE_CXX_COMPILER": str(compiler),
    }
    variables = {
        "BITLINE_REQUIRE_NATIVE": "1", "ZIG_GLOBAL_CACHE_DIR": str(work / "zig"), "ZIG_LOCAL_CACHE_DIR": str(work / "zig"),
    }  # fmt: skip
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index", "--no-deps",
               "--no-build-isolation", "--no-cache-dir", "--wheel-dir", folder, sdist]  # fmt: skip
    command += [part for name, value in settings.items() for part in ("--config-settings", f"{name}={value}")]
    subprocess.run(command, check=True, env=os.environ | variables)
    (wheel,) = folder.glob("*.whl")
    return wheel.replace(out / wheel.name)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError:
        sys.exit("no wheel was built: the output above says why")
