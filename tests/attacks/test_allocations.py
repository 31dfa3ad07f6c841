"""Reading a layer allocates no tensor larger than the file and the weight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bases_gguf
import bases_more  # noqa: F401  (its families are among the bases once it is imported)
import corpus_float  # noqa: F401
from bases import FAMILIES

MARGIN = 80 << 10  # bytes: chunks of 4 KB and their intermediates, and headers


def test_no_allocation_is_larger_than_the_file_and_the_weight():
    """On layers of [512, 1024], read in chunks of 4 KB, so that one extra copy of all codes or all scales would show."""
    script = Path(__file__).with_name("allocations.py")
    path = os.pathsep.join(p for p in sys.path if p)
    env = os.environ | {"PYTHONPATH": path, "BITLINE_TEST_SHAPE": "512,1024,32", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(name for name, *_ in lines) == sorted([*FAMILIES, *(f"gguf-{kind}" for kind in bases_gguf.TYPES)])
    assert not [line for line in lines if line[3] > max(line[1], line[2]) + MARGIN], "tensors"
    assert not [line for line in lines if line[4] > line[1] + MARGIN], "Python"
