"""Scalar types, specs, activation schemes and verdicts."""

import math

import pytest
import torch

from bitline import ActSpec, LinearSpec, Verdict, types
from bitline.testing import random_spec

SPEC = LinearSpec(256, 512, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)


def test_integer_types_have_their_implicit_zero_point():
    assert types.uint4b8.values() == tuple(range(-8, 8))
    assert types.uint8b128.values()[0] == -128 and types.uint8b128.values()[255] == 127
    assert types.uint3.values() == tuple(range(8))
    assert types.int4.values() == (0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)
    assert types.int8.values()[0x80] == -128 and types.int8.values()[0xFF] == -1
    for bits in range(2, 9):
        symmetric, plain = types.unsigned(bits, symmetric=True), types.unsigned(bits, symmetric=False)
        assert symmetric.values()[1 << (bits - 1)] == 0 and symmetric.has_bias()
        assert plain.values()[0] == 0 and plain.max() == (1 << bits) - 1 and not plain.has_bias()
        assert symmetric.size_bits == plain.bits == bits


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_fp8_values_are_torch_s(name):
    expected = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().tolist()
    for found, wanted in zip(types.SCALAR_TYPES[name].values(), expected, strict=True):
        assert found == wanted or (math.isnan(found) and math.isnan(wanted))


def test_minifloats_are_those_of_ocp_mx():
    """OCP MX 1.0, section 5.3.2 (E2M1) and 5.3.1 (FP6): the tables of the standard."""
    assert types.float4_e2m1.values()[:8] == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert types.float4_e2m1.values()[8:] == (0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
    assert math.copysign(1, types.float4_e2m1.values()[8]) == -1
    e2m3, e3m2 = types.float6_e2m3, types.float6_e3m2
    assert (e2m3.max(), e2m3.values()[1], e2m3.values()[8]) == (7.5, 0.125, 1.0)
    assert (e3m2.max(), e3m2.values()[1], e3m2.values()[4]) == (28.0, 0.0625, 0.25)
    assert types.float8_e4m3fn.max() == 448 and types.float8_e5m2.min() == -57344 and types.float8_e4m3fnuz.max() == 240


def test_codebook_types():
    nf2 = types.ScalarType("nf2", 2, "table", table=(-1.0, -0.3, 0.2, 1.0))
    assert nf2.values() == (-1.0, -0.3, 0.2, 1.0) and nf2.max() == 1.0


def test_spec_key_round_trip():
    for seed in range(400):
        spec = random_spec(seed)
        assert LinearSpec.parse(spec.key) == spec
        assert spec.act is None or ActSpec.parse(str(spec.act)) == spec.act


def test_every_field_is_in_the_key():
    changes = {
        "n": 128, "k": 384, "weight": types.uint4, "block": (1, 64), "block_offset": (0, 3), "scale_dtype": torch.float16,
        "zero": "int", "scale2_block": (256, 512), "act_order": True, "ragged": True,
        "act": ActSpec(types.int8), "act_dtype": torch.float32,
        "bias": True, "input_multiplier": True,
    }  # fmt: skip
    keys = {SPEC.replace(**{name: value}).key for name, value in changes.items()} | {SPEC.key}
    assert len(keys) == len(changes) + 1
    assert set(changes) == {f for f in vars(SPEC) if f != "key"}


@pytest.mark.parametrize(
    ("spec", "grid", "group"),
    [
        (SPEC, (256, 4), 128),
        (SPEC.replace(k=500), (256, 4), 128),
        (SPEC.replace(k=500, block_offset=(0, 100)), (256, 5), 128),
        (SPEC.replace(block=(1, 512)), (256, 1), -1),
        (SPEC.replace(block=(1, 9999)), (256, 1), -1),
        (SPEC.replace(block=(256, 512)), (1, 1), -1),
        (SPEC.replace(block=(128, 128), n=257), (3, 4), 128),
        (SPEC.replace(block=(128, 128), n=257, block_offset=(127, 0)), (3, 4), 128),
        (SPEC.replace(block=(128, 128), n=258, block_offset=(127, 0)), (4, 4), 128),
    ],
)
def test_grid(spec, grid, group):
    assert spec.grid == grid and spec.group_size == group and spec.scale_count() == grid[0] * grid[1]


def test_a_shard_inside_one_block_is_normalized():
    inside = SPEC.replace(k=20, block_offset=(0, 100))
    assert inside == SPEC.replace(k=20, block=(1, 20)) and inside.block_offset == (0, 0)


@pytest.mark.parametrize("change", [{"n": 0}, {"k": 0}, {"block": (0, 8)}, {"block_offset": (0, 128)}, {"block_offset": (-1, 0)}])
def test_impossible_specs(change):
    with pytest.raises(ValueError, match=r"block|needs"):
        SPEC.replace(**change)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "uint4b8 g128"),
        ({"block": (1, 512)}, "uint4b8 channel"),
        ({"weight": types.uint4, "zero": "int"}, "uint4+zero g128"),
        ({"weight": types.uint4, "zero": "float", "block": (1, 32)}, "uint4+offset g32"),
        ({"act_order": True}, "uint4b8 g128 act-order"),
        ({"weight": types.float8_e4m3fn, "block": (256, 512)}, "float8_e4m3fn tensor"),
        ({"weight": types.float8_e4m3fn, "block": (128, 128)}, "float8_e4m3fn 128x128"),
        ({"act": ActSpec(types.int8)}, "uint4b8 g128 a:int8-dynamic-token"),
    ],
)
def test_scheme_names(change, name):
    assert SPEC.replace(**change).scheme == name


def test_bytes():
    assert SPEC.codes_bytes() == 256 * 256 and SPEC.weight_bytes() == 256 * 256 + 2 * 256 * 4
    odd = SPEC.replace(weight=types.uint3b4, k=501, block=(1, 501))
    assert odd.codes_bytes() == 256 * 188
    assert SPEC.replace(weight=types.uint4, zero="int").weight_bytes() == SPEC.weight_bytes() + 256 * 4 // 2
    assert SPEC.replace(act_order=True).weight_bytes() == SPEC.weight_bytes() + 4 * 512


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (ActSpec(types.int8), "int8-dynamic-token"),
        (ActSpec(types.int8, False, "tensor", symmetric=False), "int8-static-tensor-asym"),
        (ActSpec(types.float8_e4m3fn, granularity="group", group_size=32, scale="e8m0"), "float8_e4m3fn-dynamic-group32-e8m0"),
        (ActSpec(types.float8_e4m3fn, limit=1200.0), "float8_e4m3fn-dynamic-token-limit1200.0"),
        (ActSpec(types.int8, symmetric=False, limit=1e-05), "int8-dynamic-token-asym-limit1e-05"),
    ],
)
def test_activation_schemes_as_text(act, text):
    assert str(act) == text and ActSpec.parse(text) == act


def test_verdicts():
    refusal = types.no("too wide", "with K <= 4096")
    ok, reason = refusal
    assert not refusal and (ok, reason) == (False, "too wide") and refusal.fix == "with K <= 4096"
    assert types.YES and tuple(types.YES) == (True, "") and Verdict(True) == types.YES


def test_specs_are_values():
    assert hash(SPEC) == hash(SPEC.replace()) and SPEC.replace(n=1) != SPEC
    with pytest.raises(AttributeError):
        SPEC.n = 3
