"""GluonHopperLinearKernel on an H100 or H200: conformance, every config, reductions on concurrent streams and graphs."""

import copy

import pytest
import torch
from graphs import captured

from bitline import InputError, Platform, QuantLinear, types
from bitline.kernels.hopper import launch
from bitline.kernels.hopper.config import SmallMConfig
from bitline.kernels.hopper.heuristics import SMALL_M_COSTS, WGMMA_COSTS
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.hopper.plans import SmallMPlan, WgmmaPlan
from bitline.kernels.hopper.scheme import dequant_scheme
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import LinearSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not GluonHopperLinearKernel.is_supported(Platform.detect("cuda")), reason="needs Hopper"
    ),
]
BASE = LinearSpec(200, 520, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
E2M1 = BASE.replace(n=256, k=1024, weight=types.float4_e2m1)
E4M3 = BASE.replace(weight=types.float8_e4m3fn, block=(1, 520))
SPECS = [
    BASE, BASE.replace(n=512, k=1024, act_dtype=torch.float16, scale_dtype=torch.float16, bias=True),
    BASE.replace(n=256, k=1024, block=(1, 32)), BASE.replace(block=(1, 16), act_dtype=torch.float16), BASE.replace(n=67, k=129),
    BASE.replace(n=96, k=768, block=(1, 192)), BASE.replace(block=(1, 520), scale_dtype=torch.float32, act_order=True),
    BASE.replace(weight=types.uint4, zero="int", block=(1, 64)), BASE.replace(weight=types.int4, bias=True),
    BASE.replace(weight=types.uint8b128), BASE.replace(weight=types.int8, act_dtype=torch.float16),
    BASE.replace(weight=types.uint8, zero="int"), BASE.replace(weight=types.uint8, zero="int", act_dtype=torch.float16),
    E2M1.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
    E2M1.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 1024)),
    E2M1.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu, act_dtype=torch.float16), E2M1.replace(act_dtype=torch.float16),
    E2M1.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 1024), act_dtype=torch.float16),
    BASE.replace(block=(1, 48)), BASE.replace(block=(1, 96), weight=types.uint4, zero="int"), BASE.replace(block_offset=(0, 64)),
    BASE.replace(block_offset=(0, 16), act_dtype=torch.float16), BASE.replace(block=(1, 640), block_offset=(0, 120)),
    E4M3.replace(bias=True), E4M3.replace(act_dtype=torch.float16), E4M3.replace(block=(128, 128), scale_dtype=torch.float32),
    E4M3.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
]  # fmt: skip


def packed(weight):
    return list(GluonHopperLinearKernel.pack(weight).values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_conformance(spec):
    check_kernel(GluonHopperLinearKernel, [spec], device="cuda")


def wgmma_plan(config, spec, m, has_bias, num_ctas):
    return WgmmaPlan(spec, dequant_scheme(spec), m, has_bias, 132, config._replace(num_ctas=num_ctas))


@pytest.mark.parametrize("config", WGMMA_COSTS, ids=str)
def test_every_wgmma_config_with_whole_and_stream_k_tiles(config):
    for spec in (BASE.replace(n=1024, k=2048, bias=True), BASE.replace(weight=types.uint4, zero="int", block=(1, 64))):
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight = make(spec, 3, "cuda")
            bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)
            for m in (17, 90, 321):
                x = given(m, spec, m, "cuda")
                for num_ctas in (1, 5, 48, 64, 132):
                    plan = wgmma_plan(config, spec, m, bias is not None, num_ctas)
                    judge(plan(x, packed(weight), bias), x, weight)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_every_scheme_in_every_wgmma_config(spec):
    weight = random_weight(spec, 3, "cuda")
    bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)
    x = inputs(300, spec, 1, "cuda")
    for config in WGMMA_COSTS:
        plan = wgmma_plan(config, spec, 300, bias is not None, 3)
        tensors = packed(weight)
        given = x.index_select(1, tensors[4]) if tensors[4].numel() else x
        given = torch.nn.functional.pad(given, (0, -spec.k % 64)) if spec.k % 8 else given
        check(plan(given, tensors, bias), x, weight)


RULES = [  # (ceil(M / 8), config): weights in registers, and the pipelined configs that `small_m_config` names by itself
    (1, SmallMConfig(1, 16, k_tiles_per_iter=2)), (1, SmallMConfig(2, 4, max_registers=72)),
    (1, SmallMConfig(2, 8, max_registers=128)), (2, SmallMConfig(1, 16)), (2, SmallMConfig(2, 16, stagger_x_loads=True)),
    (2, SmallMConfig(2, 4, max_registers=128)), (1, SmallMConfig(1, 16, stages=2)),
    (1, SmallMConfig(1, 16, stages=3, warps_per_k_slice=2, stage_x=True)),
    (1, SmallMConfig(2, 8, stages=4, warps_per_k_slice=2, stage_x=True)),
]  # fmt: skip
SMALL_M = RULES + [(m8_tiles, row.config) for m8_tiles, rows in SMALL_M_COSTS.items() for row in rows]
KINDS = [  # K slices of one or several warps, tile counts that are no power of two, split-K, x from the L2
    SmallMConfig(7, 4, stages=2, stage_x=True),
    SmallMConfig(3, 8, stages=3, warps_per_k_slice=4, stage_x=True, pdl_early=True),
    SmallMConfig(1, 16, stages=3, warps_per_k_slice=2, stage_x=True, pdl_early=True),
    SmallMConfig(2, 8, stages=3, warps_per_k_slice=4, stage_x=True, pdl_early=True, split_k=4),
    SmallMConfig(2, 8, stages=2), SmallMConfig(2, 16, stagger_x_loads=True),
]  # fmt: skip


def small_m_plan(config, spec, m, has_bias=False):
    scheme = dequant_scheme(spec)
    return SmallMPlan(spec, scheme, m, has_bias, config.fit_stages(scheme, m))


def run_config(config, weight, x, bias=None):
    """What a call would do with this config."""
    plan = small_m_plan(config, weight.spec, x.shape[0], bias is not None)
    if weight.perm is not None:
        x = x.index_select(1, weight.perm)
    k = x.shape[1]
    if k % 64 and (plan.pads_k or k % 8):
        x = torch.nn.functional.pad(x, (0, -k % 64))
    return plan(x, packed(weight), bias)


@pytest.mark.parametrize("m8_tiles, config", SMALL_M, ids=str)
def test_every_small_m_config(m8_tiles, config):
    for n, k in ((1024, 2048), (1032, 4160), (517, 4304)):
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight = make(BASE.replace(n=n, k=k), 3, "cuda")
            for m in (8 * m8_tiles - 7, 8 * m8_tiles - 2, 8 * m8_tiles):
                x = given(m, weight.spec, m, "cuda")
                judge(run_config(config, weight, x), x, weight)


@pytest.mark.parametrize("config", KINDS, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_every_kind_of_small_m_config_with_every_scheme(spec, config):
    n = 394
    if spec.scale2_block == (spec.n, spec.k):
        spec = spec.replace(scale2_block=(n, spec.k))
    spec = spec.replace(n=n)
    for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
        weight = make(spec, 3, "cuda")
        bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)
        for m in (5, 13) + ((20,) if config.stages else ()):
            x = given(m, spec, m, "cuda")
            judge(run_config(config, weight, x, bias), x, weight)


def run_concurrently(call, xs, rounds=20, calls=5, replays=10):
    """Each x on a stream of its own, and then in a captured graph of several calls, gives what it gives alone."""
    want = [call(x) for x in xs]
    streams, graphs = [torch.cuda.Stream() for _ in xs], []
    torch.cuda.synchronize()
    for _ in range(rounds):
        found = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                found.append(call(x))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    for x in xs:
        graphs.append(captured(lambda x=x: [call(x) for _ in range(calls)]))
    for _ in range(replays):
        for stream, (graph, _out) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, w) for (_, out), w in zip(graphs, want, strict=True) for y in out)


def test_split_k_on_two_streams_and_in_two_graphs():
    spec = BASE.replace(n=1024, k=4096)
    weight = packed(random_weight(spec, 1, "cuda"))
    for config in {row.config for rows in SMALL_M_COSTS.values() for row in rows if row.config.split_k > 1}:
        for m in (8, 16, 23, 32):
            plan = small_m_plan(config, spec, m)
            assert plan.workspace_size
            run_concurrently(lambda x, plan=plan: plan(x, weight, None), [inputs(m, spec, seed, "cuda") for seed in (1, 2)])


@pytest.mark.parametrize("m", [1, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33, 65, 97, 129, 200, 257, 300, 1000, 2049])
def test_layers_of_several_shapes(m):
    for n, k in ((4096, 4096), (1024, 4096), (10240, 2048), (2053, 4304), (4104, 4160)):
        spec = BASE.replace(n=n, k=k)
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight = make(spec, 1, "cuda")
            x = given(m, spec, m, "cuda")
            judge(GluonHopperLinearKernel.apply(x, packed(weight), None, spec), x, weight)


def test_stream_k_on_two_streams_and_in_two_graphs():
    weight = random_weight(BASE.replace(n=4096, k=4096), 1, "cuda")
    layer = QuantLinear(weight, kernel="GluonHopperLinearKernel")
    run_concurrently(layer, [inputs(64, layer.spec, seed, "cuda") for seed in (1, 2)], rounds=100, calls=10, replays=30)


@pytest.mark.parametrize("config", WGMMA_COSTS, ids=str)
def test_stream_k_of_each_wgmma_config_on_two_streams_and_in_two_graphs(config):
    spec = BASE.replace(n=1024, k=2048)
    weight = packed(random_weight(spec, 1, "cuda"))
    m = config.cta_m + 7
    plan = wgmma_plan(config, spec, m, False, 29)
    assert plan.workspace_size
    run_concurrently(lambda x: plan(x, weight, None), [inputs(m, spec, seed, "cuda") for seed in (1, 2)])


@pytest.mark.parametrize("m", [1, 6, 16, 24, 40, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_the_eager_path_gives_what_the_kernel_gives(m, bias):
    spec = BASE.replace(n=1024, k=2048, bias=bias)
    layer = QuantLinear(random_weight(spec, 1, "cuda"), kernel="GluonHopperLinearKernel")
    twin = copy.deepcopy(layer)
    x = inputs(m, spec, m, "cuda")
    want = launch.run(x, layer._packed, layer.bias, spec)
    apart = torch.empty(m, 2 * spec.k, device="cuda", dtype=x.dtype)[:, : spec.k].copy_(x)
    unaligned = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view_as(x).copy_(x)
    given_in_turn = (x, x, x, x.clone(), apart, unaligned, *3 * [x.view(1, m, -1)], x.view(m, 1, 1, -1))
    for call in (layer, twin, layer.cuda()):
        for given in given_in_turn:
            y = call(given)
            assert y.shape == (*given.shape[:-1], spec.n) and torch.equal(y.view(m, -1), want)
        assert {x.shape, (1, m, spec.k)} <= set(call._eager.launches) and all(call._eager.launches.values())
    graded = x.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(layer(x), want) and torch.equal(layer(graded), want)
    y = layer(graded)
    y.float().sum().backward()
    slope = random_weight(spec, 1, "cuda").dequantize(torch.float32).sum(0)
    assert torch.equal(y, want) and torch.allclose(
        graded.grad.float(), slope.expand(m, -1), rtol=0.01, atol=0.01 * float(slope.abs().max())
    )
    with pytest.raises(InputError, match="does not fit the layer"):
        layer(x.half())
    moved = layer._packed[0]
    moved.data = moved.data.clone()  # moved behind the layer's back
    assert torch.equal(layer(x), twin(x))


@pytest.mark.parametrize("spec", [BASE, BASE.replace(n=4096, k=4096), BASE.replace(n=67, k=129, bias=True)], ids=lambda s: s.key)
@pytest.mark.parametrize("m", [1, 16, 24, 64, 300])
def test_a_captured_call_follows_its_input(m, spec):
    weight = random_weight(spec, 1, "cuda")
    layer = QuantLinear(weight, kernel="GluonHopperLinearKernel")
    x = inputs(m, spec, 0, "cuda")
    layer(x)
    graph, (y, z) = captured(lambda: (layer(x), layer(x)))
    for seed in range(1, 4):
        x.copy_(inputs(m, spec, seed, "cuda"))
        y.fill_(float("nan"))
        graph.replay()
        check(y, x, weight)
        assert torch.equal(y, z) and torch.equal(y, layer(x))


@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_calls_with_new_tensors_use_them(m):
    """Tensor maps and addresses are cached between calls, and freed memory is used again."""
    spec = BASE.replace(n=512, k=1024)
    for seed in range(8):
        weight = random_weight(spec, seed, "cuda")
        layer = QuantLinear(weight, kernel="GluonHopperLinearKernel")
        kept = []
        for more in range(3):
            x = inputs(m, spec, 10 * seed + more, "cuda")
            kept.append((layer(x), x))
            torch.ops.bitline.linear(x, layer._packed, None, "GluonHopperLinearKernel", spec.key)
        for y, x in kept:
            check(y, x, weight)


def test_an_input_on_another_device_is_refused():
    weight = random_weight(BASE, 1, "cuda")
    layer = QuantLinear(weight, kernel="GluonHopperLinearKernel")
    for m in (1, 40):
        with pytest.raises(InputError, match="on one GPU"):
            layer(inputs(m, BASE, 1))
        x = inputs(m, BASE, 1, "cuda")
        check(layer(x), x, weight)


def test_torch_compile_keeps_the_choice_by_m():
    layer = QuantLinear(random_weight(BASE.replace(n=512, k=1024), 1, "cuda"), kernel="GluonHopperLinearKernel")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for m in (2, 9, 70, 300):
            x = inputs(m, layer.spec, m, "cuda")
            assert torch.equal(compiled(x), layer(x))
