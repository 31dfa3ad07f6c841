"""TritonMinifloatLinearKernel and the Marlin aliases over it, under Triton's interpreter.

In a process of its own, since interpreted and compiled code do not mix.
"""

import math

import pytest
import torch
from interpreter import INTERPRETED, apply, needs_interpreter, run_interpreted, tiers

from bitline import Platform, QuantizedWeight, bitstream, types
from bitline.kernels.aliases import marlin
from bitline.kernels.triton.layout import layout_of
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel as Kernel
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import LinearSpec
from thinning import thinned

pytest.importorskip("triton")

if INTERPRETED:
    from bitline.kernels.triton.heuristics import GemmConfig

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
MX4 = LinearSpec(33, 272, types.float4_e2m1, (1, 32), scale_dtype=E8M0)
NV4 = MX4.replace(block=(1, 16), scale_dtype=E4M3, scale2_block=(33, 272))
FP8 = MX4.replace(weight=types.float8_e4m3fn, block=(33, 272), scale_dtype=torch.float32)
BLOCKS = FP8.replace(n=140, k=300, block=(128, 128))
TYPES = [types.float4_e2m1, types.float6_e2m3, types.float6_e3m2, types.float8_e4m3fn, types.float8_e4m3fnuz, types.float8_e5m2]
MORE = [
    MX4.replace(weight=types.float8_e4m3fn, act_dtype=torch.float16),
    MX4.replace(weight=types.float8_e5m2, act_dtype=torch.float16),
    MX4.replace(weight=types.float6_e2m3, bias=True),
    MX4.replace(weight=types.float6_e3m2, act_dtype=torch.float32),
    MX4.replace(weight=types.float8_e4m3fnuz),
    MX4.replace(block_offset=(0, 7), act_dtype=torch.float16),
    MX4.replace(block=(1, 24)),
    MX4.replace(block=(1, 64)),
    MX4.replace(block=(33, 272)),
    MX4.replace(block=(1, 40), ragged=True, act_order=True, act_dtype=torch.float16),
    MX4.replace(n=70, block=(32, 32), scale2_block=(64, 272)),
    MX4.replace(scale2_block=(1, 96)),
    NV4.replace(act_dtype=torch.float32),
    NV4.replace(act_order=True),
    NV4.replace(scale_dtype=torch.bfloat16, scale2_block=None),
    NV4.replace(weight=types.float8_e5m2),
    FP8.replace(block=(1, 272), scale_dtype=torch.bfloat16, bias=True),
    FP8.replace(weight=types.float8_e5m2, block=(24, 48), act_dtype=torch.float16),
    BLOCKS.replace(act_dtype=torch.float32),
    BLOCKS.replace(block_offset=(72, 40)),
]


def _apply(*arguments):
    return apply(Kernel, *arguments)


@tiers
def test_under_the_interpreter(tier):
    run_interpreted(__file__, tier)


@needs_interpreter
@pytest.mark.parametrize(
    "spec", thinned([MX4, NV4, NV4.replace(act_dtype=torch.float16, bias=True), BLOCKS], 4, start=1), ids=lambda s: s.scheme
)
def test_conformance(spec):
    check_kernel(Kernel, [spec], Platform.detect("cpu"))


@needs_interpreter
@pytest.mark.parametrize("spec", thinned(MORE, 12), ids=lambda s: s.key)
def test_every_kind_of_scale_and_order(spec):
    weight, exact = random_weight(spec, 7), lossless_weight(spec, 8)
    for has_bf16x2 in (False, True):
        check(_apply(weight, x := inputs(3, spec, 9), None, has_bf16x2), x, weight)
        check_exact(_apply(exact, x := lossless_inputs(3, spec, 9), None, has_bf16x2), x, exact)
    check(_apply(weight, x := inputs(2, spec, 5), "panels"), x, weight)


@needs_interpreter
@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16, torch.float32], 3))
@pytest.mark.parametrize("kind", thinned(TYPES, 5), ids=lambda k: k.name)
def test_every_code_in_every_position(kind, dtype):
    """Row i holds code i alone, in a column of its own, so that every code and every field of an int32 is dequantized exactly."""
    n, k = 1 << kind.bits, 272
    codes = torch.zeros(n, k, dtype=torch.uint8)
    row = torch.arange(n)
    column = (row * 37) % k
    codes[row, column] = row.to(torch.uint8)
    values = torch.tensor(kind.values())
    x = torch.ones(1, k, dtype=dtype)
    spec = LinearSpec(n, k, kind, (1, k), act_dtype=dtype)
    mx_spec = spec.replace(block=(1, 32), scale_dtype=E8M0)
    scale = torch.full(mx_spec.grid, 120, dtype=torch.uint8)
    for s, table in ((spec, torch.ones(n, 1)), (mx_spec, scale.view(E8M0))):
        weight = QuantizedWeight(s, bitstream.pack(codes, kind.bits), table)
        want = values if s is spec else values * 2.0**-7
        want = torch.where(values.isfinite(), want, math.nan)
        for has_bf16x2 in {False, dtype == torch.bfloat16}:
            found = _apply(weight, x, GemmConfig(1, 256, 8, 4, 2), has_bf16x2)[0].float()
            assert torch.equal(found.nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))
        if not bool(values.isfinite().all()):
            assert torch.equal(_apply(weight, x, "panels")[0].isnan(), want.isnan())


@needs_interpreter
@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16], 2))
def test_e8m0_scales_of_any_size(dtype):
    """Each row has scales of its own magnitude, from the smallest to the largest; one has E8M0's NaN, and only that is NaN."""
    spec = MX4.replace(n=250, k=64, act_dtype=dtype)
    weight = random_weight(spec, 3)
    scale = torch.stack([torch.arange(250), torch.arange(250).sub(3).clamp(min=0)], 1).to(torch.uint8)
    scale[77, 1] = 255
    weight = QuantizedWeight(spec, weight.codes, scale.view(E8M0))
    x = torch.ones(1, 64, dtype=dtype)
    out = _apply(weight, x)[0]
    exact = weight.dequantize(torch.float64).sum(1)
    assert out[77].isnan() and not out[:77].isnan().any() and not out[78:].isnan().any()
    known = (exact.abs() < torch.finfo(dtype).max) & (torch.arange(250) != 77)
    assert int(known.sum()) > 120
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert torch.all((out.double() - exact).abs()[known] <= torch.finfo(dtype).eps * exact.abs()[known] + tiny)


@needs_interpreter
def test_split_k_and_k_slices_compute_the_same():
    for spec in (MX4.replace(n=70, k=640, bias=True), NV4.replace(k=640, scale2_block=(33, 640)), BLOCKS.replace(n=70)):
        weight = lossless_weight(spec)
        x = lossless_inputs(9, spec)
        for config in (GemmConfig(1, 64, 16, 4, 2, 3), GemmConfig(2, 32, 16, 4, 2, 2), GemmConfig(8, 32, 8, 8, 2)):
            check_exact(_apply(weight, x, config), x, weight)


@needs_interpreter
@pytest.mark.parametrize(
    ("kernel", "spec"),
    [(marlin.MarlinNvFp4LinearKernel, NV4), (marlin.MarlinMxFp4LinearKernel, MX4.replace(act_dtype=torch.float16)),
     (marlin.MarlinMxfp8LinearKernel, MX4.replace(weight=types.float8_e4m3fn)), (marlin.MarlinFP8ScaledMMLinearKernel, FP8)],
)  # fmt: skip
def test_marlin_aliases(kernel, spec):
    check_kernel(kernel, [spec.replace(n=24, k=96, block=(min(spec.block[0], 24), min(spec.block[1], 96)),
                                       scale2_block=spec.scale2_block and (24, 96))], "cuda:sm80")  # fmt: skip


def test_marlin_nvfp4_warns_once_that_it_computes_in_16_bits(caplog):
    marlin._warn_weight_only.cache_clear()
    for _ in range(2):
        marlin.MarlinNvFp4LinearKernel.pack(random_weight(NV4))
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "16-bit activations" in caplog.text


def test_packed_size():
    n, k = 64, 4096
    for spec, most in ((MX4, 4.25), (NV4, 4.5), (FP8, 8)):
        spec = spec.replace(n=n, k=k, block=(n, k) if spec is FP8 else spec.block, scale2_block=spec.scale2_block and (n, k))
        size = sum(t.nbytes for t in Kernel.pack(random_weight(spec)).values())
        assert size == Kernel.packed_bytes(spec)
        assert size - 4 * n == most * n * k / 8  # a factor per row, else what the checkpoint has


def test_one_byte_block_scales_stay_bytes():
    assert layout_of(MX4).sf_vec_size == 32 and layout_of(NV4).sf_vec_size == 16
    assert layout_of(MX4.replace(block=(1, 64))).sf_vec_size == 0 and layout_of(FP8).sf_vec_size == 0
    assert layout_of(NV4.replace(scale2_block=(1, 32))).sf_vec_size == 0  # second-level scales change along K


def test_refusals_name_the_reason():
    for change, text in (
        ({"weight": types.uint4b8}, "not a float"), ({"weight": types.nf4}, "not a float"),
        ({"weight": types.ufloat8_e5m3}, "with a sign"), ({"act": types.ActSpec(types.float8_e4m3fn)}, "weight-only"),
        ({"zero": "int"}, "zero points"),
    ):  # fmt: skip
        verdict = Kernel.can_implement(MX4.replace(**change))
        assert not verdict and text in verdict.reason and verdict.fix
    assert Kernel.can_implement(BLOCKS) and "older" in Kernel.is_supported(Platform.parse("cuda:sm70")).reason
    for name in ("cuda:sm75", "cuda:sm89", "cuda:sm120", "rocm:gfx90a", "rocm:gfx1201", "xpu"):
        assert Kernel.is_supported(Platform.parse(name))
