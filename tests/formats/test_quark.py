"""Quark against its own weights, and against packers that go code by code."""

import pytest
import torch
from producers import cases, check, one
from slow_words import AWQ_ORDER, random_layer, signed, stream, values

from bitline import CheckpointError

G = 32


def config(weight, order="reorder", **layer):
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, **layer}, "export": {"pack_method": order}}


def spec(dtype="uint4", **more):
    shared = {"qscheme": "per_group", "group_size": G, "ch_axis": -1, "symmetric": dtype == "int4", "is_dynamic": False}
    return {"dtype": dtype, **shared, **more}


def words(rows, order):
    """Rows of codes in words of 8, padded with zeros."""
    lines = []
    for row in rows:
        row = [int(c) & 15 for c in row] + [0] * (-len(row) % 8)
        fields = AWQ_ORDER if order == "reorder" else range(8)
        lines.append(stream([row[block + f] for block in range(0, len(row), 8) for f in fields], 4))
    return signed(lines)


@pytest.mark.parametrize("case", cases("quark_"))
def test_producers_own_weight(case):
    check(case)


@pytest.mark.parametrize("order", ["reorder", "order"])
@pytest.mark.parametrize(("k", "n"), [(96, 16), (64, 13), (41, 9)])
def test_unsigned_words(k, n, order, tmp_path):
    codes, zeros, scales = random_layer(k, n, -(-k // G), 4)
    tensors = {"weight": words(codes, order), "weight_scale": scales, "weight_zero_point": words(zeros, order)}
    record = one(tmp_path, config(spec(), order), tensors)
    assert (record.format, record.spec.scheme) == (f"quark uint4 {order}", "uint4+zero g32")
    assert torch.equal(record.weight().dequantize(), values(codes, zeros, scales, [i // G for i in range(k)]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_signed_words(symmetric, tmp_path):
    codes, zeros, scales = random_layer(64, 16, 2, 4)
    if symmetric:
        zeros = [[8] * 16] * 2
    flip = lambda rows: [[int(c) ^ 8 for c in row] for row in rows]  # two's complement of code - 8
    tensors = {"weight": words(flip(codes), "reorder"), "weight_scale": scales}
    tensors["weight_zero_point"] = words(flip(zeros), "reorder")
    record = one(tmp_path, config(spec("int4", symmetric=symmetric)), tensors)
    assert record.spec.weight.name == ("uint4b8" if symmetric else "uint4")
    assert torch.equal(record.weight().dequantize(), values(codes, zeros, scales, [i // G for i in range(64)]))


def test_asymmetric_bytes(tmp_path):
    g = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(-128, 128, shape, generator=g).to(torch.int8) for shape in ((6, 40), (6,)))
    scale = torch.rand(6, generator=g)
    rule = spec("int8", qscheme="per_channel", ch_axis=0, symmetric=False)
    record = one(tmp_path, config(rule), {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros})
    assert torch.equal(record.weight().dequantize(), (codes.float() - zeros.float()[:, None]) * scale[:, None])


def test_small_floats_under_scales_of_blocks(tmp_path):
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (4, 48), generator=g).to(torch.uint8)  # 64 codes of 6 bits
    scale = torch.randint(100, 150, (4, 2), generator=g).to(torch.uint8)
    record = one(tmp_path, config(spec("fp6_e3m2", scale_format="e8m0")), {"weight": codes, "weight_scale": scale})
    table, bits = record.spec.weight.values(), [sum(int(b) << 8 * i for i, b in enumerate(row)) for row in codes]
    expected = [
        [table[row >> 6 * k & 63] * 2.0 ** (int(scale[n, k // 32]) - 127) for k in range(64)] for n, row in enumerate(bits)
    ]
    assert torch.equal(record.weight().dequantize(), torch.tensor(expected))


def test_the_first_pattern_rules(tmp_path):
    codes, zeros, scales = random_layer(64, 16, 2, 4)
    tensors = {"weight": words(codes, "reorder"), "weight_scale": scales, "weight_zero_point": words(zeros, "reorder")}
    conf = config(spec(group_size=64)) | {"layer_quant_config": {"x*": {}, "*proj": {"weight": spec()}, "m.*": {}}}
    assert one(tmp_path, conf, tensors).spec.block == (1, G)


def test_inputs_of_another_kind_are_refused(tmp_path):
    codes, zeros, scales = random_layer(64, 16, 2, 4)
    tensors = {"weight": words(codes, "reorder"), "weight_scale": scales, "weight_zero_point": words(zeros, "reorder")}
    with pytest.raises(CheckpointError, match=r"inputs quantized this way are not supported yet.*int16 per_group"):
        one(tmp_path, config(spec(), input_tensors=spec("int16")), tensors)
