"""`quantize` against tensors that compressed-tensors wrote (fixtures/make_quantize_ct.py)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bitline
from bitline import InputError, quantize

FIXTURES = Path(__file__).parent / "fixtures"
ABOUT = json.loads((FIXTURES / "quantize_ct.json").read_text())
RECORDED = load_file(FIXTURES / "quantize_ct.safetensors")
SCHEMES = sorted({case["scheme"] for case in ABOUT["cases"]})


def unpack_int32(packed, bits, columns):
    """Packed int32, a little-endian bit stream along the last dimension, to codes, with Python integers."""
    out = []
    for row in packed.tolist():
        stream = sum((value & 0xFFFFFFFF) << (32 * i) for i, value in enumerate(row))
        out.append([stream >> (bits * i) & ((1 << bits) - 1) for i in range(columns)])
    return torch.tensor(out, dtype=torch.uint8)


def recorded_codes(state, spec):
    if "weight" in state:
        codes = state["weight"].view(torch.uint8)
        return codes if spec.weight.bits == 8 else codes + (1 << (spec.weight.bits - 1))  # int4 in int8
    packed = state["weight_packed"]
    if packed.dtype == torch.int32:
        return unpack_int32(packed, spec.weight.bits, spec.k)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


@pytest.mark.parametrize("case", ABOUT["cases"], ids=lambda case: case["key"])
def test_same_tensors_as_the_producer(case):
    state = {k.removeprefix(case["key"] + "."): v for k, v in RECORDED.items() if k.startswith(case["key"] + ".weight")}
    state = {k: v for k, v in state.items() if not k.startswith("g32.") or case["group_size"]}
    w = RECORDED[case["weight"]]
    qw = quantize(w, case["scheme"], group_size=case["group_size"])
    assert qw.spec.act_dtype == w.dtype
    scale = state["weight_scale"].reshape(qw.scale.shape)
    if scale.dtype == torch.uint8:
        assert qw.spec.scale_dtype == torch.float8_e8m0fnu
        assert torch.equal(qw.scale.view(torch.uint8), scale)
    else:
        assert qw.scale.dtype == scale.dtype
        assert torch.equal(qw.scale.float(), scale.float())
    expected, found = recorded_codes(state, qw.spec), qw.unpacked()
    wrong = (expected != found).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} codes differ, first at {wrong[0].tolist()}: weight {w[tuple(wrong[0])]}"
    if "weight_zero_point" in state:
        n, groups = qw.scale.shape
        zero = unpack_int32(state["weight_zero_point"].T.contiguous(), qw.spec.weight.bits, n).T
        assert torch.equal(qw.zero, zero) and zero.shape[1] == groups
    else:
        assert qw.zero is None
    if "weight_global_scale" in state:
        assert float(qw.scale2) == 1.0 / float(state["weight_global_scale"].double())
    else:
        assert qw.scale2 is None


def test_every_scheme_is_recorded():
    from bitline.rtn import SCHEMES as known

    assert set(known) == set(SCHEMES)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (130, 200), (5, 128)])
def test_error_is_within_half_a_step(scheme, shape):
    """An independent bound: no weight is off by more than half a quantization step of its block; a float's step grows."""
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    qw = quantize(w, scheme)
    assert (qw.spec.n, qw.spec.k) == shape
    error = (qw.dequantize() - w).abs()
    bn, bk = qw.spec.block
    peak = torch.empty_like(w)
    for r in range(0, shape[0], bn):
        for c in range(0, shape[1], bk):
            peak[r : r + bn, c : c + bk] = w[r : r + bn, c : c + bk].abs().max()
    if qw.spec.weight.kind == "int":
        span = 2 if qw.zero is None else 3  # an asymmetric range is at most twice the peak wide, and its zero is rounded
        limit = peak * span / ((1 << qw.spec.weight.bits) - 1)  # the largest code is clamped: up to a whole step
    else:
        limit = torch.maximum(w.abs() / 2 ** (qw.spec.weight.mantissa + 1), peak * 0.003) * (
            1.7 if qw.spec.weight.bits == 4 else 1.05
        )
        if qw.spec.weight.bits == 4:
            limit = torch.maximum(limit, peak / 6)
    assert bool((error <= limit * 1.001).all()), (error - limit).max()


def test_a_short_last_group_is_quantized_by_itself():
    w = torch.randn(6, 100, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = quantize(w, "W4A16_ASYM", group_size=32)
    assert whole.scale.shape == (6, 4)
    tail = quantize(w[:, 96:].contiguous(), "W4A16_ASYM", group_size=32)
    assert torch.equal(whole.scale[:, 3:], tail.scale) and torch.equal(whole.zero[:, 3:], tail.zero)
    assert torch.equal(whole.dequantize()[:, 96:], tail.dequantize())


def test_chunks_of_rows_change_nothing(monkeypatch):
    w = torch.randn(300, 130, generator=torch.Generator().manual_seed(3)).half()
    for scheme in SCHEMES:
        monkeypatch.undo()
        whole = quantize(w, scheme)
        monkeypatch.setattr("bitline.bitstream.ROW_CHUNK_BYTES", 130 * 7)
        parts = quantize(w, scheme)
        for name, tensor in whole.tensors().items():
            assert torch.equal(tensor.view(torch.uint8), parts.tensors()[name].view(torch.uint8)), (scheme, name)


def test_group_sizes():
    w = torch.randn(4, 256)
    assert quantize(w, "W4A16").spec.block == (1, 128)
    assert quantize(w, "W4A16", group_size=-1).spec.block == (1, 256)
    assert quantize(w, "W4A16", group_size=7).spec.block == (1, 7)
    assert quantize(w, "W4A16", group_size=1000).spec.block == (1, 256)
    assert quantize(w, "W8A8", group_size=-1).spec.block == (1, 256)
    assert quantize(w, "NVFP4", group_size=16).spec.block == (1, 16)
    assert quantize(w, "FP8").spec.block == (4, 256)
    assert quantize(torch.randn(200, 300), "FP8_BLOCK", group_size=128).scale.shape == (2, 3)


def test_bias_input_scale_and_strides():
    w, bias = torch.randn(8, 64), torch.randn(8)
    qw = quantize(w, "FP8", bias=bias, input_scale=0.5)
    assert qw.spec.bias and torch.equal(qw.bias, bias) and float(qw.input_scale) == 0.5
    assert float(quantize(w, "FP8").input_scale) == 1.0
    assert float(quantize(w, "NVFP4", input_scale=torch.tensor([12.0])).input_scale) == 12.0
    transposed = quantize(w.T.contiguous().T, "W4A16")
    assert torch.equal(transposed.codes, quantize(w, "W4A16").codes)
    assert quantize(w, "fp8_dynamic").spec.act.granularity == "token"


def test_the_weight_is_not_changed():
    for scheme in SCHEMES:
        w = torch.randn(130, 70)
        before = w.clone()
        quantize(w, scheme)
        assert torch.equal(w, before), scheme


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda w: quantize(w, "W5A5"), ("W5A5", "W4A16", "NVFP4A16")),
        (lambda w: quantize(w[0], "W4A16"), ("two-dimensional", "[8]")),
        (lambda w: quantize(w[:0], "W4A16"), ("two-dimensional", "[0, 8]")),
        (lambda w: quantize(w.int(), "W4A16"), ("int32", "bfloat16")),
        (lambda w: quantize(w.double(), "W4A16"), ("float64", "w.float()")),
        (lambda w: quantize(w / 0, "W4A16"), ("finite", "inf", "[0, 0]")),
        (lambda w: quantize(w.index_fill(1, torch.tensor(3), float("nan")), "FP8"), ("nan", "[0, 3]")),
        (lambda w: quantize(w, "W4A16", group_size=0), ("group size", "found 0")),
        (lambda w: quantize(w, "W4A16", group_size=-2), ("group size", "found -2")),
        (lambda w: quantize(w, "NVFP4", group_size=32), ("NVFP4", "found 32", "expected 16")),
        (lambda w: quantize(w, "FP8", group_size=128), ("FP8", "found 128")),
        (lambda w: quantize(w, "W8A8", group_size=128), ("W8A8", "expected -1")),
        (lambda w: quantize(w, "W4A16", input_scale=1.0), ("W4A16 has no input scale",)),
        (lambda w: quantize(w, "FP8", input_scale=-1.0), ("positive", "-1.0")),
        (lambda w: quantize([[1.0]], "W4A16"), ("list",)),
    ],
)
def test_errors_name_what_was_found_and_expected(call, words):
    with pytest.raises(InputError) as caught:
        call(torch.ones(2, 8))
    for word in words:
        assert word in str(caught.value), caught.value


def test_it_is_public():
    assert bitline.quantize is quantize and "quantize" in bitline.__all__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ABOUT["cases"], ids=lambda case: case["key"])
def test_a_gpu_gives_the_same_bits(case):
    w = RECORDED[case["weight"]]
    here = quantize(w, case["scheme"], group_size=case["group_size"])
    there = quantize(w.cuda(), case["scheme"], group_size=case["group_size"])
    assert there.device.type == "cuda" and there.spec == here.spec
    for name, tensor in here.tensors().items():
        assert torch.equal(there.tensors()[name].cpu().view(torch.uint8), tensor.view(torch.uint8)), name
