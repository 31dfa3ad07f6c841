"""The canonical weight: validation and dequantization. Sharding is in test_sharding."""

import dataclasses

import pytest
import torch

from bitline import ActSpec, LinearSpec, QuantizedWeight, WeightError, quantize, types
from bitline.testing import random_spec, random_weight


def slow_dequantize(w):
    """LinearSpec's dequantization formula, one element at a time, in Python floats."""
    s, out = w.spec, torch.zeros(w.shape, dtype=torch.float64)
    (bn, bk), (on, ok), values = s.block, s.block_offset, s.weight.values()
    lists = {name: t.double().tolist() for name, t in w.tensors().items() if name != "codes"}
    for i, row in enumerate(w.codes.tolist()):
        stream = int.from_bytes(bytes(row), "little")
        for j in range(s.k):
            code = stream >> (j * s.weight.bits) & ((1 << s.weight.bits) - 1)
            r = (i + on) // bn
            c = int(lists["group_index"][j]) if w.group_index is not None else (j + ok) // bk
            scale = lists["scale"][r][c]
            offset = lists["offset"][r][c] if w.offset is not None else 0.0
            if w.scale2 is not None:
                cn, ck = s.scale2_block
                scale *= lists["scale2"][i // cn][j // ck]
                offset *= lists["offset2"][i // cn][j // ck] if w.offset2 is not None else 1.0
            zero = lists["zero"][r][c] if w.zero is not None else 0.0
            column = int(lists["perm"][j]) if w.perm is not None else j
            out[i, column] = scale * (values[code] - zero) + offset
    return out


def small_spec(seed):
    spec = random_spec(seed)
    n, k = min(spec.n, 12), min(spec.k, 40)
    return spec.replace(n=n, k=k, block_offset=(0, 0), scale2_block=(n, k) if spec.scale2_block else None)


@pytest.mark.parametrize("part", range(5))
def test_dequantize_follows_the_formula(part):
    for seed in range(part, 250, 5):
        for spec in (small_spec(seed), random_spec(seed)):
            if spec.n * spec.k > 1200:
                continue
            w = random_weight(spec, seed)
            expected = slow_dequantize(w)
            found = w.dequantize()
            assert found.dtype == torch.float32
            # Exact up to float32: one rounding of each product, and of the sum with an offset.
            assert torch.allclose(found.double(), expected, rtol=3e-7, atol=1e-8 if spec.zero != "float" else 2e-7), spec.key


@pytest.mark.parametrize("spec", [
    LinearSpec(4, 24, types.ScalarType("nf4ish", 4, "table", table=tuple(i / 8 - 1 for i in range(16))), (1, 8)),
    LinearSpec(6, 64, types.uint4, (1, 32), zero="float", scale_dtype=torch.uint8, scale2_block=(1, 64)),
    LinearSpec(3, 50, types.float6_e2m3, (2, 20), (1, 7)),
])  # fmt: skip
def test_dequantize_of_rare_schemes(spec):
    w = random_weight(spec, 1)
    assert torch.allclose(w.dequantize().double(), slow_dequantize(w), rtol=3e-7, atol=2e-7)


def test_dequantize_rounds_once_and_row_by_row_gives_the_same(monkeypatch):
    for seed in range(60):
        w = random_weight(random_spec(seed), seed)
        whole = w.dequantize()
        assert torch.equal(w.dequantize(torch.bfloat16), whole.bfloat16())
        index = torch.randint(w.spec.n, (5,), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(w.dequantize_rows(index), whole[index])
        monkeypatch.setattr("bitline.bitstream.ROW_CHUNK_BYTES", 3 * w.spec.k)
        assert torch.equal(w.dequantize(), whole)
        monkeypatch.undo()


def test_accessors():
    w = quantize(torch.randn(5, 40), "W3A16", group_size=16)
    assert w.unpacked().shape == (5, 40) and int(w.unpacked().max()) < 8
    assert torch.equal(w.scales(), w.scale) and w.offsets() is None
    assert w.column_groups().tolist() == [0] * 16 + [1] * 16 + [2] * 8
    nv = quantize(torch.randn(4, 32), "NVFP4A16")
    assert torch.equal(nv.scales(), (nv.scale.double() * nv.scale2).float())
    assert set(nv.tensors()) == {"codes", "scale", "scale2"} and nv.nbytes() == 4 * 16 + 4 * 2 + 8


# ---- validation --------------------------------------------------------------------------------------------------------

PLAIN = random_weight(LinearSpec(6, 20, types.uint4, (1, 8), zero="int", bias=True, act_order=True, ragged=True), 1)
OFFSET = random_weight(LinearSpec(6, 64, types.uint4, (1, 32), zero="float", scale_dtype=torch.uint8, scale2_block=(1, 64)), 1)
STATIC = random_weight(LinearSpec(6, 20, types.float8_e4m3fn, (6, 20), act=ActSpec(types.float8_e4m3fn, False, "tensor")), 1)


def cropped(t):
    return t[..., :-1]


def spoiled(t, value):
    return t.clone().index_fill_(0, torch.tensor(1), value)


CONTRADICTIONS = [
    (PLAIN, "codes", cropped), (PLAIN, "codes", torch.Tensor.int), (PLAIN, "codes", lambda t: t[:-1]),
    (PLAIN, "scale", lambda t: t[:-1]), (PLAIN, "scale", torch.Tensor.half), (PLAIN, "scale", lambda t: spoiled(t, float("nan"))),
    (PLAIN, "scale", lambda t: spoiled(t, float("inf"))), (PLAIN, "scale", lambda t: t.flatten()),
    (PLAIN, "zero", None), (PLAIN, "zero", cropped), (PLAIN, "zero", torch.Tensor.int), (PLAIN, "zero", lambda t: spoiled(t, 16)),
    (PLAIN, "perm", None), (PLAIN, "perm", torch.Tensor.long), (PLAIN, "perm", lambda t: spoiled(t, 20)),
    (PLAIN, "perm", lambda t: spoiled(t, int(t[0]))), (PLAIN, "perm", lambda t: spoiled(t, -1)),
    (PLAIN, "group_index", None), (PLAIN, "group_index", lambda t: t.flip(0)), (PLAIN, "group_index", lambda t: t + 9),
    (PLAIN, "group_index", lambda t: t - 9), (PLAIN, "group_index", cropped), (PLAIN, "group_index", torch.Tensor.long),
    (PLAIN, "bias", None), (PLAIN, "bias", cropped), (PLAIN, "bias", lambda t: spoiled(t, float("nan"))),
    (PLAIN, "offset", lambda t: torch.zeros(6, 4)), (PLAIN, "scale2", lambda t: torch.ones(1, 1)),
    (PLAIN, "offset2", lambda t: torch.ones(1, 1)),
    (OFFSET, "offset", None), (OFFSET, "offset", cropped), (OFFSET, "scale2", None), (OFFSET, "scale2", cropped),
    (OFFSET, "scale2", lambda t: spoiled(t, float("inf"))), (OFFSET, "offset2", cropped),
    (OFFSET, "offset2", lambda t: spoiled(t, float("nan"))), (OFFSET, "zero", lambda t: torch.zeros(6, 2, dtype=torch.uint8)),
    (OFFSET, "perm", lambda t: torch.arange(64).int()), (OFFSET, "group_index", lambda t: torch.zeros(64).int()),
    (OFFSET, "bias", lambda t: torch.zeros(6)),
    (STATIC, "input_scale", None), (STATIC, "input_scale", lambda t: t * float("nan")),
    (STATIC, "input_scale", lambda t: t.expand(3)),
    (STATIC, "input_scale", lambda t: -t), (STATIC, "input_scale", lambda t: t * 0),
    (STATIC, "input_zero", lambda t: torch.zeros(3)),
]  # fmt: skip


@pytest.mark.parametrize(("weight", "name", "change"), CONTRADICTIONS)
def test_a_contradiction_names_the_field(weight, name, change):
    value = None if change is None else change(getattr(weight, name))
    with pytest.raises(WeightError) as caught:
        dataclasses.replace(weight, **{name: value})
    assert name in caught.value.what and caught.value.found and caught.value.expected


def test_offset2_needs_a_second_level_of_scales():
    spec = OFFSET.spec.replace(scale2_block=None)
    with pytest.raises(WeightError, match=r"no scale2_block.*To fix it: set scale2_block") as caught:
        QuantizedWeight(spec, OFFSET.codes, OFFSET.scale, offset=OFFSET.offset, offset2=OFFSET.offset2)
    assert caught.value.field == "offset2" and caught.value.found == "present"


def test_an_error_names_the_tensor_of_the_file():
    with pytest.raises(WeightError, match=r"tensor layers\.0\.w"):
        dataclasses.replace(PLAIN, origin="layers.0.w", bias=None)


def test_meta_weights_are_checked_for_structure_only():
    meta = PLAIN.to("meta")
    assert meta.device.type == "meta" and meta.shape == (6, 20)
    with pytest.raises(WeightError, match="codes"):
        dataclasses.replace(meta, codes=meta.codes[:, :-1])


def test_modified_copies():
    assert PLAIN.to("cpu") is PLAIN
    assert PLAIN.with_bias(None).spec.bias is False and PLAIN.with_bias(torch.ones(6)).bias.tolist() == [1.0] * 6
    assert PLAIN.with_act_dtype(torch.float16).spec.act_dtype == torch.float16
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.codes = None
    assert isinstance(PLAIN, QuantizedWeight) and dataclasses.replace(PLAIN) != PLAIN
