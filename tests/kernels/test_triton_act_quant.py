"""Fused activation quantization under Triton's interpreter, in a process of its own: bit for bit what act_quant computes.

FP8 codes are made by integer arithmetic here, as on GPUs without the conversion; the instruction runs on GPUs (tests/gpu).
"""

from dataclasses import replace

import pytest
import torch
from interpreter import needs_interpreter, run_interpreted, tiers

from bitline import types
from bitline.act_quant import fake_quantize, quantize_input
from bitline.kernels.triton import act_quant
from bitline.quantized_input import QuantizedInput, reference_input
from bitline.types import ActSpec
from thinning import thinned

pytest.importorskip("triton")
E4M3 = types.float8_e4m3fn
PER_TOKEN = [
    ActSpec(types.int8), ActSpec(types.int8, True, "token", 0, False), ActSpec(types.int8, False, "tensor"),
    ActSpec(types.int8, False, "tensor", 0, False), ActSpec(E4M3), ActSpec(E4M3, False, "tensor"), ActSpec(E4M3, True, "tensor"),
]  # fmt: skip
PER_TOKEN += [replace(act, limit=20.0) for act in PER_TOKEN if act.dynamic]
PER_GROUP = [ActSpec(E4M3, True, "group", g, scale=scale) for g in (32, 128) for scale in ("float", "e8m0")]
PER_GROUP += [ActSpec(E4M3, True, "group", 128, limit=20.0)]
FUSED = [PER_TOKEN[0], PER_TOKEN[1], PER_TOKEN[4], PER_TOKEN[5], PER_GROUP[0], PER_GROUP[3]]


def _x(dtype):
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).mul(30).to(dtype)
    x[2] = 0
    x[3, :32] = 1e-30 if dtype != torch.float16 else 1e-7
    return x


def _static(act):
    both = torch.tensor([0.37]), torch.tensor([-5], dtype=torch.int32)
    return () if act.dynamic else both[: 1 + (not act.symmetric)]


@pytest.fixture(params=["torch", pytest.param("triton", marks=needs_interpreter)])
def backend(request, monkeypatch):
    monkeypatch.setattr(act_quant, "_use_triton", lambda x: request.param == "triton")
    return request.param


@tiers
def test_under_the_interpreter(tier):
    run_interpreted(__file__, tier)


@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16, torch.float32], 3))
@pytest.mark.parametrize("act", PER_TOKEN, ids=str)
def test_per_token_and_tensor(backend, act, dtype):
    x = _x(dtype)
    want, want_scale, want_zero = quantize_input(x, act, *_static(act))
    for m_padded, k_padded in ((5, 300), (8, 304)):
        codes, scale, zero = act_quant.quantize_padded(x, act, m_padded, k_padded, *_static(act))
        assert codes.shape == (m_padded, k_padded) and scale.shape in ((m_padded,), (1,))
        assert torch.equal(codes[:5, :300].view(torch.uint8), want.view(torch.uint8))
        assert not codes[5:].view(torch.uint8).any() and not codes[:, 300:].view(torch.uint8).any()
        assert torch.equal(scale[: want_scale.numel()], want_scale.view(-1)) and (zero is None) == (want_zero is None)
        assert zero is None or torch.equal(zero[: want_zero.numel()], want_zero.view(-1))
    one = act_quant.quantize_padded(x[:1], act, 4, 300, *_static(act))[1]
    assert one.shape == ((4,) if act.granularity == "token" else (1,))


@pytest.mark.parametrize("m_major", [False, True])
@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16], 2))
@pytest.mark.parametrize("act", PER_GROUP, ids=str)
def test_per_group(backend, act, dtype, m_major, monkeypatch):
    x = _x(dtype)
    want = fake_quantize(x, act)
    for m_padded, k_padded in ((5, 300), (8, 384)):
        codes, scale = act_quant.quantize_groups_padded(x, act, m_padded, k_padded, m_major_scales=m_major)
        found = codes.float() * scale.repeat_interleave(act.group_size, 1)[:, :k_padded]
        assert codes.shape == (m_padded, k_padded) and torch.equal(found[:5, :300], want)
        with monkeypatch.context() as patch:
            patch.setattr(act_quant, "_use_triton", lambda x: False)
            assert torch.equal(scale, act_quant.quantize_groups_padded(x, act, m_padded, k_padded)[1])
        assert not codes[5:].view(torch.uint8).any() and not codes[:, 300:].view(torch.uint8).any()
        assert scale.stride() == ((1, m_padded) if m_major else (scale.shape[1], 1)) and bool((scale > 0).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_groups_and_their_zero_points(backend, symmetric):
    act = ActSpec(types.int8, True, "group", 32, symmetric)
    x = _x(torch.float16)
    codes, scale, zero, _ = act_quant.quantize_fused(act_quant.Source(x), act, 5, 300)
    want = reference_input(x, act)
    assert torch.equal(codes, want.codes) and torch.equal(scale, want.scales)
    assert torch.equal(zero, want.zero) if zero is not None else symmetric


def test_every_e4m3_code_tie_and_nan(backend):
    """All values of E4M3, the middles between neighbours, what is next to those, values that saturate, and NaN."""
    values = torch.tensor(sorted(v for v in types.float8_e4m3fn.values() if v == v))
    ties = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(ties, torch.full_like(ties, sign * torch.inf)) for sign in (-1, 1)]
    x = torch.cat([values, ties, *near, torch.tensor([465.0, -1e4, 3e38, torch.nan])]).view(1, -1)
    act, one = ActSpec(E4M3, False, "tensor"), torch.ones(1)
    codes = act_quant.quantize_padded(x, act, 1, x.shape[1], one)[0]
    assert torch.equal(codes.view(torch.uint8), x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("act", thinned(FUSED, 6, start=2), ids=str)
def test_rms_norm(backend, act, dtype, residual):
    """Sums of squares without rounding, so that the norm has the bits of torch's."""
    g = torch.Generator().manual_seed(5)
    x, weight = torch.randint(-3, 4, (5, 300), generator=g).to(dtype), torch.randn(300, generator=g).to(dtype)
    rest = torch.randint(-3, 4, (5, 300), generator=g).to(dtype) if residual else None
    source = act_quant.Source(x, "rms_norm", weight, rest, 1e-6)
    values, total = source.unfused()
    _compare_fused(source, values, act)
    found = act_quant.quantize_fused(source, act, 5, 300, *_static(act))
    assert torch.equal(found.residual, total) if residual else found.residual is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("act", thinned(FUSED, 6, start=2), ids=str)
def test_silu_mul_of_the_halves_of_one_tensor(backend, act, dtype):
    both = torch.randn(5, 600, generator=torch.Generator().manual_seed(6)).mul(3).to(dtype)
    source = act_quant.Source(both[:, :300], "silu_mul", both[:, 300:])
    _compare_fused(source, source.unfused()[0], act)


def _compare_fused(source, values, act):
    """Codes and scales of the fused chain against those of its values: the exponential and the root round differently, so a few
    values are a step away from torch's."""
    found = act_quant.quantize_fused(source, act, 5, 300, *_static(act))
    want = reference_input(values, act, *_static(act))
    assert torch.allclose(found.scale, want.scales, rtol=2e-3, atol=0)
    if found.zero is not None:
        assert int((found.zero - want.zero).abs().max()) <= 1
    differ = found.codes.float() != want.codes.float()
    assert float(differ.float().mean()) < 0.02
    values, wanted = QuantizedInput(*found[:3]).dequantize(act), want.dequantize(act)
    assert torch.allclose(values, wanted, rtol=0.13, atol=2.1 * float(want.scales.max()))
