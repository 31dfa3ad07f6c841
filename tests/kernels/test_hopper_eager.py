"""Eager calls of the Hopper kernels, with a launcher that records its arguments: the same launch as `launch.run` makes."""

import copy
import io

import pytest
import torch

from bitline import types
from bitline.kernels.hopper import launch, runtime
from bitline.kernels.hopper.eager import EagerLinear
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

SPEC = LinearSpec(200, 512, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)


@pytest.fixture
def launches(device, monkeypatch):
    """(spec, bias, x) to the arguments of the eager launch and of the plan's for the same x, and the layer's EagerLinear."""
    empty = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    monkeypatch.setattr(runtime, "fast_empty", lambda: empty)
    monkeypatch.setattr(launch, "num_sms", lambda index: 132)

    def both(spec, bias, x):
        packed = list(GluonHopperLinearKernel.pack(random_weight(spec, 1)).values())
        eager, plan = EagerLinear(packed, bias, spec), launch.plan_of(spec, x.numel() // spec.k, bias is not None, -1)
        assert eager(x) is None  # not compiled yet
        plan(x.view(-1, spec.k), packed, bias)
        assert eager(x) is None  # nor recorded; it is now
        y = eager(x)
        if y is None:
            return None, None, eager
        found = device.calls[-1]
        result = plan(x.view(-1, spec.k), packed, bias)
        assert y.shape == (*x.shape[:-1], spec.n) and y.dtype == x.dtype and y.is_contiguous()
        want = device.calls[-1]
        swap = {y.data_ptr(): result.data_ptr()}
        new = lambda a: (*a[:1], swap.get(a[1], a[1]), *a[2:]) if isinstance(a, tuple) and a[:1] == ("map",) else swap.get(a, a)
        return tuple(map(new, found)), want, eager

    return both


@pytest.mark.parametrize("shape", [(1, 512), (3, 4, 512), (512,), (17, 512), (2, 20, 512), (1, 70, 512), (300, 512)], ids=str)
@pytest.mark.parametrize("kind", ["symmetric", "zero, bias"])
def test_the_same_launch(launches, shape, kind):
    spec = SPEC if kind == "symmetric" else SPEC.replace(weight=types.uint4, zero="int", bias=True)
    found, want, _ = launches(spec, torch.ones(200).bfloat16() if spec.bias else None, torch.ones(shape).bfloat16())
    assert found is not None and found == want


def test_split_k_passes_its_workspace(launches):
    spec = SPEC.replace(n=1024, k=4096)
    assert launch.plan_of(spec, 24, False, -1).config.split_k > 1
    found, want, _ = launches(spec, None, torch.ones(24, 4096).bfloat16())
    assert found == want and all(found[11:14])  # y, partials and flags


@pytest.mark.parametrize("spec", [SPEC.replace(k=520, act_order=True), SPEC.replace(k=129, block=(1, 129))], ids=["order", "odd"])
def test_layers_that_take_more_than_one_launch(launches, spec):
    found, _, eager = launches(spec, None, torch.ones(4, spec.k).bfloat16())
    assert found is None and list(eager.launches.values()) == [None]


def test_a_padded_output(launches):
    found, _, eager = launches(SPEC.replace(n=67), None, torch.ones(40, 512).bfloat16())
    assert found is None and list(eager.launches.values()) == [None]


def test_inputs_that_are_not_taken(launches):
    x = torch.ones(4, 512).bfloat16()
    _, _, eager = launches(SPEC, None, x)
    storage = torch.ones(4 * 512 + 1).bfloat16()
    for other in (x.half(), torch.ones(512, 4).bfloat16().t(), storage[1:].view(4, 512), torch.ones(4, 256).bfloat16(),
                  torch.ones(0, 512).bfloat16(), torch.tensor(1.0).bfloat16()):  # fmt: skip
        for _ in range(2):
            assert eager(other) is None
    assert eager(x) is not None


def test_a_weight_whose_storage_moved_ends_the_entries_use(launches):
    x = torch.ones(4, 512).bfloat16()
    _, _, eager = launches(SPEC, None, x)
    weight = eager.layer[0][0]
    weight.data = weight.data.clone()
    assert eager(x) is None


def test_a_copy_has_its_own_tensors(launches, device):
    x = torch.ones(4, 512).bfloat16()
    _, _, eager = launches(SPEC, None, x)
    buffer = io.BytesIO()
    torch.save(eager, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(eager), torch.load(buffer, weights_only=False)):
        assert not other.launches and other.layer[0][0].data_ptr() != eager.layer[0][0].data_ptr()
        other(x)  # records
        assert other(x) is not None
        addresses = {t.data_ptr() for t in other.layer[0][:2]}
        assert addresses <= set(device.calls[-1]) and not {t.data_ptr() for t in eager.layer[0][:2]} & set(device.calls[-1])


def test_entries_are_bounded(launches):
    _, _, eager = launches(SPEC, None, torch.ones(1, 512).bfloat16())
    for m in range(1, 17):
        for n in range(1, 40):
            x = torch.ones(*(1,) * n, m, 512).bfloat16()
            eager(x)
    assert 0 < len(eager.launches) <= 256
