"""AWQ gemv and gemv_fast against what AutoAWQ's packers were given, and against packers that go code by code."""

import pytest
import torch
from producers import cases, check, one
from slow_words import random_layer, signed, stream, values

from bitline import CheckpointError

G = 32


def config(version, **more):
    return {"quant_method": "awq", "bits": 4, "group_size": G, "zero_point": True, "version": version, **more}


def padded(rows, width):
    return [list(row) + [0] * (width - len(row)) for row in rows]


def gemv(codes, zeros, scales, width):
    """codes [k][n], zeros [g][n], scales [g, n] as version gemv stores them."""
    rows = [stream([int(c) for c in column], 4) for column in zip(*codes, strict=True)]
    zero = [stream([int(z) for z in row], 4) for row in padded(zip(*zeros, strict=True), width)]
    pad = torch.nn.functional.pad(scales.t(), (0, width - len(zeros)))
    return {"qweight": signed(rows), "qzeros": signed(zero), "scales": pad.contiguous()}


def gemv_fast(codes, zeros, scales, width, name="qzeros"):
    """The same as gemv_fast stores it: word j of a run holds stored codes 4j..4j+3 of its four rows laid end to end."""
    k, n = len(codes), len(codes[0])
    words = []
    for quarter in range(0, n, 4):
        line = []
        for run in range(0, k, 64):
            flat = []
            for row in range(quarter, quarter + 4):
                for block in range(run, run + 64, 32):
                    for place in range(32):
                        b, c, a = place // 8, place // 4 % 2, place % 4
                        flat.append(int(codes[block + 8 * a + 2 * b + c][row]))
            line += [flat[i] | flat[i + 1] << 4 | flat[i + 2] << 8 | flat[i + 3] << 12 for i in range(0, 256, 4)]
        words.append([word - (1 << 16) if word >> 15 else word for word in line])
    down = (0, 0, 0, width - len(zeros))
    offset = -(scales.float() * torch.tensor([[int(z) for z in row] for row in zeros])).to(scales.dtype)
    pad = torch.nn.functional.pad
    return {"qweight": torch.tensor(words, dtype=torch.int16), "scales": pad(scales, down), name: pad(offset, down)}


@pytest.mark.parametrize("case", cases("autoawq_gemv"))
def test_producers_own_weight(case):
    check(case)


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("k", [128, 64, 72])
def test_gemv(k, width, tmp_path):
    groups = -(-k // G)
    codes, zeros, scales = random_layer(k, 12, groups, 4)
    record = one(tmp_path, config("gemv"), gemv(codes, zeros, scales, width))
    assert (record.format, record.spec.scheme) == ("awq gemv", "uint4+zero g32")
    assert torch.equal(record.weight().dequantize(), values(codes, zeros, scales, [i // G for i in range(k)]))


def test_gemv_of_middle_zeros_is_symmetric(tmp_path):
    codes, _, scales = random_layer(64, 8, 2, 4)
    middle = [[8] * 8] * 2
    record = one(tmp_path, config("GEMV", zero_point=False), gemv(codes, middle, scales, 8))
    assert record.spec.scheme == "uint4b8 g32" and not record.oddities
    assert torch.equal(record.weight().dequantize(), values(codes, middle, scales, [i // G for i in range(64)]))


@pytest.mark.parametrize(("version", "name"), [("gemv_fast", "qzeros"), ("llm-awq", "scaled_zeros")])
@pytest.mark.parametrize("k", [64, 192])
def test_gemv_fast(k, version, name, tmp_path):
    codes, zeros, scales = random_layer(k, 12, k // G, 4)
    tensors = gemv_fast(codes, zeros, scales, 32, name)
    record = one(tmp_path, config(version), tensors)
    assert (record.format, record.spec.scheme) == (f"awq {version}", "uint4+offset g32")
    group = torch.arange(k) // G
    expected = torch.tensor([[int(c) for c in row] for row in codes]).float() * scales.float()[group]
    expected += tensors[name].float()[group]
    assert torch.equal(record.weight().dequantize(), expected.t())


def test_a_version_that_is_not_the_tensors(tmp_path):
    with pytest.raises(CheckpointError, match=r"another dtype.*int32.*expected torch\.int16"):
        one(tmp_path, config("gemv_fast"), gemv(*random_layer(64, 8, 2, 4), 8))
