"""GluonHopperScaledMMLinearKernel on an H100 or H200: conformance, every config, concurrent streams and graphs."""

import copy
import itertools

import pytest
import torch
from graphs import captured
from test_hopper_gpu import run_concurrently

from bitline import Platform, QuantLinear, types
from bitline.act_quant import quantize_groups, quantize_input
from bitline.kernels.hopper import runtime, scaled_linear
from bitline.kernels.hopper.config import LargeMConfig
from bitline.kernels.hopper.scaled_config import scaled_small_m_config
from bitline.kernels.hopper.scaled_heuristics import FP8_COSTS, GROUPED_COSTS, costs_of
from bitline.kernels.hopper.scaled_linear import GluonHopperScaledMMLinearKernel
from bitline.kernels.hopper.scaled_plans import QuantizePlan, ScaledSmallMPlan, Space, persistent_plan
from bitline.kernels.hopper.scaled_scheme import scaled_scheme
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import ActSpec, LinearSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not GluonHopperScaledMMLinearKernel.is_supported(Platform.detect("cuda")),
        reason="needs Hopper",
    ),
]
F8, I8 = types.float8_e4m3fn, types.int8
FP8 = LinearSpec(200, 520, F8, (1, 520), scale_dtype=torch.float32, act=ActSpec(F8))
INT8 = FP8.replace(weight=I8, act=ActSpec(I8))
GROUPS = ActSpec(F8, True, "group", 128)
BLOCKS = FP8.replace(block=(128, 128), act=GROUPS)
SPECS = [
    FP8, FP8.replace(n=67, k=129, block=(1, 129), bias=True),
    FP8.replace(act_dtype=torch.float16, n=1000, k=1232, block=(1, 1232)),
    FP8.replace(act=ActSpec(F8, limit=0.75)), FP8.replace(act_order=True),
    FP8.replace(block=(200, 520), act=ActSpec(F8, False, "tensor")),
    FP8.replace(scale_dtype=torch.bfloat16, n=8, k=16, block=(1, 16)),
    BLOCKS, BLOCKS.replace(block_offset=(40, 0), bias=True), BLOCKS.replace(n=1000, k=1232, act_dtype=torch.float16),
    BLOCKS.replace(block=(64, 256), k=1232, act=ActSpec(F8, True, "group", 512)),
    BLOCKS.replace(block=(1, 520), act=ActSpec(F8, True, "group", 256, scale="e8m0")),
    INT8, INT8.replace(act=ActSpec(I8, symmetric=False), bias=True),
    INT8.replace(block=(200, 520), act=ActSpec(I8, False, "tensor")),
    INT8.replace(act=ActSpec(I8, False, "tensor", symmetric=False), act_dtype=torch.float16),
]  # fmt: skip
PER_TENSOR = [
    FP8.replace(act=ActSpec(F8, True, "tensor", limit=0.75)),
    INT8.replace(act=ActSpec(I8, True, "tensor"), k=129, block=(1, 129)),
]
PAIRS = ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact))


def packed(weight):
    return list(GluonHopperScaledMMLinearKernel.pack(weight).values())


@pytest.mark.parametrize("spec", SPECS + PER_TENSOR, ids=lambda s: s.key)
def test_conformance(spec):
    check_kernel(GluonHopperScaledMMLinearKernel, [spec], device="cuda")


@pytest.mark.parametrize("spec", [FP8, BLOCKS, INT8], ids=lambda s: s.key)
@pytest.mark.parametrize("m", [1, 2, 8, 9, 17, 33, 64, 65, 129, 257, 1000])
def test_layers_of_several_shapes(m, spec):
    for n, k in ((4096, 4096), (3072, 1024), (18432, 512), (2053, 4304), (8200, 9000)):
        shaped = spec.replace(n=n, k=k, block=spec.block if spec.block[0] > 1 else (1, k))
        for make, given, judge in PAIRS:
            weight = make(shaped, 1, "cuda")
            x = given(m, shaped, m, "cuda")
            judge(GluonHopperScaledMMLinearKernel.apply(x, packed(weight), None, shaped), x, weight)


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("config", {**FP8_COSTS, **GROUPED_COSTS}, ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        FP8, FP8.replace(bias=True, act_dtype=torch.float16), BLOCKS, BLOCKS.replace(block_offset=(40, 0)),
        BLOCKS.replace(bias=True), BLOCKS.replace(block=(1, 2048), act=ActSpec(F8, True, "group", 256)), INT8,
        INT8.replace(act=ActSpec(I8, symmetric=False), bias=True),
    ],
    ids=lambda s: s.key,
)  # fmt: skip
def test_every_persistent_config_with_whole_and_stream_k_tiles(config, spec, pingpong):
    shaped = spec.replace(n=1024, k=2048, block=spec.block if spec.block[0] > 1 else (1, 2048))
    scheme = scaled_scheme(shaped)
    if isinstance(config, LargeMConfig) and not any(isinstance(c, LargeMConfig) for c in costs_of(scheme)):
        pytest.skip("scale blocks of W that are not aligned to 128 rows")
    for make, given, judge in PAIRS:
        weight = make(shaped, 3, "cuda")
        tensors = packed(weight)
        bias = None if weight.bias is None else weight.bias.to(shaped.act_dtype)
        for m, num_ctas in itertools.product((65, 321), (1, 5, 48, 132)):
            x = given(m, shaped, m, "cuda")
            given_config = config._replace(num_ctas=num_ctas, pingpong=pingpong)
            plan = persistent_plan(shaped, scheme, m, bias is not None, 132, given_config)
            for _ in range(2):  # the first call compiles
                judge(plan(x, tensors, bias), x, weight)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("rows, warpgroups", [(8, 1), (24, 1), (64, 1), (80, 2), (128, 1), (144, 2), (256, 2)])
def test_every_kind_of_small_m_config(rows, warpgroups, private):
    for spec in (FP8, BLOCKS, INT8.replace(act=ActSpec(I8, symmetric=False))):
        shaped = spec.replace(n=1000, k=4304, block=spec.block if spec.block[0] > 1 else (1, 4304))
        parts = -(-rows // 64)
        for make, given, judge in PAIRS:
            weight = make(shaped, 3, "cuda")
            for m, k_blocks in ((1, 8), (7, 4), (16, 2), (33, 1)):
                if private and m > 8:
                    continue
                c = scaled_small_m_config(m, shaped.n, shaped.k, 132)._replace(
                    rows=rows, box_rows=next(b for b in (64, 32, 16, 8) if rows % b == 0), stages=24, k_blocks_per_stage=k_blocks,
                    n64_per_warpgroup=-(-parts // warpgroups), num_consumer_warpgroups=warpgroups, private=private,
                ).fit_stages()  # fmt: skip
                if c.stages < 2:
                    continue
                plan = ScaledSmallMPlan(shaped, scaled_scheme(shaped), m, False, 132, c)
                x = given(m, shaped, m, "cuda")
                for _ in range(2):
                    judge(plan(x, packed(weight), None), x, weight)


@pytest.mark.parametrize("fragment_order", [False, True])
@pytest.mark.parametrize("k", [16, 520, 4096, 9000])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_codes_and_scales_are_those_of_the_definition(spec, k, fragment_order):
    act, m = spec.act, 37
    spec = spec.replace(k=k, block=(spec.block[0], k) if spec.block[1] == spec.k else spec.block)
    scheme = scaled_scheme(spec)
    x = torch.nn.functional.pad(inputs(m, spec, 1, "cuda"), (0, -k % 8))
    x[3] = 0
    static_scale = torch.full((1,), 0.013, device="cuda")
    static_zero = torch.full((1,), 5, dtype=torch.int32, device="cuda")
    plan = QuantizePlan(scheme, m, x.shape[1] // 8, Space(scheme, m, 16), fragment_order)
    for _ in range(2):
        space = torch.full((plan.space.bytes,), 0x5A, dtype=torch.uint8, device="cuda")
        plan(x, space.data_ptr(), static_scale, static_zero, runtime.raw_stream(0))
    at = plan.space
    codes = space[: m * scheme.columns].view(m, scheme.columns)[:, :k]
    scales = space[at.scale : at.scale + 4 * at.groups * at.stride].view(torch.float32).view(at.groups, at.stride)
    if act.granularity == "group" and fragment_order:  # each 16 rows are in the order of accumulators
        scales = scales.view(at.groups, -1, 4, 2, 2).transpose(2, 3).flatten(1)
    scales = scales[:, :m]
    if act.granularity == "group" and act.scale == "float":
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % act.group_size))
        want, want_scale, _ = quantize_groups(padded, act)
        assert torch.equal(scales, want_scale.t())
    elif act.granularity != "group":
        want, want_scale, zero = quantize_input(x, act, static_scale, static_zero)
        assert torch.equal(scales[0], want_scale.expand(m, 1)[:, 0])
        if zero is not None:
            assert torch.equal(space[at.zero : at.zero + 4 * m].view(torch.int32), zero.expand(m, 1)[:, 0])
    else:
        groups = torch.nn.functional.pad(x, (0, -x.shape[1] % act.group_size)).float().unflatten(1, (-1, act.group_size))
        assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
        want = (groups / scales.t().unsqueeze(-1)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    assert torch.equal(codes, want[:, :k].contiguous().view(torch.uint8))


def test_nan_and_infinity_reach_their_rows_alone():
    for spec in (FP8, BLOCKS):
        weight = random_weight(spec, 1, "cuda")
        for m in (1, 16, 70):
            x = inputs(m, spec, 1, "cuda")
            clean = GluonHopperScaledMMLinearKernel.apply(x, packed(weight), None, spec)
            for bad in (float("nan"), float("inf")):
                x2 = x.clone()
                x2[0, 17] = bad
                y = GluonHopperScaledMMLinearKernel.apply(x2, packed(weight), None, spec)
                assert y[0].isnan().all() and torch.equal(y[1:], clean[1:])


@pytest.mark.parametrize("spec", [FP8, BLOCKS], ids=lambda s: s.key)
@pytest.mark.parametrize("m", [1, 8, 64, 200])
def test_two_streams_and_two_graphs(m, spec):
    shaped = spec.replace(n=4096, k=2048, block=spec.block if spec.block[0] > 1 else (1, 2048))
    layer = QuantLinear(random_weight(shaped, 1, "cuda"), kernel="GluonHopperScaledMMLinearKernel")
    run_concurrently(layer, [inputs(m, shaped, seed, "cuda") for seed in (1, 2)], rounds=50, calls=10, replays=20)


@pytest.mark.parametrize("m", [1, 6, 64, 300])
def test_calls_are_repeatable_and_follow_their_input(m):
    weight = random_weight(FP8.replace(n=3072, k=4096, block=(1, 4096)), 1, "cuda")
    layer = QuantLinear(weight, kernel="GluonHopperScaledMMLinearKernel")
    x = inputs(m, layer.spec, 0, "cuda")
    first = layer(x)
    assert all(torch.equal(layer(x), first) for _ in range(100))
    graph, (y, z) = captured(lambda: (layer(x), layer(x)))
    for seed in range(1, 4):
        x.copy_(inputs(m, layer.spec, seed, "cuda"))
        y.fill_(float("nan"))
        graph.replay()
        check(y, x, weight)
        assert torch.equal(y, z) and torch.equal(y, layer(x))


@pytest.mark.parametrize("m", [1, 6, 64, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_the_eager_path_gives_what_the_kernel_gives(m, bias):
    spec = FP8.replace(n=1024, k=2048, block=(1, 2048), bias=bias)
    layer = QuantLinear(random_weight(spec, 1, "cuda"), kernel="GluonHopperScaledMMLinearKernel")
    twin = copy.deepcopy(layer)
    x = inputs(m, spec, m, "cuda")
    want = scaled_linear.run(x, layer._packed, layer.bias, spec)
    apart = torch.empty(m, 2 * spec.k, device="cuda", dtype=x.dtype)[:, : spec.k].copy_(x)
    unaligned = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view_as(x).copy_(x)
    for call in (layer, twin):
        for given in (x, x, x, x.clone(), apart, unaligned, *3 * [x.view(1, m, -1)]):
            y = call(given)
            assert y.shape == (*given.shape[:-1], spec.n) and torch.equal(y.view(m, -1), want)
        assert {x.shape, (1, m, spec.k)} <= set(call._eager.launches) and all(call._eager.launches.values())


def test_torch_compile():
    layer = QuantLinear(
        random_weight(FP8.replace(n=512, k=1024, block=(1, 1024)), 1, "cuda"), kernel="GluonHopperScaledMMLinearKernel"
    )
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for m in (2, 9, 70, 300):
            x = inputs(m, layer.spec, m, "cuda")
            assert torch.equal(compiled(x), layer(x))
