"""Quantization of inputs by Triton's kernels, under its interpreter in a process of its own: bit for bit the definition.

Its conversion to FP8 loses a mantissa's carry, so that FP8 codes of the kernels are compared on GPUs (tests/gpu) and scales here.
"""

from dataclasses import replace

import pytest
import torch
from interpreter import inside, run_inside

from bitline import types
from bitline.act_quant import fake_quantize, quantize_input
from bitline.kernels.triton import act_quant
from bitline.types import ActSpec

pytest.importorskip("triton")
E4M3 = types.float8_e4m3fn
TOKENS = [
    ActSpec(types.int8), ActSpec(types.int8, True, "token", 0, False), ActSpec(types.int8, False, "tensor"),
    ActSpec(types.int8, False, "tensor", 0, False), ActSpec(E4M3), ActSpec(E4M3, False, "tensor"), ActSpec(E4M3, True, "tensor"),
]  # fmt: skip
TOKENS += [replace(act, limit=20.0) for act in TOKENS if act.dynamic]
GROUPS = [ActSpec(E4M3, True, "group", g, scale=scale) for g in (32, 128) for scale in ("float", "e8m0")]
GROUPS += [ActSpec(E4M3, True, "group", 128, limit=20.0)]


def _x(dtype):
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).mul(30).to(dtype)
    x[2] = 0
    x[3, :32] = 1e-30 if dtype != torch.float16 else 1e-7
    return x


def _given(act):
    both = torch.tensor([0.37]), torch.tensor([-5], dtype=torch.int32)
    return () if act.dynamic else both[: 1 + (not act.symmetric)]


@pytest.fixture(params=["torch", pytest.param("triton", marks=inside)])
def way(request, monkeypatch):
    monkeypatch.setattr(act_quant, "_compiled", lambda x: request.param == "triton")
    return request.param


def test_under_the_interpreter():
    run_inside(__file__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("act", TOKENS, ids=str)
def test_rows(way, act, dtype):
    x = _x(dtype)
    want, want_scale, want_zero = quantize_input(x, act, *_given(act))
    for rows, columns in ((5, 300), (8, 304)):
        codes, scale, zero = act_quant.rows_of(x, act, rows, columns, *_given(act))
        assert codes.shape == (rows, columns) and scale.shape in ((rows,), (1,))
        exact = way == "torch" or act.dtype is types.int8
        assert not exact or torch.equal(codes[:5, :300].view(torch.uint8), want.view(torch.uint8))
        assert not codes[5:].view(torch.uint8).any() and not codes[:, 300:].view(torch.uint8).any()
        assert torch.equal(scale[: want_scale.numel()], want_scale.view(-1)) and (zero is None) == (want_zero is None)
        assert zero is None or torch.equal(zero[: want_zero.numel()], want_zero.view(-1))
    one = act_quant.rows_of(x[:1], act, 4, 300, *_given(act))[1]
    assert one.shape == ((4,) if act.granularity == "token" else (1,))


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", GROUPS, ids=str)
def test_groups(way, act, dtype, by_group, monkeypatch):
    x = _x(dtype)
    want = fake_quantize(x, act)
    for rows, columns in ((5, 300), (8, 384)):
        codes, scale = act_quant.groups_of(x, act, rows, columns, scales_by_group=by_group)
        found = codes.float() * scale.repeat_interleave(act.group_size, 1)[:, :columns]
        assert codes.shape == (rows, columns) and (way == "triton" or torch.equal(found[:5, :300], want))
        with monkeypatch.context() as patch:
            patch.setattr(act_quant, "_compiled", lambda x: False)
            assert torch.equal(scale, act_quant.groups_of(x, act, rows, columns)[1])
        assert not codes[5:].view(torch.uint8).any() and not codes[:, 300:].view(torch.uint8).any()
        assert scale.stride() == ((1, rows) if by_group else (scale.shape[1], 1)) and bool((scale > 0).all())
