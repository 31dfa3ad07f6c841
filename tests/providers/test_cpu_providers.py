"""Adapters of packages that run on this machine's CPU, each in a process with the package on its path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitline import Platform
from bitline.kernels.providers.zentorch import ZentorchInt8ScaledMMLinearKernel, ZentorchWNA16LinearKernel

FOLDER = Path(__file__).parents[2] / ".venv" / "providers"


def run(script, package, **env):
    if not (FOLDER / package).is_dir():
        pytest.skip(f"{package} is not in .venv/providers; `make test` puts it there")
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = Path(__file__).with_name(script) if script.endswith(".py") else script
    command = [sys.executable, script] if isinstance(script, Path) else [sys.executable, "-c", script]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True)


def test_zentorch():
    if not torch.__version__.startswith("2.13."):
        pytest.skip("zentorch 2.13.0.1 is for torch 2.13")
    if not {"zen", "avx512"} <= Platform.detect("cpu").features:
        pytest.skip("zentorch needs an AMD Zen CPU with AVX-512")
    done = run("real_zentorch.py", "zentorch")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize("kernel", [ZentorchWNA16LinearKernel, ZentorchInt8ScaledMMLinearKernel])
def test_zentorch_is_refused_without_avx512(kernel):
    """zentorch 2.13 executes AVX-512 instructions whatever the CPU has; Zen 3 and older have none."""
    assert kernel.is_supported(Platform.parse("cpu:avx512,zen,zentorch"))
    for platform, part in (
        ("cpu:avx2,zen,zentorch", "AVX-512"),
        ("cpu:avx512,zentorch", "AMD Zen"),
        ("cpu:avx512,zen", "install"),
    ):
        refused = kernel.is_supported(Platform.parse(platform))
        assert not refused and part in refused.reason and refused.fix


def test_ark():
    done = run("real_ark.py", "auto_round_kernel")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


def test_zentorch_with_its_weight_cache_on_is_refused():
    code = "import zentorch; from bitline.kernels.providers import zentorch as z; z._ops()"
    done = run(code, "zentorch", ZENDNNL_CACHE_OFF="0")
    assert done.returncode == 1 and "keeps weights by address" in done.stderr
