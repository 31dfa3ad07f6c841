"""The native core touches nothing that is not its own, and its C++ has one meaning: `sanitized_calls.py` in processes apart."""

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
    """What a process ends with: its exit status (negative: a signal) and what it printed."""
    command = [sys.executable, *(("-c", code) if code else (str(CALLS),)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | {"BITLINE_NO_NATIVE": "0"} | variables)
    return done.returncode, done.stdout + done.stderr[-6000:]


@pytest.mark.parametrize("place", ["after", "before"])
def test_pages_that_cannot_be_touched(place):
    status, said = run(place)
    assert status == 0 and "calls:" in said, said


ONE_MORE = """
import sys
sys.path.insert(0, sys.argv[1])
import sanitized_calls, torch
from bitline import native
sanitized_calls.PLACE = sys.argv[2]
x = sanitized_calls.placed(torch.zeros(100))
core = native.core()
print("in", core.all_finite(x.data_ptr(), 100, 4, 0x7F800000), flush=True)
print("out", core.all_finite(x.data_ptr() - 400 * (sys.argv[2] == "before"), 101, 4, 0x7F800000))
"""


@pytest.mark.parametrize("place", ["after", "before"])
def test_such_pages_end_a_process(place):
    status, said = run(str(CALLS.parent), place, code=ONE_MORE)
    assert status < 0 and "in 1" in said and "out" not in said


def watched():
    """Variables of a process whose allocator is watched too: the sanitizers' libraries come before all others."""
    compiler = os.environ.get("CXX", "c++")
    ask = lambda name: subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return {
        "LD_PRELOAD": f"{ask('libasan.so')} {ask('libubsan.so')}", "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1", "BITLINE_NATIVE_LIBRARY": SANITIZED or "",
    }  # fmt: skip


@pytest.mark.skipif(SANITIZED is None, reason="make sanitize builds a sanitized core and runs this")
def test_sanitizers_find_nothing():
    status, said = run("heap", **watched())
    assert status == 0 and "calls:" in said, said


@pytest.mark.skipif(SANITIZED is None, reason="make sanitize builds a sanitized core and runs this")
def test_sanitizers_are_there():
    status, said = run(str(CALLS.parent), "heap", code=ONE_MORE, **watched())
    assert status != 0 and "in 1" in said and "heap-buffer-overflow" in said
