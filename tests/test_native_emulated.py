"""The AVX-VNNI, AVX-512 and AMX levels on any CPU with AVX2: the native core built with csrc/emulation, its tests in processes of
their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitline import native

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(len(native.isas()) < 2, reason="needs a compiler and AVX2"),
    pytest.mark.xdist_group("emulated"),  # one process builds
]
AVX512 = "avx512 and (test_large_m or every_element or activation_quantization or every_level)"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulated")
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in (["cmake", "-G", "Ninja", "-S", ROOT / "csrc", "-B", folder, "-DBITLINE_EMULATE=ON"], ["ninja", "-C", folder]):
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "libbitline_native.so"


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("test_native_amx.py", ""),
        ("test_native_cpu.py", AVX512),
        ("test_native_slices.py", "avx_vnni or avx512 or amx"),
        ("test_native_experts.py", "avx_vnni or avx512 or amx or random_formats"),
    ],
)
def test_passes_emulated(library, file, tests):
    env = os.environ | {"BITLINE_NATIVE_LIBRARY": str(library)}
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", "-k", tests]
    done = subprocess.run([*command, ROOT / "tests" / "kernels" / file], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:] + done.stderr[-1000:]
