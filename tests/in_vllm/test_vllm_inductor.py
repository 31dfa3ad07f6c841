"""The correction of torch's compiler: a graph of torch alone, whose read of a buffer was scheduled before what fills it."""

import pytest

pytest.importorskip("vllm.engine.arg_utils")

import torch
from torch import Tensor
from torch._inductor.scheduler import SchedulerNode

import bitline.vllm
from bitline.vllm import inductor

LIBRARY = torch.library.Library("bitline_tests", "FRAGMENT")
LIBRARY.define("fill(Tensor(a!) out, Tensor x) -> ()")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("fill", lambda out, x: (out.copy_(x), None)[1], "CPU")
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")
torch.library.register_fake("bitline_tests::fill", lambda _out, _x: None, lib=LIBRARY)
torch.library.register_fake("bitline_tests::twice", torch.empty_like, lib=LIBRARY)


def scores(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As a router does it. The sigmoid, over one dimension, is fused with the sum, over two; both with the first sum."""
    hidden = torch.ops.bitline_tests.twice(x + bias)
    out = torch.zeros(x.shape)
    torch.ops.bitline_tests.fill(out, hidden)
    score = out.sigmoid()
    return score.sum(), score + bias


def compiled_differs() -> bool:
    x, bias = torch.randn(4, 8), torch.randn(8)
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        found = torch.compile(scores, dynamic=True)(x, bias)
    return not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, scores(x, bias), strict=True))


def test_a_read_stays_behind_the_operator_that_fills_the_buffer():
    bitline.vllm.register()
    assert not compiled_differs()


def test_torch_needs_the_correction(monkeypatch):
    """Where this fails, torch has it, and `bitline.vllm.inductor` can go."""
    bitline.vllm.register()
    monkeypatch.setattr(SchedulerNode, "recompute_size_and_body", SchedulerNode.recompute_size_and_body.__wrapped__)
    assert compiled_differs()


def test_it_is_installed_once():
    bitline.vllm.register()
    once = SchedulerNode.recompute_size_and_body
    inductor.install()
    assert SchedulerNode.recompute_size_and_body is once and once.bitline
