"""Host side of the Hopper kernels, with a launcher that notes its arguments: what is remembered between calls, what is not."""

import pytest
import torch

from bitline import InputError, types
from bitline.kernels.hopper import heuristics, launch, linear
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.hopper.scheme import scheme_of
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

SPEC = LinearSpec(200, 520, types.uint4, (1, 64), scale_dtype=torch.bfloat16, zero="int")
SHAPES = list(heuristics._COSTS)


def packed(seed):
    return list(GluonHopperLinearKernel.pack(random_weight(SPEC, seed)).values())


def wide(m, shape, programs):
    return launch._WidePlan(SPEC, scheme_of(SPEC), m, False, 132, shape._replace(p=programs))


@pytest.mark.parametrize("shape", [SHAPES[0], next(s for s in SHAPES if s.bm2)], ids=["one product", "two"])
def test_maps_follow_the_tensors(device, shape):
    plan, x, first, other = wide(40, shape, 4), torch.ones(40, 520).bfloat16(), packed(1), packed(2)
    plan(x, first, None)  # compiles, and launches by Triton's own path
    assert not device.calls and not device.maps
    kept = [plan(x, first, None)]
    count = len(device.maps)
    assert count == (7 if shape.bm2 else 5)
    assert {m[0] for m in device.maps} == {t.data_ptr() for t in (x, *first[:3], kept[0])}
    addresses = {a[1] for a in device.calls[-1] if isinstance(a, tuple) and a[0] == "map"}
    assert addresses == {m[0] for m in device.maps}
    kept.append(plan(x, first, None))  # the first result is alive, so that this one lies elsewhere
    assert {m[0] for m in device.maps[count:]} == {kept[1].data_ptr()}
    count = len(device.maps)
    del kept[1]
    kept.append(plan(x, first, None))
    if kept[1].data_ptr() in {m[0] for m in device.maps[:count]}:
        assert len(device.maps) == count
    kept.append(plan(x, other, None))
    assert {t.data_ptr() for t in other[:3]} <= {m[0] for m in device.maps[count:]}
    second = wide(41, shape, 4)  # another number of rows knows the weights, by the binary that both use
    count = len(device.maps)
    y = second(torch.ones(41, 520).bfloat16(), first, None)
    assert not {m[0] for m in device.maps[count:]} & {t.data_ptr() for t in first[:3]} and y.shape == (41, 200)


def test_what_is_remembered_is_bounded(device):
    known = {}
    for i in range(10000):
        launch._remember(known, i, (i,))
    assert 9999 in known and len(known) <= 4096


def test_cut_tiles_have_a_workspace_for_each_stream_and_each_captured_launch(device):
    plan, x, weight = wide(40, SHAPES[0], 3), torch.ones(40, 520).bfloat16(), packed(1)
    assert plan.scratch

    def used():
        plan(x, weight, None)
        parts, flags = device.calls[-1][-len(plan.tail) - 4 : -len(plan.tail) - 2]
        return tuple(t if isinstance(t, int) else t.data_ptr() for t in (parts, flags))

    plan(x, weight, None)
    first = used()
    assert used() == first and all(first)
    device.stream = 8
    second = used()
    assert not set(second) & set(first)
    device.stream = 7
    assert used() == first
    larger = launch._workspace(x, plan.scratch * 100, 7)
    assert used() == larger != first  # one that is large enough for both
    device.capturing = True
    seen = [flags for _, flags in (used() for _ in range(5))]
    assert len(set(seen)) == 5 and not set(seen) & {first[1], second[1], larger[1]}
    pool = launch._pools[-1][0]
    assert all(0 <= flags - pool.data_ptr() < pool.nbytes for flags in seen)


def test_captured_launches_without_a_pool_clear_their_own(device):
    device.capturing = True
    plan, x, weight = wide(40, SHAPES[0], 3), torch.ones(40, 520).bfloat16(), packed(1)
    plan(x, weight, None)
    plan(x, weight, None)
    flags = device.calls[-1][-len(plan.tail) - 3]
    assert isinstance(flags, torch.Tensor) and not flags.any() and not launch._pools and not launch._spaces


def test_uncut_tiles_need_no_workspace(device):
    plan = wide(40, SHAPES[0], 1)
    plan(torch.ones(40, 520).bfloat16(), packed(1), None)
    assert not plan.scratch and not launch._spaces


def test_decode_passes_addresses(device):
    plan, x, weight = launch._DecodePlan(SPEC, scheme_of(SPEC), 4, False), torch.ones(4, 576).bfloat16(), packed(1)
    plan(x, weight, None)
    y = plan(x, weight, None)
    assert device.calls[-1][5:15] == (
        x.data_ptr(), *(t.data_ptr() for t in weight[:3]), 0, weight[3].data_ptr(), y.data_ptr(), 4, 200, 576
    )  # fmt: skip


def test_the_ring_passes_no_workspace_where_programs_share_nothing(device):
    plan = launch._DecodePlan(SPEC, scheme_of(SPEC), 12, False, heuristics.Decode(3, 1, 8, 0, 2, 1, True))
    x, weight = torch.ones(12, 520).bfloat16(), packed(1)
    plan(x, weight, None)
    y = plan(x, weight, None)
    assert device.calls[-1][5:17] == (
        x.data_ptr(), *(t.data_ptr() for t in weight[:3]), 0, weight[3].data_ptr(), y.data_ptr(), 0, 0, 12, 200, 520
    )  # fmt: skip


def test_tensors_elsewhere_are_refused():
    with pytest.raises(InputError, match="another device"):
        launch.run(torch.ones(1, 520).bfloat16(), packed(1), None, SPEC)


def test_a_launcher_that_serves_all_kernels_gets_one_tuple():
    calls = []
    for grouped in (False, True):
        launch._Binary(lambda *a: calls.append(a), ("function",), grouped, (), {})(3, 7, (1, 2))
    assert calls == [(3, 1, 1, 7, "function", 1, 2), (3, 1, 1, 7, "function", (1, 2))]


def test_a_triton_that_it_has_not_run_with_is_refused(monkeypatch):
    for version, taken in (("3.6.0", True), ("3.7.1", True), ("3.10.0", False), ("4.6.0", False), ("3.60", False)):
        monkeypatch.setattr(linear.importlib.metadata, "version", lambda name, v=version: v)
        verdict = linear._version.__wrapped__()
        assert bool(verdict) == taken and (taken or version in verdict.reason)
