"""Fused activation quantization under Triton's interpreter, in a process of its own: bit for bit what act_quant computes.

The interpreter's conversion to FP8 loses a carry out of the mantissa, so FP8 codes are compared on GPUs (tests/gpu), scales here.
"""

from dataclasses import replace

import pytest
import torch
from interpreter import needs_interpreter, run_interpreted, tiers

from bitline import types
from bitline.act_quant import fake_quantize, quantize_input
from bitline.kernels.triton import act_quant
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
        exact = backend == "torch" or act.dtype is types.int8
        assert not exact or torch.equal(codes[:5, :300].view(torch.uint8), want.view(torch.uint8))
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
        assert codes.shape == (m_padded, k_padded) and (backend == "triton" or torch.equal(found[:5, :300], want))
        with monkeypatch.context() as patch:
            patch.setattr(act_quant, "_use_triton", lambda x: False)
            assert torch.equal(scale, act_quant.quantize_groups_padded(x, act, m_padded, k_padded)[1])
        assert not codes[5:].view(torch.uint8).any() and not codes[:, 300:].view(torch.uint8).any()
        assert scale.stride() == ((1, m_padded) if m_major else (scale.shape[1], 1)) and bool((scale > 0).all())
