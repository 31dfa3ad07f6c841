"""The int8-slices kernel of the native core: x as fixed-point numbers, where it is taken and where it is not."""

import math

import pytest
import torch
from test_native_cpu import run_poisoned

from bitline import native, types
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel as Kernel
from bitline.testing import check, check_exact
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.testing.tolerance import reference64
from bitline.types import ActSpec, LinearSpec

pytestmark = pytest.mark.skipif(len(native.isas()) < 2, reason="no level with linear kernels here")
BASE = LinearSpec(40, 256, types.uint4b8, (1, 64), scale_dtype=torch.float32)
ZEROS = BASE.replace(weight=types.uint4, block=(1, 32), zero="int", n=33, k=200)
OFFSETS = BASE.replace(weight=types.uint4, block=(1, 32), zero="float", scale_dtype=torch.uint8, scale2_block=(1, 128), bias=True)
NVFP4 = BASE.replace(weight=types.float4_e2m1, block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(40, 256))
LAYERS = {
    "group 64": BASE, "zeros": ZEROS, "offsets": OFFSETS, "nvfp4": NVFP4, "group 24": BASE.replace(block=(1, 24), n=1, k=240),
    "act-order": BASE.replace(act_order=True, n=70), "channel": BASE.replace(weight=types.int8, block=(1, 1111), k=1111, n=45),
    "2 bits": BASE.replace(weight=types.uint2b2, n=31), "3 bits": BASE.replace(weight=types.uint3b4, k=250, n=65),
    "5 bits": BASE.replace(weight=types.uint5b16, block=(1, 100), k=300), "6 bits, offsets": BASE.replace(
        weight=types.uint6, block=(1, 16), zero="float"),
}  # fmt: skip
KINDS = [types.uint2b2, types.uint3b4, types.uint4b8, types.uint5b16, types.uint6b32, types.int8, types.float4_e2m1]


def apply(x, weight):
    return Kernel.apply(x, list(Kernel.pack(weight).values()), None, weight.spec)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_outlier_in_a_group_leaves_the_others_their_bits(kernel_level, kind, dtype):
    weight = random_weight(BASE.replace(weight=kind, act_dtype=dtype), 1)
    for m in (1, 2, 3):
        x = inputs(m, weight.spec, m)
        x[:, 5] = 900.0
        x[:, 70] = -4000.0
        check(apply(x, weight), x, weight)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_number_of_rows(kernel_level, name, dtype):
    spec = LAYERS[name].replace(act_dtype=dtype)
    exact, weight = lossless_weight(spec, 1), random_weight(spec, 2)
    for m in (*range(1, 10), 12, 13, 17):
        x = lossless_inputs(m, spec, m)
        check_exact(run_poisoned(spec, exact, x), x, exact)
        x = inputs(m, spec, m)
        check(run_poisoned(spec, weight, x), x, weight)


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_has_the_same_bits_among_others(kernel_level, name):
    """Integer sums are exact, so tiles of other sizes change no bit, up to the number of rows that the level multiplies so."""
    spec = LAYERS[name]
    most = {"avx512": 4, "amx": 4, "neon_i8mm": 3}.get(kernel_level, 12)
    if kernel_level == "avx2":
        most = 1 if spec.weight.bits == 8 else 5
    packed, x = list(Kernel.pack(random_weight(spec, 1)).values()), inputs(most, spec, 3)
    alone = torch.cat([Kernel.apply(row, packed, None, spec) for row in x.split(1)])
    for m in range(2, most + 1):
        assert torch.equal(Kernel.apply(x[:m], packed, None, spec), alone[:m])


@pytest.mark.parametrize("exponent", [-120, -40, -31, 0, 60, 100])
def test_every_magnitude_of_x(kernel_level, exponent):
    weight = lossless_weight(BASE, 1)
    x = lossless_inputs(1, BASE, 1)
    scaled = torch.ldexp(x.float(), torch.tensor(exponent)).to(x.dtype)
    expected = torch.ldexp(apply(x, weight).float(), torch.tensor(exponent)).to(x.dtype)
    assert torch.equal(apply(scaled, weight), expected)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinity_and_nan_in_x(kernel_level, value):
    weight = random_weight(BASE, 1)
    x = inputs(2, BASE, 1)
    x[1, 3] = value
    found, expected = apply(x, weight), reference64(x, weight)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found[1].isnan(), expected[1].isnan())
    check(apply(x[:1], weight), x[:1], weight)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 13])
def test_nan_codes_of_fp8(kernel_level, m):
    spec = LinearSpec(70, 128, types.float8_e4m3fn, (1, 128), scale_dtype=torch.float32)
    weight = random_weight(spec, 1)
    weight.codes.view(torch.uint8)[3, 7], weight.codes.view(torch.uint8)[69, 127] = 0x7F, 0xFF
    x = inputs(m, spec, m)
    found = apply(x, weight)
    nan_rows = torch.zeros(70, dtype=torch.bool)
    nan_rows[[3, 69]] = True
    assert torch.equal(found.isnan(), nan_rows.expand(m, 70))
    weight.codes.view(torch.uint8)[3, 7], weight.codes.view(torch.uint8)[69, 127] = 0, 0
    assert torch.equal(found[:, ~nan_rows], apply(x, weight)[:, ~nan_rows])


@pytest.mark.parametrize("kind", [types.uint4b8, types.int8], ids=str)
@pytest.mark.parametrize("m", [1, 2, 3, 7, 12, 13, 29])
def test_int8_activations(kernel_level, kind, m):
    """Products of int8 codes are exact: full-range codes of W and x, and ragged sizes."""
    spec = LinearSpec(45, 70, kind, (1, 70), act=ActSpec(types.int8), scale_dtype=torch.float32, act_dtype=torch.float32)
    weight, x = random_weight(spec, m), inputs(m, spec, m)
    check(apply(x, weight), x, weight)
    weight.codes.view(torch.uint8).fill_(0x80 if kind is types.int8 else 0xFF)  # extreme codes, all of one sign
    extreme = torch.ones(m, 70)
    extreme[:, ::2] = -1.0
    check(apply(extreme, weight), extreme, weight)
    check(apply(extreme.abs(), weight), extreme.abs(), weight)


def test_extreme_codes_do_not_saturate(kernel_level):
    for kind in KINDS:
        spec = BASE.replace(weight=kind, act_dtype=torch.float32)
        weight = lossless_weight(spec, 1)
        weight.codes.view(torch.uint8).fill_(0x7F if kind is types.int8 else 0x77 if kind is types.float4_e2m1 else 0xFF)
        for sign in (1, -1):
            x = torch.full((1, spec.k), sign * 127.0)
            check_exact(apply(x, weight), x, weight)
