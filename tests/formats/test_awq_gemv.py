"""AWQ gemv and gemv_fast against AutoAWQ's packers, and against packers that pack one code at a time."""

import pytest
import torch
from producers import cases, check, one
from reference_packers import as_int32, random_layer, stream, values

from bitline import CheckpointError

G = 32


def config(version, **more):
    return {"quant_method": "awq", "bits": 4, "group_size": G, "zero_point": True, "version": version, **more}


def padded(rows, count):
    return [list(row) + [0] * (count - len(row)) for row in rows]


def gemv(codes, zeros, scales, padded_groups):
    """codes [k][n], zeros [g][n], scales [g, n] as version gemv stores them."""
    rows = [stream([int(c) for c in column], 4) for column in zip(*codes, strict=True)]
    zero = [stream([int(z) for z in row], 4) for row in padded(zip(*zeros, strict=True), padded_groups)]
    pad = torch.nn.functional.pad(scales.t(), (0, padded_groups - len(zeros)))
    return {"qweight": as_int32(rows), "qzeros": as_int32(zero), "scales": pad.contiguous()}


def gemv_fast(codes, zeros, scales, padded_groups, name="qzeros"):
    """The same as gemv_fast stores it: int16 j of a run holds stored codes 4j..4j+3 of its four rows laid end to end."""
    k, n = len(codes), len(codes[0])
    packed = []
    for quarter in range(0, n, 4):
        line = []
        for run in range(0, k, 64):
            flat = []
            for row in range(quarter, quarter + 4):
                for block in range(run, run + 64, 32):
                    for position in range(32):
                        b, c, a = position // 8, position // 4 % 2, position % 4
                        flat.append(int(codes[block + 8 * a + 2 * b + c][row]))
            line += [flat[i] | flat[i + 1] << 4 | flat[i + 2] << 8 | flat[i + 3] << 12 for i in range(0, 256, 4)]
        packed.append([value - (1 << 16) if value >> 15 else value for value in line])
    down = (0, 0, 0, padded_groups - len(zeros))
    offset = -(scales.float() * torch.tensor([[int(z) for z in row] for row in zeros])).to(scales.dtype)
    pad = torch.nn.functional.pad
    return {"qweight": torch.tensor(packed, dtype=torch.int16), "scales": pad(scales, down), name: pad(offset, down)}


@pytest.mark.parametrize("case", cases("autoawq_gemv"))
def test_producers_weight(case):
    check(case)


@pytest.mark.parametrize("padded_groups", [8, 32])
@pytest.mark.parametrize("k", [128, 64, 72])
def test_gemv(k, padded_groups, tmp_path):
    groups = -(-k // G)
    codes, zeros, scales = random_layer(k, 12, groups, 4)
    record = one(tmp_path, config("gemv"), gemv(codes, zeros, scales, padded_groups))
    assert (record.format, record.spec.scheme) == ("awq gemv", "uint4+zero g32")
    assert torch.equal(record.weight().dequantize(), values(codes, zeros, scales, [i // G for i in range(k)]))


def test_gemv_with_implicit_zero_points_is_symmetric(tmp_path):
    codes, _, scales = random_layer(64, 8, 2, 4)
    zeros = [[8] * 8] * 2
    record = one(tmp_path, config("GEMV", zero_point=False), gemv(codes, zeros, scales, 8))
    assert record.spec.scheme == "uint4b8 g32" and not record.oddities
    assert torch.equal(record.weight().dequantize(), values(codes, zeros, scales, [i // G for i in range(64)]))


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


def test_a_version_that_contradicts_the_tensors(tmp_path):
    with pytest.raises(CheckpointError, match=r"another dtype.*int32.*expected torch\.int16"):
        one(tmp_path, config("gemv_fast"), gemv(*random_layer(64, 8, 2, 4), 8))
