"""No out-of-bounds access and no undefined behaviour in the native core: `sanitized_calls.py` in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitline import native
from bitline.env import environment

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.why_not()}")
CALLS = Path(__file__).with_name("sanitized_calls.py")
SANITIZED = os.environ.get("BITLINE_SANITIZED")  # a core built with -DBITLINE_SANITIZE=ON, as `make sanitize` does


def run(*arguments, code=None, **variables):
    """Exit status (negative: a signal) and output of a process."""
    command = [sys.executable, *(("-c", code) if code else (str(CALLS),)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | {"BITLINE_NO_NATIVE": "0"} | variables)
    return done.returncode, done.stdout + done.stderr[-6000:]


@pytest.mark.parametrize("guard", ["after", "before"])
def test_tensors_against_inaccessible_pages(guard):
    status, output = run(guard)
    assert status == 0 and "calls:" in output, output


OUT_OF_BOUNDS = """
import sys
sys.path.insert(0, sys.argv[1])
import sanitized_calls, torch
from bitline import native
sanitized_calls.GUARD = sys.argv[2]
x = sanitized_calls.guarded(torch.zeros(100))
core = native.core()
print("in", core.all_finite(x.data_ptr(), 100, 4, 0x7F800000), flush=True)
print("out", core.all_finite(x.data_ptr() - 400 * (sys.argv[2] == "before"), 101, 4, 0x7F800000))
"""


@pytest.mark.parametrize("guard", ["after", "before"])
def test_inaccessible_pages_end_a_process(guard):
    status, output = run(str(CALLS.parent), guard, code=OUT_OF_BOUNDS)
    assert status < 0 and "in 1" in output and "out" not in output


def sanitizer_environment():
    """Environment of a process that loads the sanitizers' libraries before all others."""
    compiler = os.environ.get("CXX", "c++")
    library = lambda name: subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    # The core, which links no C++ library, frees an argument that torch made with operator new.
    return {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
        "UBSAN_OPTIONS": "print_stacktrace=1", "BITLINE_NATIVE_LIBRARY": SANITIZED or "",
    }  # fmt: skip


@pytest.mark.skipif(SANITIZED is None, reason="make sanitize builds a sanitized core and runs this")
def test_sanitizers_find_nothing():
    status, output = run("heap", **sanitizer_environment())
    assert status == 0 and "calls:" in output, output


@pytest.mark.skipif(SANITIZED is None, reason="make sanitize builds a sanitized core and runs this")
def test_sanitizers_are_active():
    status, output = run(str(CALLS.parent), "heap", code=OUT_OF_BOUNDS, **sanitizer_environment())
    assert status != 0 and "in 1" in output and "heap-buffer-overflow" in output
