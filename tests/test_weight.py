"""The canonical weight: its checks, what it stands for, and how it is cut."""

import dataclasses

import pytest
import torch

from bitline import ActSpec, LinearSpec, QuantizedWeight, WeightError, quantize, types
from bitline.testing import random_spec, random_weight

SEEDS = range(250)


def slow_dequantize(w):
    """The definition, one element at a time, in Python's doubles: LinearSpec's docstring read literally."""
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
def test_dequantize_is_the_definition(part):
    for seed in range(part, 250, 5):
        for spec in (small_spec(seed), random_spec(seed)):
            if spec.n * spec.k > 1200:
                continue
            w = random_weight(spec, seed)
            expected = slow_dequantize(w)
            found = w.dequantize()
            assert found.dtype == torch.float32
            # Exact but for float32: one rounding of each product and of the sum with an offset.
            assert torch.allclose(found.double(), expected, rtol=3e-7, atol=1e-8 if spec.zero != "float" else 2e-7), spec.key


@pytest.mark.parametrize("spec", [
    LinearSpec(4, 24, types.ScalarType("nf4ish", 4, "table", table=tuple(i / 8 - 1 for i in range(16))), (1, 8)),
    LinearSpec(6, 64, types.uint4, (1, 32), zero="float", scale_dtype=torch.uint8, scale2_block=(1, 64)),
    LinearSpec(3, 50, types.float6_e2m3, (2, 20), (1, 7)),
])  # fmt: skip
def test_dequantize_of_rarer_kinds(spec):
    w = random_weight(spec, 1)
    assert torch.allclose(w.dequantize().double(), slow_dequantize(w), rtol=3e-7, atol=2e-7)


def test_dequantize_rounds_once_and_works_by_rows(monkeypatch):
    for seed in range(60):
        w = random_weight(random_spec(seed), seed)
        whole = w.dequantize()
        assert torch.equal(w.dequantize(torch.bfloat16), whole.bfloat16())
        index = torch.randint(w.spec.n, (5,), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(w.dequantize_rows(index), whole[index])
        monkeypatch.setattr("bitline.bits.ROW_CHUNK_BYTES", 3 * w.spec.k)
        assert torch.equal(w.dequantize(), whole)
        monkeypatch.undo()


def test_codes_and_scales_can_be_read():
    w = quantize(torch.randn(5, 40), "W3A16", group_size=16)
    assert w.unpacked().shape == (5, 40) and int(w.unpacked().max()) < 8
    assert torch.equal(w.scales(), w.scale) and w.offsets() is None
    assert w.column_groups().tolist() == [0] * 16 + [1] * 16 + [2] * 8
    nv = quantize(torch.randn(4, 32), "NVFP4A16")
    assert torch.equal(nv.scales(), (nv.scale.double() * nv.scale2).float())
    assert set(nv.tensors()) == {"codes", "scale", "scale2"} and nv.nbytes() == 4 * 16 + 4 * 2 + 8


# ---- cutting -----------------------------------------------------------------------------------------------------------


def bits_equal(a, b):
    return a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_put_together_are_the_whole(dim):
    for seed in SEEDS:
        w = random_weight(random_spec(seed), seed)
        whole = w.dequantize()
        for world in (1, 2, 3, 4, 8):
            if world > w.shape[dim]:
                continue
            parts = [w.shard(dim, rank, world) for rank in range(world)]
            assert bits_equal(torch.cat([p.dequantize() for p in parts], dim), whole), (w.spec.key, dim, world)
            if w.bias is not None:
                shared = torch.cat([p.bias for p in parts]) if dim == 0 else parts[0].bias
                assert torch.equal(shared, w.bias)
                assert dim == 0 or all(p.bias is None and not p.spec.bias for p in parts[1:])


@pytest.mark.parametrize("dim", [0, 1])
def test_any_boundary_and_cutting_twice(dim):
    g = torch.Generator().manual_seed(9)
    for seed in SEEDS:
        w = random_weight(random_spec(seed), seed)
        whole = w.dequantize()
        size = w.shape[dim]
        start = int(torch.randint(size, (1,), generator=g))
        stop = int(torch.randint(start + 1, size + 1, (1,), generator=g))
        part = w.narrow(dim, start, stop)
        assert bits_equal(part.dequantize(), whole.narrow(dim, start, stop - start)), (w.spec.key, start, stop)
        inner = int(torch.randint(stop - start, (1,), generator=g))
        twice = part.narrow(dim, inner, stop - start)
        assert bits_equal(twice.dequantize(), whole.narrow(dim, start + inner, stop - start - inner)), w.spec.key
        other = 1 - dim
        crossed = part.shard(other, 0, min(2, w.shape[other]))
        assert bits_equal(crossed.dequantize(), part.dequantize().narrow(other, 0, crossed.shape[other])), w.spec.key


def test_products_of_k_shards_add_up():
    for seed in range(0, 60, 2):
        w = random_weight(random_spec(seed), seed)
        if w.spec.k < 3:
            continue
        x = torch.randn(4, w.spec.k, dtype=torch.float64)
        total, start = torch.zeros(4, w.spec.n, dtype=torch.float64), 0
        for rank in range(3):
            part = w.shard(1, rank, 3)
            total += x[:, start : start + part.spec.k] @ part.dequantize().double().T
            start += part.spec.k
        assert start == w.spec.k and torch.allclose(total, x @ w.dequantize().double().T)


def test_cutting_changes_nothing_and_copies_little():
    for seed in range(40):
        w = random_weight(random_spec(seed), seed)
        before = {name: t.clone() for name, t in w.tensors().items()}
        for dim in (0, 1):
            if w.shape[dim] > 1:
                w.shard(dim, 1, 2)
        assert all(torch.equal(t.view(torch.uint8), before[name].view(torch.uint8)) for name, t in w.tensors().items())
    w = quantize(torch.randn(8, 256), "W4A16")
    rows, columns = w.shard(0, 1, 2), w.shard(1, 1, 2)
    assert rows.codes.data_ptr() == w.codes[4].data_ptr() and columns.codes.data_ptr() == w.codes[:, 64:].data_ptr()


def test_a_straddled_group_keeps_its_scale_on_both_sides():
    w = quantize(torch.randn(4, 256), "W4A16")
    left, right = w.narrow(1, 0, 192), w.narrow(1, 192, 256)
    assert left.scale.shape == (4, 2) and right.scale.shape == (4, 1)
    assert torch.equal(left.scale[:, 1], right.scale[:, 0])
    later = w.narrow(1, 100, 256)
    assert later.spec.block_offset == (0, 100) and later.spec.grid == (4, 2)
    block = quantize(torch.randn(300, 256), "FP8_BLOCK").narrow(0, 100, 300)
    assert block.spec.block_offset == (100, 0) and block.scale.shape == (3, 2)


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0), (0, 9)])
def test_impossible_shards(rank, world):
    w = quantize(torch.randn(8, 32), "W4A16")
    with pytest.raises(WeightError, match="shard"):
        w.shard(0, rank, world)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 2), (-1, 4), (0, 33)])
def test_impossible_cuts(start, stop):
    with pytest.raises(WeightError, match="cannot cut"):
        quantize(torch.randn(8, 32), "W4A16").narrow(1, start, stop)


def test_take_rows():
    w = quantize(torch.randn(8, 32), "NVFP4A16", bias=torch.arange(8.0))
    index = torch.tensor([3, 3, 0])
    taken = w.take_rows(index)
    assert torch.equal(taken.dequantize(), w.dequantize()[index]) and taken.bias.tolist() == [3.0, 3.0, 0.0]
    with pytest.raises(WeightError, match="share scales"):
        quantize(torch.randn(200, 32), "FP8_BLOCK").take_rows(index)
    with pytest.raises(WeightError, match="out of range"):
        w.take_rows(torch.tensor([8]))


# ---- validation --------------------------------------------------------------------------------------------------------

PLAIN = random_weight(LinearSpec(6, 20, types.uint4, (1, 8), zero="int", bias=True, act_order=True, ragged=True), 1)
OFFSET = random_weight(LinearSpec(6, 64, types.uint4, (1, 32), zero="float", scale_dtype=torch.uint8, scale2_block=(1, 64)), 1)
STATIC = random_weight(LinearSpec(6, 20, types.float8_e4m3fn, (6, 20), act=ActSpec(types.float8_e4m3fn, False, "tensor")), 1)


def cut(t):
    return t[..., :-1]


def spoiled(t, value):
    return t.clone().index_fill_(0, torch.tensor(1), value)


CONTRADICTIONS = [
    (PLAIN, "codes", cut), (PLAIN, "codes", torch.Tensor.int), (PLAIN, "codes", lambda t: t[:-1]),
    (PLAIN, "scale", lambda t: t[:-1]), (PLAIN, "scale", torch.Tensor.half), (PLAIN, "scale", lambda t: spoiled(t, float("nan"))),
    (PLAIN, "scale", lambda t: spoiled(t, float("inf"))), (PLAIN, "scale", lambda t: t.flatten()),
    (PLAIN, "zero", None), (PLAIN, "zero", cut), (PLAIN, "zero", torch.Tensor.int), (PLAIN, "zero", lambda t: spoiled(t, 16)),
    (PLAIN, "perm", None), (PLAIN, "perm", torch.Tensor.long), (PLAIN, "perm", lambda t: spoiled(t, 20)),
    (PLAIN, "perm", lambda t: spoiled(t, int(t[0]))), (PLAIN, "perm", lambda t: spoiled(t, -1)),
    (PLAIN, "group_index", None), (PLAIN, "group_index", lambda t: t.flip(0)), (PLAIN, "group_index", lambda t: t + 9),
    (PLAIN, "group_index", lambda t: t - 9), (PLAIN, "group_index", cut), (PLAIN, "group_index", torch.Tensor.long),
    (PLAIN, "bias", None), (PLAIN, "bias", cut), (PLAIN, "bias", lambda t: spoiled(t, float("nan"))),
    (PLAIN, "offset", lambda t: torch.zeros(6, 4)), (PLAIN, "scale2", lambda t: torch.ones(1, 1)),
    (PLAIN, "offset2", lambda t: torch.ones(1, 1)),
    (OFFSET, "offset", None), (OFFSET, "offset", cut), (OFFSET, "scale2", None), (OFFSET, "scale2", cut),
    (OFFSET, "scale2", lambda t: spoiled(t, float("inf"))), (OFFSET, "offset2", cut),
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


def test_an_error_names_the_tensor_of_the_file():
    with pytest.raises(WeightError, match=r"tensor layers\.0\.w"):
        dataclasses.replace(PLAIN, origin="layers.0.w", bias=None)


def test_meta_weights_are_checked_for_structure_only():
    meta = PLAIN.to("meta")
    assert meta.device.type == "meta" and meta.shape == (6, 20)
    with pytest.raises(WeightError, match="codes"):
        dataclasses.replace(meta, codes=meta.codes[:, :-1])


def test_small_copies():
    assert PLAIN.to("cpu") is PLAIN
    assert PLAIN.with_bias(None).spec.bias is False and PLAIN.with_bias(torch.ones(6)).bias.tolist() == [1.0] * 6
    assert PLAIN.with_act_dtype(torch.float16).spec.act_dtype == torch.float16
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.codes = None
    assert isinstance(PLAIN, QuantizedWeight) and dataclasses.replace(PLAIN) != PLAIN
