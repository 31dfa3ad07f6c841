"""The native core's portable level on an ARM CPU: cross-compiled by zig (requirements-dev.txt), run by qemu where that is
installed (Debian's qemu-user). Its results must be this machine's, bit for bit.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
zig = pytest.importorskip("ziglang", reason="pip install ziglang builds for other machines")


def build(program, *compiler):
    """The portable level and native_portable.cpp as one program."""
    variants = [p for p in (ROOT / "csrc" / "variants").glob("*.cpp") if not p.stem.startswith("gemm_") or p.stem == "gemm_pack"]
    command = [
        *compiler, "-std=c++20", "-O1", "-ffp-contract=off",
        "-DBITLINE_ISA=portable", "-DBITLINE_ISA_portable=1", f"-I{ROOT / 'csrc'}", "-o", program,
        ROOT / "tests" / "native_portable.cpp", *sorted((ROOT / "csrc").glob("*.cpp")), *sorted(variants), "-ldl", "-lpthread",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_arm_cpu_computes_the_same(tmp_path):
    arm = build(tmp_path / "arm", sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-static")
    assert arm.read_bytes()[18:20] == (183).to_bytes(2, "little")  # EM_AARCH64
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("built; apt-get install qemu-user runs it")
    here = subprocess.run(
        [build(tmp_path / "here", os.environ.get("CXX", "c++"))], capture_output=True, text=True, check=True
    ).stdout
    there = subprocess.run([emulator, arm], capture_output=True, text=True, check=True).stdout
    assert here == there and len(here.splitlines()) > 100
