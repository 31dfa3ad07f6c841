"""Checks a wheel before it is uploaded: its tag, what it contains, and the machine and glibc that its native core needs.

python release/check_wheel.py dist/*.whl
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

LIBRARY = "bitline/_native/libbitline_native.so"
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
NEEDED = ("bitline/__init__.py", "bitline/py.typed", LIBRARY)
TAG = re.compile(r"bitline-[\w.]+-py3-none-manylinux_(\d+)_(\d+)_(x86_64|aarch64)\.whl")


class WheelError(ValueError):
    """A wheel that must not be uploaded, and why."""


def check(wheel: Path) -> str:
    """Check a wheel. Returns the machine and the newest glibc symbol version of its native core. WheelError: what is wrong."""
    named = TAG.fullmatch(wheel.name)
    if named is None:
        raise WheelError(f"{wheel.name}: found another name, expected py3-none-manylinux_2_28 for x86_64 or aarch64")
    allowed, machine = (int(named[1]), int(named[2])), named[3]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        check_contents(wheel, names)
        library = ELFFile(io.BytesIO(archive.read(LIBRARY)))
    if library["e_machine"] != MACHINES[machine]:
        raise WheelError(f"{wheel.name}: found a native core for {library['e_machine']}, expected {MACHINES[machine]}")
    libraries, versions = needs(library)
    if libraries - LIBRARIES:
        raise WheelError(f"{wheel.name}: the native core needs {sorted(libraries - LIBRARIES)}, expected libc's libraries alone")
    newest = max(version for name, version in versions if name == "GLIBC")
    if newest > allowed or any(name != "GLIBC" for name, _ in versions):
        raise WheelError(f"{wheel.name}: the native core needs {sorted(versions)}, expected GLIBC {allowed} at most")
    check_policy(wheel, allowed)
    return f"native core for {machine}, glibc {newest[0]}.{newest[1]} or newer"


def check_contents(wheel: Path, names: list[str]) -> None:
    """WheelError: a file is missing, or one is there that does not belong into a wheel."""
    missing = [name for name in NEEDED if name not in names]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        missing.append("LICENSE")
    odd = [name for name in names if not re.match(r"bitline/|bitline-[\w.]+\.dist-info/", name)]
    odd += [name for name in names if re.search(r"(^|/)(tests?|__pycache__)/|\.(pyc|o|a|cpp|h)$", name)]
    if missing or odd:
        raise WheelError(f"{wheel.name}: missing {missing}, unexpected {odd}")


def needs(library: ELFFile) -> tuple[set[str], set[tuple[str, tuple[int, ...]]]]:
    """The libraries that an ELF file needs, and the symbol versions: ("GLIBC", (2, 17))."""
    dynamic = library.get_section_by_name(".dynamic")
    libraries = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    versions = set()
    for section in library.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, symbols in section.iter_versions():
                for symbol in symbols:
                    name, _, number = symbol.name.partition("_")
                    versions.add((name, tuple(int(part) for part in re.findall(r"\d+", number))))
    return libraries, versions


def check_policy(wheel: Path, allowed: tuple[int, int]) -> None:
    """WheelError: auditwheel knows no manylinux policy up to the tag's that the wheel meets."""
    done = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True)
    found = re.search(r'platform tag:\s*"manylinux_(\d+)_(\d+)_', done.stdout)
    if found is None or (int(found[1]), int(found[2])) > allowed:
        raise WheelError(f"{wheel.name}: auditwheel show says: {(done.stdout + done.stderr).strip()}")


if __name__ == "__main__":
    try:
        for path in map(Path, sys.argv[1:]):
            print(f"{path.name}: {check(path)}")
    except WheelError as error:
        sys.exit(str(error))
