"""The humming kernels on a GPU, where humming is installed: the specs of tests/providers/humming_specs.py, and large layers."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from bitline import Platform
from bitline.testing import check
from bitline.testing.conformance import BATCH_SIZES, check_kernel
from bitline.testing.generators import inputs, random_weight

os.environ.setdefault("HUMMING_TEST_TUNING_SOURCE", "none")  # the configs that users get: under pytest humming takes others
sys.path.insert(0, str(Path(__file__).parents[1] / "providers"))
from humming_specs import CASES, W4, W8A8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="needs humming-kernels"),
]
LAYERS = [(kernel, spec) for kernel, _, specs in CASES for spec in specs]
LARGE = (1, 8, 16, 64, 256, 1000)


@pytest.fixture(autouse=True)
def configs_of_tested_m(request, monkeypatch):
    """humming compiles a layer's kernels for all ranges of M at once, some sixteen: here for the tested M alone."""
    module = importlib.import_module("humming.kernel.humming")
    tested = LARGE if request.function is test_large_layers else range(1, max(BATCH_SIZES) + 1)
    every = module.get_heuristics_config
    fits = lambda interval: any(interval[0] < m <= interval[1] for m in tested)
    monkeypatch.setattr(module, "get_heuristics_config", lambda *a, **k: list(filter(fits, every(*a, **k))))


def skip_unless_supported(kernel):
    if not kernel.is_supported(Platform.detect("cuda")):
        pytest.skip("not on this GPU")


@pytest.mark.parametrize(("kernel", "spec"), LAYERS, ids=lambda c: getattr(c, "__name__", None) or c.key)
def test_conformance(kernel, spec):
    skip_unless_supported(kernel)
    assert check_kernel(kernel, [spec], device="cuda").passed


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (10240, 2048), (2048, 14336)])
@pytest.mark.parametrize(("kernel", "spec"), [(CASES[0][0], W4), (CASES[1][0], W8A8), (CASES[2][0], CASES[2][2][0])])
def test_large_layers(kernel, spec, n, k):
    """Shapes with split-K at small M."""
    skip_unless_supported(kernel)
    spec = spec.replace(n=n, k=k, block=(1, k if spec.act else 128))
    weight = random_weight(spec, 1, "cuda")
    packed = list(kernel.pack(weight).values())
    for m in LARGE:
        x = inputs(m, spec, m, "cuda")
        check(kernel.apply(x, packed, None, spec), x, weight)
