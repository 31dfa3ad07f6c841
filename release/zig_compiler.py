"""zig (the package ziglang) as a C++ compiler for another machine, which CMake takes for Clang."""

from __future__ import annotations

import sys
from pathlib import Path

# zig names the features of ARM CPUs in its own way.
COMPILER = """#!{python}
import os, sys
arguments = [a.replace("-march=armv8.2-a+", "-mcpu=generic+v8_2a+") for a in sys.argv[1:]]
os.execv(sys.executable, [sys.executable, "-m", "ziglang", "c++", "-target", "{target}", *arguments, *{flags}])
"""


def write_compiler(path: Path, target: str, *flags: str) -> Path:
    """Write an executable file that compiles for a target, such as x86_64-linux-gnu.2.28, with these flags after all others."""
    path.write_text(COMPILER.format(python=sys.executable, target=target, flags=flags))
    path.chmod(0o755)
    return path
