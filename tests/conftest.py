"""Fixtures of more than one test file, one thread for each of xdist's workers, and no GPU but for the tests of GPUs."""

import os
from pathlib import Path

# Two workers with two OpenMP threads each on two cores wait for each other's threads at every torch call: ten times slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("BITLINE_NO_TUNED", "1")  # what was measured on this machine must not change the tests' choices

import pytest
import torch

from bitline import native

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the environment of tests/in_vllm has none
    pass
else:  # on a machine that is busy with something else, time says nothing about a test
    settings.register_profile("bitline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("bitline")


def pytest_configure(config):
    """Tests that say nothing of a device are of the CPU: they see no GPU, unless `tests/gpu` or `-m gpu` alone is asked for."""
    gpu_tests_alone = all("gpu" in Path(argument.partition("::")[0]).parts for argument in config.args)
    if not gpu_tests_alone and config.option.markexpr.strip() != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""


@pytest.fixture(params=native.isas() or native.LEVELS[:1])
def level(request):
    """The native core at every vector level that this machine has, one after the other."""
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)


@pytest.fixture
def one_thread_inference():
    """Inference mode, on one thread: a second one would wait for other tests' processes at each of thousands of calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)
