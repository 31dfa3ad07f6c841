"""HQQ against its own dequantization in float32, and against a packer that packs one code at a time."""

import pytest
import torch
from producers import cases, check, one

CONFIG = {"quant_method": "hqq"}
PACKINGS = {"8bit_u8": (8, [0]), "4bit_u8": (4, [4, 0]), "2bit_u8": (2, [6, 4, 2, 0]), "1bit_u8": (1, list(range(7, -1, -1))),
            "3bit_32": (3, list(range(27, -1, -3)))}  # fmt: skip


def layer(n, k, size, packing, dtype=torch.float16):
    """Tensors of one layer, and its weight in float32 by the definition."""
    bits, shifts = PACKINGS[packing]
    g = torch.Generator().manual_seed(n * k + size)
    rows = n * k // size
    codes = torch.randint(1 << bits, (rows, size), generator=g)
    step = -(-rows // len(shifts))
    packed = [[sum(int(codes[i + step * s, j]) << shift for s, shift in enumerate(shifts) if i + step * s < rows)
              for j in range(size)] for i in range(step)]  # fmt: skip
    scale, zero = (torch.rand(rows, 1, generator=g) * 0.1).to(dtype), (torch.rand(rows, 1, generator=g) * 9).to(dtype)
    tensors = {
        "W_q": torch.tensor(packed, dtype=torch.int32 if packing == "3bit_32" else torch.uint8), "scale": scale, "zero": zero,
        "shape": torch.tensor([n, k]), "axis": torch.tensor(1, dtype=torch.int32),
        "group_size": torch.tensor(size, dtype=torch.int32),
        "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
    }  # fmt: skip
    return tensors, ((codes.double() - zero.double()) * scale.double()).float().view(n, k)


@pytest.mark.parametrize("case", cases("hqq_"))
def test_producers_weight(case):
    check(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("n", "k", "size"), [(8, 64, 32), (8, 48, 32), (16, 9, 6)])
def test_packings(n, k, size, packing, dtype, tmp_path):
    if packing != "3bit_32" and n * k // size % len(PACKINGS[packing][1]):
        return  # the producer cannot pack these
    tensors, values = layer(n, k, size, packing, dtype)
    record = one(tmp_path, CONFIG, tensors)
    assert record.format == f"hqq {packing}" and record.spec.zero == "float"
    assert torch.equal(record.weight().dequantize(), values)


def test_codes_stored_as_floats(tmp_path):
    tensors, values = layer(8, 64, 32, "4bit_u8")
    tensors["W_q"] = tensors["W_q"].view(torch.float16)
    assert torch.equal(one(tmp_path, CONFIG, tensors).weight().dequantize(), values)


def test_one_group_per_row(tmp_path):
    tensors, values = layer(8, 48, 48, "4bit_u8")
    del tensors["group_size"]
    assert torch.equal(one(tmp_path, CONFIG, tensors).weight().dequantize(), values)


def axis_0(n, k, size, packing, dtype=torch.float16):
    """A layer of axis 0, whose groups are every n * k / size-th weight, and its weight by the definition."""
    tensors, _ = layer(n, k, n * k // size, packing, dtype)  # its rows are this layer's columns of the packed matrix
    bits, shifts = PACKINGS[packing]
    columns = n * k // size
    g = torch.Generator().manual_seed(size)
    codes = torch.randint(1 << bits, (size, columns), generator=g)
    step = -(-size // len(shifts))
    packed = [[sum(int(codes[i + step * s, j]) << shift for s, shift in enumerate(shifts) if i + step * s < size)
              for j in range(columns)] for i in range(step)]  # fmt: skip
    scale, zero = (torch.rand(1, columns, generator=g) * 0.1).to(dtype), (torch.rand(1, columns, generator=g) * 9).to(dtype)
    tensors |= {
        "W_q": torch.tensor(packed, dtype=torch.int32 if packing == "3bit_32" else torch.uint8), "scale": scale, "zero": zero,
        "axis": torch.tensor(0, dtype=torch.int32), "group_size": torch.tensor(size, dtype=torch.int32),
    }  # fmt: skip
    return tensors, ((codes.double() - zero.double()) * scale.double()).float().view(n, k)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("n", "k", "size", "block"), [(16, 8, 16, (16, 1)), (16, 12, 8, (1, 1)), (12, 20, 24, (1, 1))])
def test_groups_of_axis_0(n, k, size, block, packing, tmp_path):
    tensors, values = axis_0(n, k, size, packing)
    record = one(tmp_path, CONFIG, tensors)
    assert record.spec.block == block and bool(record.oddities) == (block == (1, 1))
    assert torch.equal(record.weight().dequantize(), values)
    shards = [record.weight().shard(dim, r, 3).dequantize() for dim in (0, 1) for r in range(3)]
    assert torch.equal(torch.cat(shards[:3]), values) and torch.equal(torch.cat(shards[3:], 1), values)


def test_zero_scale_in_one_tensor(tmp_path):
    tensors, values = layer(8, 64, 32, "4bit_u8")
    tensors["zero_scale"] = torch.stack((tensors.pop("zero"), tensors.pop("scale")))
    assert torch.equal(one(tmp_path, CONFIG, tensors).weight().dequantize(), values)


def test_per_tensor_scale(tmp_path):
    tensors, _ = layer(8, 64, 32, "4bit_u8")
    tensors |= {"scale": torch.tensor(0.5), "zero": torch.tensor(3.0), "channel_wise": torch.tensor(0, dtype=torch.uint8)}
    del tensors["group_size"]
    tensors["W_q"] = tensors["W_q"].view(4, 64)
    codes = torch.cat((tensors["W_q"] >> 4, tensors["W_q"] & 15)).float()
    record = one(tmp_path, CONFIG, tensors)
    assert record.spec.block == (8, 64) and torch.equal(record.weight().dequantize(), (codes - 3) * 0.5)
