"""Host side of the Hopper kernels, with a launcher that records its arguments: what is kept between calls, what is not."""

import pytest
import torch

from bitline import InputError, types
from bitline.kernels.hopper import launch, linear, runtime, workspace
from bitline.kernels.hopper.config import SmallMConfig, WgmmaConfig
from bitline.kernels.hopper.heuristics import WGMMA_COSTS
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.hopper.plans import SmallMPlan, WgmmaPlan
from bitline.kernels.hopper.scheme import dequant_scheme
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

SPEC = LinearSpec(200, 520, types.uint4, (1, 64), scale_dtype=torch.bfloat16, zero="int")
CONFIGS = list(WGMMA_COSTS)


def packed(seed):
    return list(GluonHopperLinearKernel.pack(random_weight(SPEC, seed)).values())


def wgmma_plan(m, config, num_ctas):
    return WgmmaPlan(SPEC, dequant_scheme(SPEC), m, False, 132, config._replace(num_ctas=num_ctas))


@pytest.mark.parametrize("config", [CONFIGS[0], next(c for c in CONFIGS if c.tile_m_extra)], ids=["one MMA", "extra rows"])
def test_tensor_maps_follow_the_tensors(device, config):
    plan, x, first, other = wgmma_plan(40, config, 4), torch.ones(40, 520).bfloat16(), packed(1), packed(2)
    plan(x, first, None)  # compiles, and launches by Triton's own path
    assert not device.calls and not device.maps
    kept = [plan(x, first, None)]
    count = len(device.maps)
    assert count == (7 if config.tile_m_extra else 5)
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
    second = wgmma_plan(41, config, 4)  # another M has the weight's maps, by the binary that both use
    count = len(device.maps)
    y = second(torch.ones(41, 520).bfloat16(), first, None)
    assert not {m[0] for m in device.maps[count:]} & {t.data_ptr() for t in first[:3]} and y.shape == (41, 200)


def test_map_caches_are_bounded(device):
    cache = {}
    for i in range(10000):
        runtime.remember(cache, i, (i,))
    assert 9999 in cache and len(cache) <= 4096


def test_stream_k_has_a_workspace_for_each_stream_and_each_captured_launch(device):
    plan, x, weight = wgmma_plan(40, CONFIGS[0], 3), torch.ones(40, 520).bfloat16(), packed(1)
    assert plan.workspace_size

    def used():
        plan(x, weight, None)
        partials, flags = device.calls[-1][-len(plan.tail) - 4 : -len(plan.tail) - 2]
        return tuple(t if isinstance(t, int) else t.data_ptr() for t in (partials, flags))

    plan(x, weight, None)
    first = used()
    assert used() == first and all(first)
    device.stream = 8
    second = used()
    assert not set(second) & set(first)
    device.stream = 7
    assert used() == first
    larger = workspace.workspace(x, plan.workspace_size * 100, 7)
    assert used() == larger != first  # one that is large enough for both
    device.capturing = True
    seen = [flags for _, flags in (used() for _ in range(5))]
    assert len(set(seen)) == 5 and not set(seen) & {first[1], second[1], larger[1]}
    pool = workspace._flag_pools[-1][0]
    assert all(0 <= flags - pool.data_ptr() < pool.nbytes for flags in seen)


def test_captured_launches_without_a_pool_clear_their_own_flags(device):
    device.capturing = True
    plan, x, weight = wgmma_plan(40, CONFIGS[0], 3), torch.ones(40, 520).bfloat16(), packed(1)
    plan(x, weight, None)
    plan(x, weight, None)
    flags = device.calls[-1][-len(plan.tail) - 3]
    assert isinstance(flags, torch.Tensor) and not flags.any() and not workspace._flag_pools and not workspace._by_stream


def test_whole_tiles_need_no_workspace(device):
    plan = wgmma_plan(40, CONFIGS[0], 1)
    plan(torch.ones(40, 520).bfloat16(), packed(1), None)
    assert not plan.workspace_size and not workspace._by_stream


def test_gemv_passes_addresses(device):
    plan, x, weight = SmallMPlan(SPEC, dequant_scheme(SPEC), 4, False), torch.ones(4, 576).bfloat16(), packed(1)
    plan(x, weight, None)
    y = plan(x, weight, None)
    assert device.calls[-1][5:15] == (
        x.data_ptr(), *(t.data_ptr() for t in weight[:3]), 0, weight[3].data_ptr(), y.data_ptr(), 4, 200, 576
    )  # fmt: skip


def test_the_pipelined_kernel_without_split_k_passes_no_workspace(device):
    plan = SmallMPlan(SPEC, dequant_scheme(SPEC), 12, False, SmallMConfig(n16_per_warp=3, num_warps=8, stages=2, stage_x=True))
    x, weight = torch.ones(12, 520).bfloat16(), packed(1)
    plan(x, weight, None)
    y = plan(x, weight, None)
    assert device.calls[-1][5:17] == (
        x.data_ptr(), *(t.data_ptr() for t in weight[:3]), 0, weight[3].data_ptr(), y.data_ptr(), 0, 0, 12, 200, 520
    )  # fmt: skip


def test_tensors_on_another_device_are_refused():
    with pytest.raises(InputError, match="on one GPU"):
        launch.run(torch.ones(1, 520).bfloat16(), packed(1), None, SPEC)


def test_a_launcher_that_serves_all_kernels_gets_one_tuple():
    calls = []
    for packs_args in (False, True):
        runtime.Binary(lambda *a: calls.append(a), ("function",), packs_args, (), {})(3, 7, (1, 2))
    assert calls == [(3, 1, 1, 7, "function", 1, 2), (3, 1, 1, 7, "function", (1, 2))]


def test_configs_print_as_one_line_without_defaults():
    gemv = SmallMConfig(n16_per_warp=2, num_warps=16, stagger_x_loads=True)
    assert str(gemv) == "gemv_mma(n16_per_warp=2, num_warps=16, stagger_x_loads=True)"
    pipelined = SmallMConfig(n16_per_warp=3, num_warps=8, stages=3)
    assert str(pipelined) == "small_m_pipelined(n16_per_warp=3, num_warps=8, stages=3)"
    config = WgmmaConfig(128, num_ctas=132, pingpong=True)
    assert str(config) == "wgmma_persistent(tile_m=128, num_ctas=132, pingpong=True)"


def test_a_triton_that_it_has_not_run_with_is_refused(monkeypatch):
    for version, accepted in (("3.6.0", True), ("3.7.1", True), ("3.10.0", False), ("4.6.0", False), ("3.60", False)):
        monkeypatch.setattr(linear.importlib.metadata, "version", lambda name, v=version: v)
        verdict = linear._triton_version.__wrapped__()
        assert bool(verdict) == accepted and (accepted or version in verdict.reason)
