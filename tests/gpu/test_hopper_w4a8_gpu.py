"""GluonHopperW4A8LinearKernel on an H100 or H200: conformance, every code, every config, concurrent streams and graphs."""

import itertools

import pytest
import torch
from test_hopper_gpu import run_concurrently

from bitline import Platform, QuantLinear, types
from bitline.kernels.hopper import scaled_linear
from bitline.kernels.hopper.w4a8_config import scale_entries, w4a8_small_m_config
from bitline.kernels.hopper.w4a8_heuristics import COSTS
from bitline.kernels.hopper.w4a8_linear import GluonHopperW4A8LinearKernel
from bitline.kernels.hopper.w4a8_plans import W4A8PersistentPlan, W4A8SmallMPlan
from bitline.kernels.hopper.w4a8_scheme import w4a8_scheme
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import ActSpec, LinearSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not GluonHopperW4A8LinearKernel.is_supported(Platform.detect("cuda")),
        reason="needs Hopper",
    ),
]
F8, I8, U4, I4 = types.float8_e4m3fn, types.int8, types.uint4b8, types.int4
INT8 = LinearSpec(200, 520, U4, (1, 128), scale_dtype=torch.bfloat16, act=ActSpec(I8))
FP8 = INT8.replace(act=ActSpec(F8))
SPECS = [
    INT8, FP8, INT8.replace(weight=I4, block=(1, 520), bias=True), FP8.replace(weight=I4, block=(1, 520)),
    FP8.replace(block=(1, 32), bias=True), INT8.replace(block=(1, 32)), FP8.replace(block=(1, 64)),
    INT8.replace(block=(1, 64), act_dtype=torch.float16, scale_dtype=torch.float16),
    FP8.replace(block=(1, 256), act=ActSpec(F8, False, "tensor")), INT8.replace(act=ActSpec(I8, False, "tensor")),
    FP8.replace(weight=types.float4_e2m1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
    INT8.replace(block=(200, 520), scale_dtype=torch.float32), FP8.replace(n=67, k=129, act=ActSpec(F8, limit=0.75)),
    FP8.replace(act=ActSpec(F8, True, "tensor")), INT8.replace(act=ActSpec(I8, True, "tensor"), n=67, k=129),
    FP8.replace(block=(1, 520), act_order=True), FP8.replace(block=(1, 384), k=1232),
]  # fmt: skip
PAIRS = ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact))


def packed(weight):
    return list(GluonHopperW4A8LinearKernel.pack(weight).values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_conformance(spec):
    check_kernel(GluonHopperW4A8LinearKernel, [spec], device="cuda")


@pytest.mark.parametrize("m", [1, 16, 70])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_every_code_reaches_its_output(spec, m):
    weight = random_weight(spec, 5, "cuda")
    columns = torch.arange(m, device="cuda") * 5 % spec.k
    x = torch.zeros(m, spec.k, dtype=spec.act_dtype, device="cuda")
    x[torch.arange(m), columns] = 0.75  # within the limit of FP8 activations that have one
    y = GluonHopperW4A8LinearKernel.apply(x, packed(weight), None, spec)
    want = weight.dequantize(torch.float32)[:, columns].T * 0.75
    assert (y.float() - want).abs().max() < 0.02 * want.abs().max()


@pytest.mark.parametrize("spec", [FP8, INT8], ids=lambda s: s.key)
@pytest.mark.parametrize("m", [1, 2, 8, 9, 17, 32, 33, 65, 129, 257, 1000])
def test_layers_of_several_shapes(m, spec):
    for n, k in ((4096, 4096), (3072, 1024), (18432, 512), (2053, 4304), (8200, 9000)):
        shaped = spec.replace(n=n, k=k)
        for make, given, judge in PAIRS:
            weight = make(shaped, 1, "cuda")
            x = given(m, shaped, m, "cuda")
            judge(GluonHopperW4A8LinearKernel.apply(x, packed(weight), None, shaped), x, weight)


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("config", COSTS, ids=str)
@pytest.mark.parametrize("spec", [FP8, FP8.replace(block=(1, 32)), INT8, INT8.replace(block=(1, 520))], ids=lambda s: s.key)
def test_every_persistent_config_with_whole_and_stream_k_tiles(config, spec, pingpong):
    shaped = spec.replace(n=1024, k=2048, block=spec.block if spec.block[1] < 520 else (1, 2048))
    for make, given, judge in PAIRS:
        weight = make(shaped, 3, "cuda")
        tensors = packed(weight)
        for m, num_ctas in itertools.product((65, 321), (1, 5, 48, 132)):
            x = given(m, shaped, m, "cuda")
            given_config = config._replace(num_ctas=num_ctas, pingpong=pingpong)
            plan = W4A8PersistentPlan(shaped, w4a8_scheme(shaped), m, False, 132, given_config)
            for _ in range(2):  # the first call compiles
                judge(plan(x, tensors, None), x, weight)


@pytest.mark.parametrize("k_blocks", [1, 2, 4])
@pytest.mark.parametrize("n16", [1, 3, 4, 9, 16])
def test_every_kind_of_small_m_config(n16, k_blocks):
    for spec, group in ((FP8, 128), (FP8, 4304), (INT8, 32), (INT8, 256)):
        shaped = spec.replace(n=1000, k=4304, block=(1, group))
        scheme = w4a8_scheme(shaped)
        for make, given, judge in PAIRS:
            weight = make(shaped, 3, "cuda")
            for m, resident in ((1, True), (1, False), (7, False), (16, False), (32, False)):
                c = w4a8_small_m_config(m, shaped.n, shaped.k, scheme, 132)._replace(
                    n16=n16, k_blocks=k_blocks, stages=16, scale_entries=scale_entries(scheme, k_blocks), resident=resident,
                    x_chunks=3 if resident else 0, overlap=m < 16,
                ).fit_stages()  # fmt: skip
                if c.stages < 2:
                    continue
                plan = W4A8SmallMPlan(shaped, scheme, m, False, 132, c)
                x = given(m, shaped, m, "cuda")
                for _ in range(2):
                    judge(plan(x, packed(weight), None), x, weight)


@pytest.mark.parametrize("spec", [FP8, INT8], ids=lambda s: s.key)
@pytest.mark.parametrize("m", [1, 8, 32, 200])
def test_two_streams_and_two_graphs(m, spec):
    shaped = spec.replace(n=4096, k=2048)
    layer = QuantLinear(random_weight(shaped, 1, "cuda"), kernel="GluonHopperW4A8LinearKernel")
    run_concurrently(layer, [inputs(m, shaped, seed, "cuda") for seed in (1, 2)], rounds=50, calls=10, replays=20)


@pytest.mark.parametrize("spec", [FP8, INT8], ids=lambda s: s.key)
@pytest.mark.parametrize("m", [1, 6, 32, 300])
def test_calls_are_repeatable_and_the_eager_path_gives_the_same(m, spec):
    shaped = spec.replace(n=3072, k=4096)
    layer = QuantLinear(random_weight(shaped, 1, "cuda"), kernel="GluonHopperW4A8LinearKernel")
    x = inputs(m, shaped, 0, "cuda")
    want = scaled_linear.run(x, layer._packed, layer.bias, shaped)
    check(want, x, random_weight(shaped, 1, "cuda"))
    assert all(torch.equal(layer(x), want) for _ in range(200))
    assert all(layer._eager.launches.values())


def test_nan_reaches_its_row_alone():
    weight = random_weight(FP8, 1, "cuda")
    for m in (1, 16, 70):
        x = inputs(m, FP8, 1, "cuda")
        clean = GluonHopperW4A8LinearKernel.apply(x, packed(weight), None, FP8)
        x[0, 17] = float("nan")
        y = GluonHopperW4A8LinearKernel.apply(x, packed(weight), None, FP8)
        assert y[0].isnan().all() and torch.equal(y[1:], clean[1:])
