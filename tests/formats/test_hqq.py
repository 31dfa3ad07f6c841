"""HQQ against its own dequantization in float32, and against a packer that goes code by code."""

import pytest
import torch
from producers import cases, check, one

CONFIG = {"quant_method": "hqq"}
PACKINGS = {"8bit_u8": (8, [0]), "4bit_u8": (4, [4, 0]), "2bit_u8": (2, [6, 4, 2, 0]), "1bit_u8": (1, list(range(7, -1, -1))),
            "3bit_32": (3, list(range(27, -1, -3)))}  # fmt: skip


def layer(n, k, size, packing, dtype=torch.float16):
    """Tensors of one layer, and its weight in float32 by the definition."""
    width, shifts = PACKINGS[packing]
    g = torch.Generator().manual_seed(n * k + size)
    rows = n * k // size
    codes = torch.randint(1 << width, (rows, size), generator=g)
    step = -(-rows // len(shifts))
    words = [[sum(int(codes[i + step * s, j]) << shift for s, shift in enumerate(shifts) if i + step * s < rows)
              for j in range(size)] for i in range(step)]  # fmt: skip
    scale, zero = (torch.rand(rows, 1, generator=g) * 0.1).to(dtype), (torch.rand(rows, 1, generator=g) * 9).to(dtype)
    tensors = {
        "W_q": torch.tensor(words, dtype=torch.int32 if packing == "3bit_32" else torch.uint8), "scale": scale, "zero": zero,
        "shape": torch.tensor([n, k]), "axis": torch.tensor(1, dtype=torch.int32),
        "group_size": torch.tensor(size, dtype=torch.int32),
        "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
    }  # fmt: skip
    return tensors, ((codes.double() - zero.double()) * scale.double()).float().view(n, k)


@pytest.mark.parametrize("case", cases("hqq_"))
def test_producers_own_weight(case):
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


def test_codes_that_are_stored_as_floats(tmp_path):
    tensors, values = layer(8, 64, 32, "4bit_u8")
    tensors["W_q"] = tensors["W_q"].view(torch.float16)
    assert torch.equal(one(tmp_path, CONFIG, tensors).weight().dequantize(), values)


def test_one_group_per_row(tmp_path):
    tensors, values = layer(8, 48, 48, "4bit_u8")
    del tensors["group_size"]
    assert torch.equal(one(tmp_path, CONFIG, tensors).weight().dequantize(), values)
