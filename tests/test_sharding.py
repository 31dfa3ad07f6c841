"""Tensor parallelism: the shards of every scheme, at any boundary of both dimensions, concatenate to the whole bit for bit."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

import bitline
from bitline import ActSpec, LinearSpec, QuantLinear, WeightError, quantize, types
from bitline.formats.gguf import blocks
from bitline.testing import check, check_exact, lossless_inputs, lossless_weight, random_spec, random_weight
from thinning import thinned

CHECKPOINTS = sorted(p.name for p in (Path(__file__).parent / "fixtures" / "checkpoints").iterdir() if p.is_dir())
WORLDS = (1, 2, 3, 4, 8)


def same_bits(a, b):
    """Bitwise equality, signs of zeros and payloads of NaNs included."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def shards(w, dim, world):
    return [w.shard(dim, rank, world) for rank in range(world)]


def check_shards(w, worlds=WORLDS):
    """All that has to hold for the shards of a weight."""
    whole = w.dequantize()
    for dim, world in itertools.product((0, 1), worlds):
        if world > w.shape[dim]:
            with pytest.raises(WeightError, match="cannot shard"):
                w.shard(dim, 0, world)
            continue
        parts = shards(w, dim, world)
        assert same_bits(torch.cat([p.dequantize() for p in parts], dim), whole), (w.spec.key, dim, world)
        sizes = [p.shape[dim] for p in parts]
        assert max(sizes) - min(sizes) <= 1
        assert all(LinearSpec.parse(p.spec.key) == p.spec for p in parts)
        check_rest(w, parts, dim)
        check_memory(w, parts, dim)


def check_rest(w, parts, dim):
    """Bias, input scales and multipliers of the shards."""
    if w.bias is not None:
        assert torch.equal(torch.cat([p.bias for p in parts]) if dim == 0 else parts[0].bias, w.bias)
        assert dim == 0 or all(p.bias is None and not p.spec.bias for p in parts[1:])
    if w.input_multiplier is not None:
        shared = torch.cat([p.input_multiplier for p in parts]) if dim == 1 else parts[-1].input_multiplier
        assert torch.equal(shared, w.input_multiplier)
    for p in parts:
        assert p.spec.act == w.spec.act and p.input_scale is w.input_scale and p.input_zero is w.input_zero


def check_memory(w, parts, dim):
    """A boundary costs a byte of codes per row and one row or column of scales; scales keep their dtype where they can."""
    boundaries = len(parts) - 1
    assert sum(p.codes.nbytes for p in parts) <= w.codes.nbytes + (boundaries * w.spec.n if dim == 1 else 0)
    permuted = dim == 1 and (w.perm is not None or w.group_index is not None)
    lines = w.scale.shape[1 - dim] * boundaries
    for name in ("scale", "zero", "offset"):
        whole, cells = getattr(w, name), [t for p in parts if (t := getattr(p, name)) is not None]
        if whole is None:
            assert not cells
            continue
        assert len(cells) == len(parts)
        if permuted:  # every rank can have columns of every group
            assert all(t.numel() <= whole.numel() and t.shape[1] <= p.spec.k for t, p in zip(cells, parts, strict=True))
        else:
            assert sum(t.numel() for t in cells) <= whole.numel() + lines
        for t, p in zip(cells, parts, strict=True):
            folded = w.scale2 is not None and p.scale2 is None
            assert t.dtype == (torch.float32 if folded and name != "zero" else whole.dtype)
            assert not folded or permuted or p.spec.block_offset[dim] or p.shape[dim] < w.spec.block[dim]


# ---- weights of the readers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_layer_of_every_checkpoint(name):
    layers = bitline.open_checkpoint(Path(__file__).parent / "fixtures" / "checkpoints" / name).layers()
    kinds = {record.spec: record for record in layers}
    assert kinds
    for record in kinds.values():
        w = record.weight()
        check_shards(w)
        check_shards(w.narrow(0, 1, w.spec.n - 1).narrow(1, 5, w.spec.k - 2), (3,))


@pytest.mark.parametrize("kind", blocks.BLOCKS)
@pytest.mark.parametrize("k", thinned([256, 768], 2))
def test_gguf(kind, k):
    import numpy as np

    from formats.gguf_files import random_blocks

    raw = torch.from_numpy(random_blocks(kind, 5, k, np.random.default_rng(k)))
    w = blocks.to_weight(kind, raw, k)
    check_shards(w)
    whole = w.dequantize()
    for start, stop in ((0, 100), (16, 200), (32, 255), (64, 256), (96, 97), (128, 250), (255, 256), (k - 130, k - 1)):
        part = w.narrow(1, start, stop)
        assert same_bits(part.dequantize(), whole[:, start:stop]), (start, stop)
        assert same_bits(part.narrow(1, 1, stop - start).dequantize(), whole[:, start + 1 : stop]) if stop - start > 1 else True


def test_one_byte_scales_stay_one_byte_where_a_super_block_is_cut():
    """11008 columns are 43 super-blocks of 256: a half of 21.5 must not turn a Q4_K weight's scales into float32."""
    raw = torch.zeros(2, 11008 // 256 * 144, dtype=torch.uint8)
    w = blocks.to_weight("Q4_K", raw, 11008)
    left, right = shards(w, 1, 2)
    assert left.spec.scale2_block == (1, 256) and left.scale2.shape == (2, 22)
    assert right.spec.scale2_block == (1, 128) and right.scale2.shape == (2, 43)
    assert left.scale.dtype == right.scale.dtype == w.scale.dtype and left.scale.dtype.itemsize == 1
    assert left.nbytes() + right.nbytes() < 1.03 * w.nbytes()


# ---- all valid specs ---------------------------------------------------------------------------------------------------

BLOCKS = {"group": (1, 24), "channel": (1, 1 << 20), "block": (4, 16), "tensor": (1 << 20, 1 << 20)}
ORDERS = {
    "in order": {},
    "act-order": {"act_order": True},
    "ragged": {"ragged": True},
    "both": {"act_order": True, "ragged": True},
}
ACTS = (
    None, ActSpec(types.int8), ActSpec(types.int8, False, "tensor", 0, False), ActSpec(types.float8_e4m3fn, False, "tensor"),
    ActSpec(types.float8_e4m3fn, granularity="group", group_size=32, scale="e8m0"),
)  # fmt: skip
SIZES = ((11, 101), (9, 48), (8, 8), (3, 130), (19, 7), (1, 64), (64, 1))


@pytest.mark.parametrize("scalar", thinned(types.SCALAR_TYPES, 2))
def test_every_type_block_order_zero_and_size(scalar):
    scalar = types.SCALAR_TYPES[scalar]
    zeros = ("none", "int", "float") if scalar.kind == "int" and not scalar.signed and not scalar.bias else ("none",)
    cases = itertools.product(BLOCKS.values(), ORDERS.values(), zeros)
    for seed, (block, order, zero) in enumerate(cases):
        n, k = SIZES[seed % len(SIZES)]
        floats = (torch.float16, torch.bfloat16, torch.float32)
        scale_dtype = torch.float8_e8m0fnu if scalar.kind == "float" and seed % 3 == 0 else floats[seed % 3]
        spec = LinearSpec(
            n, k, scalar, (min(block[0], n), min(block[1], k)), scale_dtype=scale_dtype, zero=zero, act=ACTS[seed % 5],
            bias=seed % 2 == 0, **(order if k > 1 else {}),
        )  # fmt: skip
        w = random_weight(spec, seed)
        if seed % 3 == 1:
            w = dataclasses.replace(w, spec=spec.replace(input_multiplier=True), input_multiplier=torch.rand(k) + 0.5)
        check_shards(w)


@pytest.mark.parametrize("part", range(4))
def test_random_specs(part):
    for seed in range(part, 400, 4):
        check_shards(random_weight(random_spec(seed), seed))


@pytest.mark.parametrize("dim", [0, 1])
def test_any_boundary_and_a_shard_of_a_shard(dim):
    g = torch.Generator().manual_seed(9)
    for seed in range(300):
        w = random_weight(random_spec(seed), seed)
        whole, size = w.dequantize(), w.shape[dim]
        start = int(torch.randint(size, (1,), generator=g))
        stop = int(torch.randint(start + 1, size + 1, (1,), generator=g))
        part = w.narrow(dim, start, stop)
        assert same_bits(part.dequantize(), whole.narrow(dim, start, stop - start)), (w.spec.key, start, stop)
        if min(part.shape) > 1:
            check_shards(part, (2, 3) if min(part.shape) > 2 else (2,))


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_boundary_inside_a_byte(bits):
    w = random_weight(LinearSpec(3, 35, types.SCALAR_TYPES[f"uint{bits}"], (1, 8), zero="int"), bits)
    whole = w.dequantize()
    for start, stop in itertools.combinations(range(36), 2):
        part = w.narrow(1, start, stop)
        assert part.codes.shape[1] == -(-(stop - start) * bits // 8)
        assert same_bits(part.dequantize(), whole[:, start:stop]), (start, stop)


@pytest.mark.parametrize("scale2_block", [(12, 96), (1, 64), (4, 48), (2, 16)])
@pytest.mark.parametrize("zero", ["none", "float"])
def test_two_levels_of_scales(scale2_block, zero):
    """Every range of a weight with super-block scales, also inside blocks of either level."""
    spec = LinearSpec(12, 96, types.uint4, (1, 16), scale_dtype=torch.uint8, zero=zero, scale2_block=scale2_block)
    w = random_weight(spec, 3)
    whole = w.dequantize()
    for dim, size in enumerate(w.shape):
        for start, stop in itertools.combinations(range(0, size + 1, 1 if dim == 0 else 4), 2):
            part = w.narrow(dim, start, stop)
            assert same_bits(part.dequantize(), whole.narrow(dim, start, stop - start)), (dim, start, stop)
            assert part.scale2 is not None or start % 16, (dim, start, stop)


def test_super_blocks_consist_of_whole_scale_blocks():
    spec = LinearSpec(8, 64, types.uint4b8, (1, 16), scale_dtype=torch.uint8, scale2_block=(1, 32))
    w = random_weight(spec, 1)
    for wrong in ((1, 24), (1, 8)):
        with pytest.raises(WeightError, match="scale2"):
            dataclasses.replace(w, spec=spec.replace(scale2_block=wrong), scale2=torch.ones(8, -(-64 // wrong[1])))


# ---- act-order ---------------------------------------------------------------------------------------------------------


def test_a_shard_of_whole_groups_is_regular():
    """With any act-order, a shard of one group or of whole groups needs no group index."""
    w = random_weight(LinearSpec(4, 64, types.uint4b8, (1, 64), act_order=True), 2)
    for part in shards(w, 1, 4):
        assert not part.spec.ragged and part.spec.block == (1, 16) and part.scale.shape == (4, 1)
    halves = torch.cat([torch.randperm(32), torch.randperm(32) + 32]).int()
    w = dataclasses.replace(random_weight(LinearSpec(4, 64, types.uint4b8, (1, 8), act_order=True), 2), perm=halves)
    for part in shards(w, 1, 2):
        assert not part.spec.ragged and part.spec.act_order and part.spec.block == (1, 8) and part.scale.shape == (4, 4)


def test_a_shard_keeps_only_the_groups_of_its_columns():
    order = torch.arange(64).view(8, 8).flip(0).reshape(-1).int()  # whole groups in reverse order
    w = random_weight(LinearSpec(4, 64, types.uint4, (1, 8), zero="int", act_order=True), 2)
    w = dataclasses.replace(w, perm=order)
    for part in shards(w, 1, 8):
        assert part.scale.shape == part.zero.shape == (4, 1) and not part.spec.act_order and part.perm is None


# ---- row-parallel GEMMs ------------------------------------------------------------------------------------------------


LOSSLESS = [name for name, t in types.SCALAR_TYPES.items() if {0.0, 1.0} <= set(t.values())]  # others have no lossless weights


@pytest.mark.parametrize("scalar", thinned(types.SCALAR_TYPES, 3))
@pytest.mark.parametrize("order", ORDERS)
def test_partial_sums_of_k_shards_reduce_to_the_exact_output(scalar, order):
    """Integer inputs and one power-of-two scale: in float64 every sum is exact, for every type."""
    spec = LinearSpec(5, 101, types.SCALAR_TYPES[scalar], (1, 24), **ORDERS[order])
    w = random_weight(spec, 1)
    w = dataclasses.replace(w, scale=torch.full_like(w.scale, 0.25))
    x = torch.randint(-4, 5, (3, 101), generator=torch.Generator().manual_seed(1)).double()
    whole = x @ w.dequantize().double().T
    assert bool(whole.any())
    for world in WORLDS:
        parts = shards(w, 1, world)
        columns = x.split([p.spec.k for p in parts], 1)
        total = sum(x_k @ p.dequantize().double().T for p, x_k in zip(parts, columns, strict=True))
        assert same_bits(total + 0, whole + 0), world


@pytest.mark.parametrize("scalar", thinned(LOSSLESS, 4))
def test_quantlinears_of_shards_reduce_to_the_whole_layer(scalar):
    scalar = types.SCALAR_TYPES[scalar]
    for seed, (block, order) in enumerate(itertools.product(BLOCKS.values(), ORDERS.values())):
        n, k = ((11, 101), (9, 48), (3, 130))[seed % 3]
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        spec = LinearSpec(n, k, scalar, (min(block[0], n), min(block[1], k)), act_dtype=dtype, bias=seed % 2 == 0, **order)
        w = lossless_weight(spec, seed)
        x = lossless_inputs(5, spec, seed)
        expected = QuantLinear(w, kernel="ReferenceLinearKernel")(x)
        check_exact(expected, x, w)
        for world in WORLDS:
            parts = shards(w, 1, world)
            slices = x.split([p.spec.k for p in parts], 1)
            total = sum(QuantLinear(p)(x_k.contiguous()).float() for p, x_k in zip(parts, slices, strict=True))
            assert same_bits(total.to(dtype) + 0, expected + 0), (spec.key, world)
            columns = torch.cat([QuantLinear(p)(x) for p in shards(w, 0, min(world, n))], 1)
            assert same_bits(columns + 0, expected + 0), (spec.key, world)


@pytest.mark.parametrize("act", [a for a in ACTS if a is not None and not a.dynamic], ids=str)
def test_k_shards_with_a_static_input_scale_reduce_to_the_whole_layer(act):
    spec = LinearSpec(6, 100, types.int8, (1, 100), act=act, act_dtype=torch.float32, bias=True)
    w = lossless_weight(spec, 1)
    x = lossless_inputs(4, spec, 2)
    expected = QuantLinear(w)(x)
    check_exact(expected, x, w)
    parts = shards(w, 1, 3)
    total = sum(QuantLinear(p)(x_k.contiguous()) for p, x_k in zip(parts, x.split([33, 33, 34], 1), strict=True))
    assert same_bits(total, expected)


def test_an_input_multiplier_is_sharded_with_its_columns():
    spec = LinearSpec(6, 100, types.uint4b8, (1, 20), act_dtype=torch.float32, input_multiplier=True)
    multiplier = 2.0 ** torch.randint(-1, 2, (100,), generator=torch.Generator().manual_seed(1))
    w = dataclasses.replace(lossless_weight(spec.replace(input_multiplier=False), 1), spec=spec, input_multiplier=multiplier)
    x = lossless_inputs(4, spec, 2)
    total = sum(QuantLinear(p)(x_k.contiguous()) for p, x_k in zip(shards(w, 1, 3), x.split([33, 33, 34], 1), strict=True))
    assert same_bits(total, QuantLinear(w)(x))


# ---- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", thinned(CHECKPOINTS, 3))
def test_a_kernel_runs_every_shard_of_a_checkpoint(name):
    record = bitline.open_checkpoint(Path(__file__).parent / "fixtures" / "checkpoints" / name).layers()[0]
    w = record.weight()
    for dim, world in ((0, 3), (1, 3), (1, 8)):
        for rank in (0, world - 1):
            part = w.shard(dim, rank, world)
            layer = QuantLinear(part)
            x = torch.randn(3, part.spec.k, generator=torch.Generator().manual_seed(rank)).to(part.spec.act_dtype)
            check(layer(x), x, part)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "NVFP4A16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_kernel_runs_every_shard_of_a_scheme(scheme, dtype):
    w = quantize(torch.randn(200, 352, generator=torch.Generator().manual_seed(1)), scheme).with_act_dtype(dtype)
    for dim, world in itertools.product((0, 1), WORLDS[1:]):
        for part in shards(w, dim, world):
            x = torch.randn(4, part.spec.k, generator=torch.Generator().manual_seed(world)).to(dtype)
            check(QuantLinear(part)(x), x, part)


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16", "W8A8", "FP8_BLOCK", "MXFP4A16"])
@pytest.mark.parametrize("kernel", ["auto", "ReferenceLinearKernel"])
def test_a_packed_shard_does_not_keep_the_whole_weight_alive(scheme, kernel):
    w = quantize(torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)), scheme)
    for dim in (0, 1):
        part = w.shard(dim, 3, 4)
        tensors = QuantLinear(part, kernel=kernel)._packed
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sum(held.values()) < 1.25 * part.nbytes() < 0.4 * w.nbytes()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_explain_predicts_the_specs_of_the_shards(name):
    """`bitline explain --tp` derives the specs of the shards without data."""
    from bitline.cli.shard_specs import shard_specs

    record = bitline.open_checkpoint(Path(__file__).parent / "fixtures" / "checkpoints" / name).layers()[0]
    w = record.weight()
    for world in (1, 2, 3, 8):
        found = shard_specs(record.spec, world)
        if world == 1:
            assert found == {"": [w.spec]}
            continue
        assert found["N"] == [p.spec for p in shards(w, 0, world)]
        if not w.spec.act_order or w.spec.grid[1] == 1:
            # A bias is rank 0's alone, also where there is no data.
            assert found["K"] == [p.spec for p in shards(w, 1, world)]
        else:
            assert all(p.act_order and p.ragged for p in found["K"])


# ---- views and refusals ------------------------------------------------------------------------------------------------


def test_sharding_leaves_the_weight_unchanged_and_makes_views():
    for seed in range(60):
        w = random_weight(random_spec(seed), seed)
        before = {name: t.clone() for name, t in w.tensors().items()}
        for dim in (0, 1):
            if w.shape[dim] > 1:
                w.shard(dim, 1, 2)
        assert all(same_bits(t, before[name]) for name, t in w.tensors().items())
    w = quantize(torch.randn(8, 256), "W4A16", bias=torch.ones(8))
    for part in (w.shard(0, 1, 2), w.shard(1, 1, 2)):
        for name, t in part.tensors().items():
            assert t.untyped_storage().data_ptr() == getattr(w, name).untyped_storage().data_ptr(), name
    assert w.shard(0, 1, 2).codes.data_ptr() == w.codes[4].data_ptr()
    assert w.shard(1, 1, 2).codes.data_ptr() == w.codes[:, 64:].data_ptr()
    three = quantize(torch.randn(8, 256), "W3A16")
    assert three.narrow(1, 8, 256).codes.data_ptr() == three.codes[:, 3:].data_ptr()
    assert three.narrow(1, 9, 256).codes.is_contiguous()


def test_both_shards_of_an_unaligned_group_have_its_scale():
    w = quantize(torch.randn(4, 256), "W4A16")
    left, right = w.narrow(1, 0, 192), w.narrow(1, 192, 256)
    assert left.scale.shape == (4, 2) and right.scale.shape == (4, 1)
    assert torch.equal(left.scale[:, 1], right.scale[:, 0])
    later = w.narrow(1, 100, 256)
    assert later.spec.block_offset == (0, 100) and later.spec.grid == (4, 2)
    block = quantize(torch.randn(300, 256), "FP8_BLOCK").narrow(0, 100, 300)
    assert block.spec.block_offset == (100, 0) and block.scale.shape == (3, 2)


@pytest.mark.parametrize(
    ("dim", "rank", "world"), [(0, -1, 2), (0, 2, 2), (0, 0, 0), (0, 0, 9), (1, 0, 33), (2, 0, 1), (-1, 0, 1)]
)
def test_impossible_shards(dim, rank, world):
    w = quantize(torch.randn(8, 32), "W4A16")
    with pytest.raises(WeightError, match="cannot"):
        w.shard(dim, rank, world)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 2), (-1, 4), (0, 33)])
def test_impossible_ranges(start, stop):
    with pytest.raises(WeightError, match="cannot narrow"):
        quantize(torch.randn(8, 32), "W4A16").narrow(1, start, stop)


def test_take_rows():
    w = quantize(torch.randn(8, 32), "NVFP4A16", bias=torch.arange(8.0))
    index = torch.tensor([3, 3, 0])
    taken = w.take_rows(index)
    assert torch.equal(taken.dequantize(), w.dequantize()[index]) and taken.bias.tolist() == [3.0, 3.0, 0.0]
    tensor = quantize(torch.randn(8, 32), "FP8")
    assert tensor.spec.block == (8, 32)
    assert torch.equal(tensor.take_rows(index).dequantize(), tensor.dequantize()[index])
    assert tensor.take_rows(index).spec.block == (3, 32)
    with pytest.raises(WeightError, match="share scales"):
        quantize(torch.randn(200, 32), "FP8_BLOCK").take_rows(index)
    with pytest.raises(WeightError, match="out of range"):
        w.take_rows(torch.tensor([8]))


def test_take_rows_of_random_specs():
    for seed in range(200):
        w = random_weight(random_spec(seed), seed)
        index = torch.randint(w.spec.n, (7,), generator=torch.Generator().manual_seed(seed))
        scale2_block = w.spec.scale2_block
        if 1 < w.spec.block[0] < w.spec.n or (scale2_block and 1 < scale2_block[0] < w.spec.n):
            continue
        assert same_bits(w.take_rows(index).dequantize(), w.dequantize()[index]), w.spec.key
