"""QuantExperts and its operator: against a plain loop over dequantized weights, routings of every kind, gates, stacks."""

import copy

import pytest
import torch
from torch.nn.functional import silu

from bitline import InputError, Platform, Policy, choose, types
from bitline.expert_counts import active_experts, tokens_per_expert
from bitline.expert_gate import ACTIVATIONS, ExpertGate, recognize
from bitline.experts import (
    EXPERT_ALIGNMENT,
    ExpertStack,
    QuantExperts,
    _resolve,
    expert_policy,
    stack_experts,
)
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.select import fuses_experts
from bitline.testing.generators import random_weight
from bitline.types import ActSpec, LinearSpec

E, HALF, K = 5, 48, 64
REFERENCE = Policy(kernel="ReferenceLinearKernel")


def spec(n, k, **changes):
    base = LinearSpec(n, k, types.uint4b8, (1, 16), scale_dtype=torch.float32, act_dtype=torch.float32)
    return base.replace(**changes)


def projection(n, k, seed, **changes):
    weights = [random_weight(spec(n, k, **changes), seed + e) for e in range(E)]
    return weights, stack_experts(weights.__getitem__, E, True, torch.float32, "cpu", REFERENCE, 2)


def experts(gate=ExpertGate("silu"), bias=False):
    """(module, canonical weights of both projections)."""
    up, up_stack = projection(HALF * (1 + gate.gated), K, 0, bias=bias)
    down, down_stack = projection(K, HALF, 100, bias=bias)
    return QuantExperts([up_stack], down_stack, gate), up, down


def routing(tokens, top_k, seed=0):
    g = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(E, generator=g)[:top_k] for _ in range(tokens)]) if tokens else torch.empty(0, top_k)
    return torch.randn(tokens, K, generator=g), index.long(), torch.rand(tokens, top_k, generator=g)


def plainly(x, index, weights, up, down, gate):
    """In float64, token by token."""
    y = torch.zeros(x.shape[0], K, dtype=torch.float64)
    linear = lambda v, w: v @ w.dequantize(torch.float32).double().t() + (0 if w.bias is None else w.bias.double())
    for t in range(x.shape[0]):
        for j, e in enumerate(index[t].tolist()):
            if e < E:
                y[t] += weights[t, j].double() * linear(gate(linear(x[t].double(), up[e])), down[e])
    return y


def close(y, want):
    assert (y.double() - want).abs().max() <= 2e-6 * want.abs().max()


@pytest.mark.parametrize("gate", [
    ExpertGate("silu"), ExpertGate("gelu_tanh"), ExpertGate("relu2", False), ExpertGate("silu", True, 1.702, 7.0),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
def test_the_weighted_sum_of_the_experts(gate, bias):
    module, up, down = experts(gate, bias)
    for tokens in (1, 2, 17):
        x, index, weights = routing(tokens, 2)
        close(module(x, index, weights), plainly(x, index, weights, up, down, gate))


def test_routings():
    module, up, down = experts()
    x, index, weights = routing(7, 3)
    for changed in (
        torch.full_like(index, 4), torch.zeros_like(index), index[:, :1].expand(-1, 3), torch.where(index == 2, E, index),
    ):  # fmt: skip
        close(module(x, changed, weights), plainly(x, changed, weights, up, down, ExpertGate("silu")))
    assert torch.equal(module(x, index.int(), weights), module(x, index, weights))
    assert module(x[:0], index[:0], weights[:0]).shape == (0, K)
    for bad in (-1, E + 1):
        with pytest.raises(InputError, match="out of range"):
            module(x, torch.where(index == 1, bad, index), weights)


def test_a_wrong_input_is_refused():
    module, _, _ = experts()
    x, index, weights = routing(3, 2)
    for bad in (x.bfloat16(), x[:, 1:], x[None]):
        with pytest.raises(InputError, match="does not fit the experts"):
            module(bad, index, weights)


def test_the_operator_compiles_for_any_number_of_tokens():
    module, _, _ = experts()
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (3, 5, 1):
        given = routing(tokens, 2)
        assert torch.equal(compiled(*given), module(*given))


def test_an_unproven_kernel_of_all_experts_runs_on_cpus_only(monkeypatch):
    class Unproven(ReferenceLinearKernel):
        experts_unproven = True

        @classmethod
        def can_experts(cls, up, down, gate):
            return True

        @classmethod
        def apply_experts(cls, x, *_):
            return x + 1

    monkeypatch.setattr("bitline.experts.kernel_by_name", lambda name: Unproven)
    _resolve.cache_clear()
    try:
        module, _, _ = experts()
        x, index, weights = routing(3, 2)
        assert torch.equal(module(x, index, weights), x + 1)
    finally:
        _resolve.cache_clear()
    layer = spec(HALF, K)
    assert fuses_experts(Unproven, layer, Platform.parse("cpu"))
    assert not fuses_experts(Unproven, layer, Platform.parse("cuda:sm90"))
    assert not fuses_experts(ReferenceLinearKernel, layer, Platform.parse("cpu"))  # it has no such call


def test_kernels_that_run_all_experts_in_one_call_come_first():
    w4 = LinearSpec(1536, 2048, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
    w4 = w4, w4.replace(n=2048, k=768)
    narrow = w4[0].replace(n=1544), w4[1].replace(k=772)  # half of 1544 rows are no whole tiles of 16
    fp8 = tuple(
        s.replace(weight=types.float8_e4m3fn, block=(128, 128), act=ActSpec(types.float8_e4m3fn, True, "group", 128)) for s in w4
    )
    static = tuple(s.replace(act=ActSpec(types.float8_e4m3fn, False, "tensor")) for s in fp8)
    for platform, layers, plain, of_experts in (
        ("cuda:sm90", w4, "GluonHopperLinearKernel", "GluonHopperLinearKernel"),
        ("cuda:sm90", narrow, "GluonHopperLinearKernel", "TritonW4A16LinearKernel"),
        ("cuda:sm90", fp8, None, "TritonFakeQuantLinearKernel"),
        ("cuda:sm89", fp8, None, "TritonFakeQuantLinearKernel"),
        ("cuda:sm89", static, None, None),  # scales that each expert has of its own
        ("cpu:avx512", w4, "CPUWNA16LinearKernel", "CPUWNA16LinearKernel"),
    ):
        alone = choose(layers[0], platform, expert_policy(Policy(), 128, 8))
        chosen = choose(layers[0], platform, expert_policy(Policy(), 128, 8, layers))
        assert plain in (None, alone.best.name)
        assert chosen.best.name == (of_experts or alone.best.name) and chosen.best.fuses_experts == (of_experts is not None)
        if alone.best.name != chosen.best.name:
            other = next(c for c in chosen.candidates if c.name == alone.best.name)
            assert chosen.ranks_behind(other) == "runs the experts one by one" in chosen.explain()
    asked = choose(narrow[0], "cuda:sm90", expert_policy(Policy(kernel="GluonHopper"), 128, 8, narrow))
    assert asked.best.name == "GluonHopperLinearKernel"


def test_a_copy_has_its_own_weights():
    module, _, _ = experts()
    given = routing(3, 2)
    want, twin = module(*given), copy.deepcopy(module)
    for stack in (twin.up[0], twin.down):
        for tensor in stack.packed:
            tensor.zero_()
    assert torch.equal(module(*given), want)


def test_packed_experts_are_contiguous_and_aligned():
    for stack in (projection(3, 33, 0, block=(1, 33))[1], projection(7, 64, 0, bias=True)[1]):
        assert isinstance(stack, ExpertStack)
        for tensor in stack.packed:
            assert all(tensor[e].is_contiguous() and tensor[e].data_ptr() % EXPERT_ALIGNMENT == 0 for e in range(E))
    with pytest.raises(InputError, match="one spec"):
        stack.put(0, random_weight(spec(7, 64), 1))


def test_parts_that_are_not_one_stack_run_through_the_loop():
    module, up, down = experts()
    gates, ups = ([w.narrow(0, at, at + HALF) for w in up] for at in (0, HALF))
    apart = [stack_experts(part.__getitem__, E, True, torch.float32, "cpu", REFERENCE, 2) for part in (gates, ups)]
    each = stack_experts(down.__getitem__, E, False, torch.float32, "cpu", REFERENCE, 2)
    given = routing(9, 2)
    want = plainly(*given, up, down, ExpertGate("silu"))
    close(QuantExperts(apart, module.down, ExpertGate("silu"))(*given), want)
    close(QuantExperts([module.up[0]], each, ExpertGate("silu"))(*given), want)
    function = lambda h: silu(h[..., :HALF]) * h[..., HALF:]
    close(QuantExperts([module.up[0]], module.down, function)(*given), want)
    doubled = QuantExperts([module.up[0]], module.down, ExpertGate("silu"), lambda y: 2 * y)
    close(doubled(*given), 2 * want)


# ---- gates and counts ----------------------------------------------------------------------------------------------------


class Shell:
    """What transformers' experts modules have."""

    has_gate = True
    alpha, limit = 1.702, 7.0

    def __init__(self, function):
        self._apply_gate = self.act_fn = function


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_are_recognized_by_what_they_compute(name):
    act = ACTIVATIONS[name]
    assert recognize(Shell(lambda h: act(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])) == (ExpertGate(name), False)
    assert recognize(Shell(lambda h: act(h[..., ::2]) * h[..., 1::2])) == (ExpertGate(name), True)
    plain = Shell(act)
    plain.has_gate = False
    assert recognize(plain) == (ExpertGate(name, False), False)


def test_the_gate_of_gpt_oss_and_unknown_ones():
    def clamped(h, add=1):
        gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
        return (up + add) * (gate * torch.sigmoid(gate * 1.702))

    assert recognize(Shell(clamped)) == (ExpertGate("silu", True, 1.702, 7.0), True)
    assert recognize(Shell(lambda h: clamped(h, 2))) is None
    assert recognize(Shell(lambda h: 1 / 0)) is None


def test_a_gate_has_a_text_form():
    for gate in (ExpertGate("silu"), ExpertGate("relu2", False), ExpertGate("silu", True, 1.702, 7.0)):
        assert ExpertGate.parse(gate.key) == gate
    for bad in ("", "silu", "swish 1 0.0 0.0", "silu x 0.0 0.0"):
        with pytest.raises(InputError):
            ExpertGate.parse(bad)


def test_expected_counts():
    assert active_experts(128, 8, 1) == pytest.approx(8)
    assert active_experts(8, 8, 3) == 8 and active_experts(8, 2, 1000) == pytest.approx(8)
    assert tokens_per_expert(128, 8, 1) == 1 and tokens_per_expert(128, 8, 4096) == 256
    assert expert_policy(Policy(m=(1, 2, 4096)), 128, 8).m == (1, 256)
