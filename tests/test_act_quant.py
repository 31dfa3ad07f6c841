"""Activation quantization against compressed-tensors' output and against slow references in Python."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bitline import ActSpec, InputError, quantize, types
from bitline.act_quant import fake_quantize, mx_exponent, quantize_input, round_to

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = json.loads((FIXTURES / "quantize_ct.json").read_text())["inputs"]
RECORDED = load_file(FIXTURES / "quantize_ct.safetensors")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("name", NAMES)
def test_same_values_as_compressed_tensors(name):
    x = RECORDED["input.fp32"]
    qw = quantize(torch.randn(2, 256), name, input_scale=0.25 if name == "FP8" else None)
    found = fake_quantize(x, qw.spec.act, qw.input_scale, qw.input_zero)
    assert found.dtype == torch.float32 and torch.equal(found, RECORDED[f"input.{name}"])


def token_int8(row, symmetric):
    """compressed-tensors' calculate_qparams in Python floats, one token at a time."""
    if symmetric:
        scale, zero = max(abs(v) for v in row) / 127.5, 0
    else:
        low, high = min(0.0, *row), max(0.0, *row)
        scale = (high - low) / 255
        zero = max(-128, min(127, round(-128 - low / scale)))
    return [(max(-128, min(127, round(v / scale + zero))) - zero) * scale for v in row]


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_per_token(symmetric):
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(4))
    found = fake_quantize(x, ActSpec(types.int8, symmetric=symmetric))
    expected = torch.tensor([token_int8(row, symmetric) for row in x.tolist()])
    error = (found - expected).abs() / (x.abs().amax(1, keepdim=True) / 127.5)
    at_amax = x.abs() == x.abs().amax(1, keepdim=True)  # amax is 127.5 steps: float32 may round it either way
    assert bool((error[~at_amax] < 1e-3).all()) and bool((error[at_amax] < 1.001).all())


def test_an_asymmetric_zero_point_is_rounded():
    _, scale, zero = quantize_input(torch.tensor([[-0.99, 2.0], [1.0, 2.0], [-2.0, -1.0]]), ActSpec(types.int8, symmetric=False))
    assert zero.flatten().tolist() == [-44, -128, 127]  # -128 + 0.99 / (2.99 / 255) is -43.57; 0 is always in the range
    assert torch.allclose(scale.flatten() * 255, torch.tensor([2.99, 2.0, 2.0]))


def test_fake_quantize_is_dequantized_quantize_input():
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(5)).bfloat16()
    for act in (
        ActSpec(types.int8), ActSpec(types.int8, symmetric=False), ActSpec(types.int8, granularity="tensor"), ActSpec(types.int4),
        ActSpec(types.float8_e4m3fn), ActSpec(types.float8_e5m2), ActSpec(types.float8_e4m3fn, granularity="tensor"),
    ):  # fmt: skip
        codes, scale, zero = quantize_input(x, act)
        assert codes.dtype == {"int": torch.int8, "float": codes.dtype}[act.dtype.kind] and codes.dtype.itemsize == 1
        assert scale.shape == ((4, 1) if act.granularity == "token" else (1, 1)) and scale.dtype == torch.float32
        assert (zero is None) == act.symmetric
        if act.dtype.name == "int4":
            assert int(codes.min()) >= -8 and int(codes.max()) <= 7
        value = (codes.float() - (0 if zero is None else zero)) * scale
        assert torch.equal(value, fake_quantize(x, act)), act
        assert float((value - x.float()).abs().max()) < float(scale.max()) * (17 if act.dtype.kind == "float" else 1.01) or (
            act.dtype.name == "float8_e5m2"
        )


def test_static_scales():
    x = torch.tensor([[0.1, -3.0, 1000.0, -1000.0]])
    act = ActSpec(types.int8, dynamic=False, granularity="tensor", symmetric=False)
    codes, scale, zero = quantize_input(x, act, torch.tensor([0.5]), torch.tensor([3], dtype=torch.int8))
    assert codes.tolist() == [[3, -3, 127, -128]] and scale.tolist() == [[0.5]] and zero.tolist() == [[3]]
    symmetric = ActSpec(types.int8, dynamic=False, granularity="tensor")
    assert quantize_input(x, symmetric, torch.tensor(0.5), torch.tensor(3))[0].tolist() == [[0, -6, 127, -128]]
    fp8 = ActSpec(types.float8_e4m3fn, dynamic=False, granularity="tensor")
    assert fake_quantize(x, fp8, torch.tensor(2.0)).tolist()[0][2:] == [896.0, -896.0]
    with pytest.raises(InputError, match="scale"):
        quantize_input(x, fp8)


@pytest.mark.parametrize("granularity", ["tensor", "token", "group"])
@pytest.mark.parametrize("kind", [types.int8, types.float8_e4m3fn])
def test_zeros_huge_values_and_an_empty_batch(granularity, kind):
    act = ActSpec(kind, granularity=granularity, group_size=8 if granularity == "group" else 0)
    assert not fake_quantize(torch.zeros(3, 16), act).any()
    huge = fake_quantize(torch.full((2, 16), torch.finfo(torch.bfloat16).max).bfloat16(), act)
    assert bool(torch.isfinite(huge).all()) and float(huge.min()) > 0.98 * torch.finfo(torch.bfloat16).max
    assert fake_quantize(torch.zeros(0, 16), act).shape == (0, 16)


@pytest.mark.parametrize("scale", ["e8m0", "e4m3"])
@pytest.mark.parametrize("k", [16, 32, 40, 7])
def test_block_scaled_groups(scale, k):
    g = 32 if scale == "e8m0" else 16
    act = ActSpec(types.float4_e2m1, granularity="group", group_size=g, scale=scale)
    assert fake_quantize(torch.zeros(0, k), act).shape == (0, k)
    assert not fake_quantize(torch.zeros(2, k), act).any()
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(6))
    found = fake_quantize(x, act)
    assert found.shape == (3, k)
    for row, values in zip(x.tolist(), found.tolist(), strict=True):
        for start in range(0, k, g):
            group, found_group = row[start : start + g], values[start : start + g]
            amax = max(abs(v) for v in group)
            if scale == "e8m0":
                exponent = math.floor(math.log2(amax))
                step = 2.0 ** (exponent - 2 + (amax / 2.0**exponent >= 1.75))
            else:
                step = float(torch.tensor(amax / 6).to(torch.float8_e4m3fn))
            assert all(min(abs(abs(r) / step - e) for e in E2M1) < 1e-5 for r in found_group)
            nearest = [min((abs(abs(p) / step - e), e) for e in E2M1)[0] for p in group]
            assert all(abs(p - r) / step <= best + 1e-5 for p, r, best in zip(group, found_group, nearest, strict=True))


@pytest.mark.parametrize("dtype", [types.float8_e4m3fn, types.int8])
def test_a_limit_bounds_dynamic_scales_and_larger_values_saturate(dtype):
    x = torch.tensor([[4.0, -1.0, 0.5], [0.25, 1.0, -2.0]])
    assert torch.equal(fake_quantize(x, ActSpec(dtype, limit=2.0)), fake_quantize(x.clamp(-2, 2), ActSpec(dtype)))
    assert torch.equal(fake_quantize(x, ActSpec(dtype, limit=4.0)), fake_quantize(x, ActSpec(dtype)))


def test_the_global_input_scale_of_nvfp4():
    """With a global scale of 448 * 6 / amax, block scales use E4M3's range: small groups do not flush to zero."""
    act = ActSpec(types.float4_e2m1, granularity="group", group_size=16, scale="e4m3")
    x = torch.full((1, 16), 2.0**-10)
    assert not fake_quantize(x, act).any()
    assert torch.allclose(fake_quantize(x, act, torch.tensor([2688.0 * 2**10])), x)


def test_the_mx_exponent_rounds_up_from_seven_eighths():
    amax = torch.tensor([1.0, 1.7499, 1.75, 1.99, 2.0, 6.0, 7.0, 2.0**-100])
    assert mx_exponent(amax, 6.0).tolist() == [-2, -2, -1, -1, -1, 0, 1, -102]
    assert mx_exponent(amax, 448.0).tolist() == [-8, -8, -7, -7, -7, -6, -5, -108]


@pytest.mark.parametrize("name", ["float4_e2m1", "float6_e2m3", "float6_e3m2", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_infinity_does_not_become_a_number(name):
    x = torch.tensor([[1.0, -torch.inf, 0.5, 0.0]])
    act = ActSpec(types.SCALAR_TYPES[name], granularity="group", group_size=4, scale="e8m0")
    assert not bool(fake_quantize(x, act)[0, 1].isfinite())


@pytest.mark.parametrize("name", ["float4_e2m1", "float6_e2m3", "float6_e3m2", "float8_e4m3fn", "float8_e5m2"])
def test_round_to_is_nearest_with_ties_to_even(name):
    values = sorted({v for v in types.SCALAR_TYPES[name].values() if math.isfinite(v) and v >= 0})
    between = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    even = [a if i % 2 == 0 else b for i, (a, b) in enumerate(itertools.pairwise(values))]
    assert round_to(torch.tensor(between), name).tolist() == even
    assert round_to(-torch.tensor(between), name).tolist() == [-v for v in even]
    assert round_to(torch.tensor(values), name).tolist() == values
    assert round_to(torch.tensor([1e30, -1e30]), name).tolist() == [values[-1], -values[-1]]
    assert round_to(torch.tensor([values[1] * 0.51, values[1] * 0.49]), name).tolist() == [values[1], 0.0]


def test_errors():
    with pytest.raises(InputError, match="no single scale"):
        quantize_input(torch.zeros(1, 8), ActSpec(types.int8, granularity="group", group_size=4))
    with pytest.raises(InputError, match="float8_e4m3fnuz"):
        round_to(torch.zeros(1), "float8_e4m3fnuz")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_same_bits(name):
    act = quantize(torch.randn(2, 256), name).spec.act
    scale = None if act.dynamic else torch.tensor(0.3)
    for x in (RECORDED["input.fp32"], torch.randn(400, 256, generator=torch.Generator().manual_seed(8))):
        there = fake_quantize(x.cuda(), act, None if scale is None else scale.cuda())
        assert torch.equal(there.cpu(), fake_quantize(x, act, scale))


def test_mxint_is_symmetric_with_a_power_of_two_scale():
    x = torch.tensor([[1.0, 1.9, -1.99, 0.3, 0.0, 0.125, -0.374, 0.376]])
    act = ActSpec(types.int4, True, "group", 8, scale="e8m0")
    assert fake_quantize(x, act).tolist() == [[1.0, 1.75, -1.75, 0.25, 0.0, 0.0, -0.25, 0.5]]  # quarters, at most 7
    assert torch.equal(fake_quantize(x * 64, act), fake_quantize(x, act) * 64)
    assert torch.equal(fake_quantize(torch.zeros(1, 8), act), torch.zeros(1, 8))


def test_e5m3_block_scales_have_no_global_scale():
    x = torch.tensor([[6.0 * 1.1, 1.0, 0.5, 0.0]])
    scale = 1.125  # the nearest of 1.0, 1.125, 1.25, …
    act = ActSpec(types.float4_e2m1, True, "group", 4, scale="e5m3")
    assert fake_quantize(x, act).tolist() == [[6.0 * scale, 1.0 * scale, 0.5 * scale, 0.0]]
    assert ActSpec.parse(str(act)) == act
