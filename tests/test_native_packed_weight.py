"""The packed weight of the native kernel against a slow packer of its layout (csrc/packed_weight.h), at every ISA level."""

import dataclasses

import pytest
import torch

from bitline import bitstream, native, types
from bitline.kernels.cpu import packed_weight
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.why_not()}")

# By bits: columns of a K block, and for each column pair where its codes' bits lie in a half of an int32: (int32, bit, count).
K_BLOCKS = {
    2: (16, [[(0, 2 * i, 2)] for i in range(8)]), 4: (8, [[(0, 4 * i, 4)] for i in range(4)]), 8: (4, [[(0, 0, 8)], [(0, 8, 8)]]),
    3: (32, [[(i // 5, 3 * (i % 5), 3)] for i in range(15)] + [[(0, 15, 1), (1, 15, 1), (2, 15, 1)]]),
    5: (32, [[(i // 3, 5 * (i % 3), 5)] for i in range(15)] + [[(i, 15, 1) for i in range(5)]]),
    6: (16, [[(i // 2, 6 * (i % 2), 6)] for i in range(6)] + [[(0, 12, 4), (2, 12, 2)], [(1, 12, 4), (2, 14, 2)]]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def every_level(level):
    """Each test at each ISA level."""


def slow_codes(codes, layout):
    """Codes [n_packed, k_packed], one per byte, to int32 (as int64) [N block][K block * int32][32]."""
    columns, pairs = K_BLOCKS[layout.bits]
    per_block = columns * layout.bits // 32
    out = torch.zeros(layout.k_packed // columns * per_block, layout.n_packed, dtype=torch.int64)
    for kb in range(layout.k_packed // columns):
        u = codes[:, kb * columns : (kb + 1) * columns].long()
        for pair, positions in enumerate(pairs):
            for half in range(2):
                left = u[:, 2 * pair + half].clone()
                for index, bit, count in positions:
                    out[kb * per_block + index] |= (left & ((1 << count) - 1)) << (16 * half + bit)
                    left >>= count
    return out.view(-1, layout.n_packed // 32, 32).transpose(0, 1)


def spec_of(n, k, scalar, group, **more):
    return LinearSpec(n, k, scalar, (1, group), **({"scale_dtype": torch.bfloat16} | more))


SPECS = [
    spec_of(64, 256, types.uint4b8, 128), spec_of(33, 100, types.uint4b8, 100), spec_of(70, 96, types.uint4, 32, zero="int"),
    spec_of(32, 4096, types.uint4b8, 128), spec_of(64, 256, types.int4, 64), spec_of(65, 75, types.int4, 75),
    spec_of(40, 90, types.uint4b8, 30), spec_of(96, 512, types.uint3b4, 128), spec_of(31, 77, types.uint3b4, 77),
    spec_of(64, 2080, types.uint3b4, 32), spec_of(40, 640, types.uint2b2, 64), spec_of(35, 33, types.uint2, 33, zero="int"),
    spec_of(64, 192, types.uint1, 64, zero="int"), spec_of(64, 512, types.uint5b16, 128), spec_of(63, 65, types.uint5b16, 65),
    spec_of(64, 1024, types.uint6b32, 128), spec_of(50, 52, types.uint6b32, 52), spec_of(48, 160, types.uint7b64, 32),
    spec_of(64, 256, types.uint8b128, 128), spec_of(37, 131, types.int8, 131), spec_of(64, 384, types.float8_e4m3fn, 128),
    spec_of(64, 320, types.float4_e2m1, 32, scale_dtype=torch.float8_e8m0fnu), spec_of(64, 100, types.float6_e3m2, 100),
    spec_of(64, 256, types.uint4b8, 64, act_order=True), spec_of(40, 96, types.uint4, 20, zero="int", act_order=True),
    spec_of(40, 96, types.uint4b8, 32, ragged=True),
]  # fmt: skip


def section(packed, layout, name, dtype):
    return packed[layout.section_offsets()[0][name] :][: layout.section_bytes()[name]].view(dtype)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes(spec):
    weight = random_weight(spec, seed=3)
    spec = weight.spec
    columns, scale_columns = packed_weight._column_map(weight)
    layout = packed_weight.layout_of(spec, len(scale_columns))
    if columns is None:
        columns = torch.where(torch.arange(layout.k_packed) < spec.k, torch.arange(layout.k_packed), -1)
    raw = weight.unpacked()
    if spec.weight.signed:
        raw = raw ^ (1 << (spec.weight.bits - 1))
    gathered = torch.zeros(layout.n_packed, layout.k_packed, dtype=torch.uint8)
    used = columns >= 0
    gathered[: spec.n, : len(columns)][:, used] = raw[:, columns[used].long()]
    found = section(packed_weight.pack(weight), layout, "codes", torch.int32)
    assert torch.equal(found.long() & 0xFFFFFFFF, slow_codes(gathered, layout).flatten())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scales(spec):
    weight = random_weight(spec, seed=4)
    _, scale_columns = packed_weight._column_map(weight)
    layout = packed_weight.layout_of(weight.spec, len(scale_columns))
    packed = packed_weight.pack(weight)
    assert packed.shape == (layout.section_offsets()[1],)
    dtype = packed_weight.STORAGE_DTYPE[layout.scale_type]
    found = section(packed, layout, "scales", dtype).view(layout.n_packed // 32, -1, 32)
    expected = torch.zeros(layout.n_packed, layout.num_groups, dtype=dtype)
    expected[: weight.spec.n] = weight.scales().to(dtype)[:, scale_columns]
    assert torch.equal(found.transpose(1, 2).reshape(layout.n_packed, -1), expected)
    if layout.offset_type == packed_weight.ZERO_POINT:
        found = section(packed, layout, "offsets", torch.int8).view(layout.n_packed // 32, -1, 32)
        zero = weight.zero.int()[:, scale_columns] - packed_weight._implicit_zero(weight.spec)
        assert torch.equal(found.transpose(1, 2).reshape(layout.n_packed, -1)[: weight.spec.n].int(), zero)


def test_bits_past_the_last_code_are_ignored():
    weight = random_weight(spec_of(64, 77, types.uint3b4, 77), seed=5)
    noisy = weight.codes.clone()
    noisy[:, -1] |= 0x80
    assert 77 * 3 % 8 == 7 and not torch.equal(noisy, weight.codes)
    other = dataclasses.replace(weight, codes=noisy)
    assert torch.equal(packed_weight.pack(other), packed_weight.pack(weight))


def test_strided_rows_at_the_end_of_their_memory():
    weight = random_weight(spec_of(40, 1000, types.uint4b8, 1000), seed=6)
    padded = torch.zeros(40, weight.codes.shape[1] + 3, dtype=torch.uint8)
    padded[:, 3:] = weight.codes
    strided = dataclasses.replace(weight, codes=padded[:, 3:])
    assert torch.equal(packed_weight.pack(strided), packed_weight.pack(weight))
    assert torch.equal(bitstream.unpack(padded[:, 3:], 4, 1000), weight.unpacked())
