"""What the scripts *_targets.py report of the kernels that they compile, each run in a process and a cache of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run(script, folder, arguments):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, Path(__file__).with_name(script), *map(str, arguments)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def reports(script, folder, *arguments):
    """The lines of JSON that the script prints."""
    return [json.loads(line) for line in _run(script, folder, arguments).stdout.splitlines()]


def hopper_reports(script, folder, step):
    """`reports` of every step-th variant of Hopper kernels; ptxas may not serialize wgmma."""
    from bitline.kernels.hopper.linear import _triton_version

    if not _triton_version():
        pytest.skip(_triton_version().reason)
    done = _run(script, folder, [step])
    assert "serialized" not in done.stderr + done.stdout, "ptxas serializes wgmma"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(kernel["shared"] <= 227 * 1024 for kernel in found), found
    return found
