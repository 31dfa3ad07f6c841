"""Every repacking function of the native core against its torch fallback, bit for bit, at every ISA level."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitline import bitstream, memory, native, types
from bitline.formats.common import packed_int32
from bitline.formats.gguf import blocks as gguf_blocks
from bitline.formats.gguf.block_codes import BitPlanes
from bitline.formats.gguf.ggml_types import BLOCK_SIZES
from bitline.formats.io.mapped_file import map_bytes
from bitline.kernels.torch.int4_cpu import TorchInt4PackLinearKernel
from bitline.rtn import quantize
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.why_not()}")
sizes = st.integers(1, 70)


@pytest.fixture(autouse=True)
def every_level(level):
    """Each test at each ISA level."""


@contextlib.contextmanager
def without_core():
    """Hide the native core."""
    before = native._core, native._reason
    native._core, native._reason = None, "hidden by a test"
    try:
        yield
    finally:
        native._core, native._reason = before


def same(call):
    """call() gives the same with the core and without."""
    found = call()
    with without_core():
        assert native.core() is None
        expected = call()
    assert type(found) is type(expected)
    for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, expected)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def packed_int32_of(rows, columns, seed, extra=0):
    """Random int32 with rows `extra` elements apart."""
    padded = torch.randint(-(2**31), 2**31 - 1, (rows, columns + extra), generator=generator(seed), dtype=torch.int32)
    return padded[:, :columns]


def codes(n, k, bits, seed):
    return torch.randint(1 << bits, (n, k), generator=generator(seed), dtype=torch.uint8)


SHAPES = [(1, 1), (7, 9), (16, 16), (33, 150), (48, 64), (129, 257)]
examples = settings(max_examples=15)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("extra", [0, 3])
def test_repack_gptq(rows, columns, extra):
    data = packed_int32_of(rows, columns, 1, extra)
    assert torch.equal(packed_int32.repack_gptq(data).view(torch.int32), data.t())


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("less", [0, 3, 7])
def test_repack_awq(rows, columns, less):
    data = packed_int32_of(8 * rows - less, columns, 2, extra=1)
    same(lambda: packed_int32.repack_awq(data, 8 * columns))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_repack_gptq_permuted(bits, rows, columns):
    rows = rows * bits if 32 % bits else rows
    data = packed_int32_of(rows, columns, 3)
    perm = torch.randperm(rows * 32 // bits, generator=generator(4)).int()
    same(lambda: packed_int32.repack_gptq_permuted(data, bits, perm))


def test_repack_gptq_permuted_long_rows():
    data, perm = packed_int32_of(4096, 40, 5), torch.randperm(4096 * 8, generator=generator(6)).int()
    same(lambda: packed_int32.repack_gptq_permuted(data, 4, perm))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("minus_one", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("groups", "columns"), [(1, 32), (3, 8), (5, 160), (33, 416)])
def test_unpack_zero_points(bits, minus_one, interleaved, groups, columns):
    data = packed_int32_of(groups, -(-columns * bits // 32), 7)
    data[0] = -1  # adding one to each code carries through the whole int32
    same(lambda: packed_int32.unpack_zero_points(data, bits, columns, minus_one=minus_one, interleaved=interleaved))


@pytest.mark.parametrize("bits", range(1, 8))
@examples
@given(n=sizes, k=st.integers(1, 400), extra=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_pack_and_unpack(bits, n, k, extra, seed):
    rows = codes(n, k + extra, 8, seed)
    packed = bitstream.pack(rows[:, :k], bits)
    same(lambda: bitstream.pack(rows[:, :k], bits))
    padded = torch.cat((packed, codes(n, extra, 8, seed)), 1)
    same(lambda: bitstream.unpack(padded, bits, k))
    assert torch.equal(bitstream.unpack(packed, bits, k), rows[:, :k] & ((1 << bits) - 1))


@pytest.mark.parametrize("bits", range(1, 9))
@examples
@given(n=sizes, k=st.integers(1, 300), data=st.data())
def test_take(bits, n, k, data):
    packed = bitstream.pack(codes(n, k, bits, 8), bits)
    index = torch.tensor(data.draw(st.lists(st.integers(0, k - 1), min_size=1, max_size=300)))
    same(lambda: bitstream.take(packed, bits, k, index))


@pytest.mark.parametrize("bad", [-1, 20])
def test_take_refuses_columns_outside(bad):
    packed = bitstream.pack(codes(3, 20, 3, 9), 3)
    with pytest.raises(IndexError):
        bitstream.take(packed, 3, 20, torch.tensor([0, bad, 1]))


def test_nothing_past_the_end_is_written():
    """Results between guard bytes."""
    core = native.core()
    for bits in range(1, 8):
        for k in (1, 8, 63, 64, 65, 200):
            size = bitstream.row_bytes(k, bits)
            out = torch.full((k + 64,), 0xAB, dtype=torch.uint8)
            source = codes(1, size, 8, k)
            core.unpack_codes(source.data_ptr(), size, 1, k, bits, out.data_ptr())
            assert (out[k:] == 0xAB).all()
            out = torch.full((size + 64,), 0xAB, dtype=torch.uint8)
            source = codes(1, k, 8, k)
            core.pack_codes(source.data_ptr(), k, 1, k, bits, out.data_ptr())
            assert (out[size:] == 0xAB).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_transposed(dtype, rows, columns):
    x = torch.randint(0, 200, (rows, columns + 2), generator=generator(10)).to(dtype)[:, :columns]
    same(lambda: native.transposed(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_all_finite(dtype):
    x = torch.randn(3, 333, generator=generator(11)).to(dtype)
    assert native.all_finite(x) is True and native.all_finite(x[:, :5]) is None
    for bad in (torch.nan, -torch.inf):
        y = x.float()
        y[2, 332] = bad
        assert native.all_finite(y.to(dtype)) is bool(torch.isfinite(y.to(dtype).float()).all())
    every = torch.arange(256, dtype=torch.uint8)
    if dtype.itemsize == 1:
        for code in every:
            one = code.view(1).view(dtype)
            assert native.all_finite(one) is bool(torch.isfinite(one.float()))


def test_prefaulted_memory():
    out = memory.empty(3000, 4096, dtype=torch.uint8)
    assert out.shape == (3000, 4096) and out.is_contiguous()
    assert (out.fill_(7) == 7).all() and memory.empty(0, 5, dtype=torch.int32).shape == (0, 5)


@pytest.mark.parametrize("rows, columns", [(512, 640), (300, 1201)])
def test_mapped_source(tmp_path, rows, columns):
    """int32 that lie in a file, at an offset that is no page's, whose pages no one has touched."""
    values = packed_int32_of(rows, columns, seed=3)
    (tmp_path / "weights").write_bytes(b"x" * 4100 + values.numpy().tobytes())
    source = lambda: map_bytes(tmp_path / "weights", 4100, values.nbytes, "w").view(torch.int32).view(rows, columns)
    perm = torch.randperm(rows * 8, generator=generator(4)).int()
    assert values.nbytes > 1 << 20
    assert torch.equal(packed_int32.repack_gptq(source()), packed_int32.repack_gptq(values))
    assert torch.equal(packed_int32.repack_awq(source(), 8 * columns), packed_int32.repack_awq(values, 8 * columns))
    found = packed_int32.repack_gptq_permuted(source(), 4, perm)
    assert torch.equal(found, packed_int32.repack_gptq_permuted(values, 4, perm))
    same(lambda: packed_int32.repack_gptq(source()))


INT4PACK = [
    LinearSpec(64, 128, types.uint4b8, (1, 128), scale_dtype=torch.float16),
    LinearSpec(100, 96, types.uint4b8, (1, 32), scale_dtype=torch.bfloat16),
    LinearSpec(65, 300, types.uint4, (1, 300), zero="int", scale_dtype=torch.float16),
    LinearSpec(70, 160, types.uint4, (1, 32), zero="float", scale_dtype=torch.float32),
    LinearSpec(33, 77, types.uint3b4, (1, 77), scale_dtype=torch.float32),
    LinearSpec(96, 256, types.uint2, (1, 64), zero="int", scale_dtype=torch.float16),
    LinearSpec(63, 65, types.uint8b128, (1, 65), scale_dtype=torch.bfloat16),
    LinearSpec(80, 512, types.uint8, (1, 128), zero="int", scale_dtype=torch.bfloat16),
    LinearSpec(80, 320, types.int4, (1, 64), scale_dtype=torch.bfloat16),
    LinearSpec(64, 640, types.int8, (64, 640), scale_dtype=torch.float32),
    LinearSpec(90, 320, types.float4_e2m1, (1, 32), scale_dtype=torch.bfloat16),
    LinearSpec(32, 64, types.uint5b16, (1, 32), scale_dtype=torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("spec", INT4PACK, ids=str)
def test_int4pack(spec):
    weight = random_weight(spec, seed=12)
    assert TorchInt4PackLinearKernel.can_implement(weight.spec)
    same(lambda: list(TorchInt4PackLinearKernel.pack(weight).values()))


def test_int4pack_of_shards():
    weight = quantize(torch.randn(130, 256, generator=generator(13)), "W4A16_ASYM", group_size=64)
    for shard in (weight.narrow(0, 3, 130), weight.narrow(1, 64, 256), weight.narrow(1, 32, 160)):
        same(lambda shard=shard: list(TorchInt4PackLinearKernel.pack(shard).values()))


@pytest.mark.parametrize("capability", ["avx2", "avx512"])
def test_int4pack_of_another_vector_width(capability):
    """torch's layout depends on its own vector bits."""
    code = """
import torch
from bitline import native
from bitline.kernels.torch import int4_packing
from bitline.kernels.torch.int4_cpu import TorchInt4PackLinearKernel as Kernel
from bitline.rtn import quantize
weight = quantize(torch.randn(130, 256), "W4A16_ASYM", group_size=64)
found = Kernel.pack(weight)
native._core, native._reason = None, "hidden"
expected = Kernel.pack(weight)
print(int4_packing.layout().block, all(torch.equal(found[k], expected[k]) for k in expected))
"""
    environment = dict(os.environ, ATEN_CPU_CAPABILITY=capability, BITLINE_CPU_ISA=native.isa())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    block, equal = done.stdout.split()
    assert equal == "True" and block in ("32", "64")


BIT_PLANE_TYPES = [kind for kind, block in gguf_blocks.BLOCKS.items() if isinstance(block.codes, BitPlanes)]


@pytest.mark.parametrize("kind", BIT_PLANE_TYPES)
@pytest.mark.parametrize(("n", "count"), [(1, 1), (3, 5), (70, 9)])
def test_repack_gguf_blocks(kind, n, count):
    nbytes, planes = BLOCK_SIZES[kind][1], gguf_blocks.BLOCKS[kind].codes
    padded = torch.randint(256, (n, count + 2, nbytes), generator=generator(n), dtype=torch.uint8)
    for blocks in (padded, padded[:, 1:-1]):  # contiguous rows, and strided ones
        expected = planes(blocks)
        out = torch.zeros_like(expected)
        assert planes.repack_native(blocks, out)
        assert torch.equal(out, expected)
    with without_core():
        assert not planes.repack_native(padded, out)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
@pytest.mark.parametrize(("n", "count"), [(1, 1), (3, 5), (700, 9)])
def test_unpack_gguf_scales(kind, n, count):
    padded = torch.randint(256, (n, count + 2, BLOCK_SIZES[kind][1]), generator=generator(n), dtype=torch.uint8)
    for blocks in (padded, padded[:, 1:-1]):  # contiguous rows, and strided ones
        found = gguf_blocks.BLOCKS[kind].scales(blocks)
        with without_core():
            expected = gguf_blocks.BLOCKS[kind].scales(blocks)
        assert found.keys() == expected.keys()
        for name, t in found.items():
            as_int = torch.int16 if t.itemsize == 2 else torch.uint8  # random float16 may be NaN
            assert t.dtype == expected[name].dtype and torch.equal(t.view(as_int), expected[name].view(as_int)), name


def test_gguf_weight_of_several_chunks(monkeypatch):
    raw = torch.randint(256, (300, 3 * 144), generator=generator(0), dtype=torch.uint8)
    raw.view(300, 3, 144)[..., :4] = torch.rand(300, 3, 2, generator=generator(1)).half().view(torch.uint8)
    whole = gguf_blocks.to_weight("Q4_K", raw, 768)
    monkeypatch.setattr(bitstream, "ROW_CHUNK_BYTES", 7 * 768)
    chunked = gguf_blocks.to_weight("Q4_K", raw, 768)
    for name, t in whole.tensors().items():
        assert torch.equal(t, chunked.tensors()[name]), name
