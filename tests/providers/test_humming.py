"""The humming adapters against its recorded signatures (fakes_humming.py), and against the real wheel's own checks."""

import fakes_humming
import pytest
import torch
from humming_specs import CASES, REFUSED, W4, W8A8
from test_cpu_providers import run

import bitline
from bitline import Platform
from bitline.errors import InputError
from bitline.kernels.providers import humming
from bitline.kernels.providers.humming import HummingInt8ScaledMMLinearKernel, HummingLinearKernel
from bitline.select import Policy
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import random_weight


@pytest.fixture(autouse=True)
def clear_caches():
    humming._layer_config.cache_clear()
    yield
    humming._layer_config.cache_clear()


@pytest.mark.parametrize(("kernel", "platform", "specs"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_computes_what_the_spec_says(kernel, platform, specs):
    with fakes_humming.humming():
        assert len(check_kernel(kernel, specs, platform).passed) == len(specs)


@pytest.mark.parametrize(("kernel", "spec", "part"), REFUSED)
def test_refusals_are_refusals_before_packing(kernel, spec, part):
    verdict = kernel.can_implement(spec)
    assert not verdict and part in f"{verdict.reason}; {verdict.fix}"


def test_platforms_and_choices():
    assert "pip install humming-kernels" in HummingLinearKernel.is_supported(Platform.parse("cuda:sm90")).fix
    assert "sm89" in humming.HummingFP8ScaledMMLinearKernel.is_supported(Platform.parse("cuda:sm80,humming")).reason
    for spec, platform, best in (
        (W4, "cuda:sm90,humming", "GluonHopperLinearKernel"),  # measured: 3.8 and 8.6 us at 4096x4096
        (W4.replace(weight=bitline.types.uint3b4), "cuda:sm90,humming", "TritonW4A16LinearKernel"),  # humming is nondeterministic
        (W4.replace(act=W8A8.act), "cuda:sm90,humming", "GluonHopperW4A8LinearKernel"),  # 6.0 us there; humming 13.0
        (W4.replace(act=W8A8.act), "cuda:sm89,humming", "HummingInt8ScaledMMLinearKernel"),
        (W4, "rocm:gfx942,humming", "TritonW4A16LinearKernel"),
    ):
        spec = spec.replace(n=4096, k=4096)
        assert bitline.choose(spec, platform, Policy()).best.name == best
    refused = {c.name: c.verdict for c in bitline.choose(W4, "cuda:sm90,humming", Policy(deterministic=True)).candidates}
    assert "not deterministic" in refused["HummingLinearKernel"].reason


def test_nan_codes_are_an_error():
    weight = random_weight(W4.replace(weight=bitline.types.float8_e4m3fn), 1)
    weight.codes[3, 5] = 0x7F
    with fakes_humming.humming(), pytest.raises(InputError, match="codes of NaN"):
        HummingLinearKernel.pack(weight)


def test_each_layer_has_its_own_locks():
    """Calls on two streams must not share them."""
    with fakes_humming.humming():
        packed = HummingInt8ScaledMMLinearKernel.pack(random_weight(W8A8, 1))
    assert packed["locks"].shape == (2048,) and packed["locks"].dtype == torch.int32


@pytest.mark.exhaustive
def test_the_wheel_has_tiles_for_every_accepted_layer():
    done = run("real_humming.py", "humming")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout
