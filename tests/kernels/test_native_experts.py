"""The native core's experts: every result has the bits of the same kernel called expert by expert, and the gates are right."""

import dataclasses
import math

import pytest
import torch

from bitline import InputError, native, types
from bitline.errors import BitlineError
from bitline.expert_gate import ACTIVATIONS, ExpertGate
from bitline.experts import ExpertStack, _stack_like, loop_over_experts
from bitline.kernels.cpu.native_linear import CPUBatchInvariantLinearKernel
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel as Kernel
from bitline.rtn import quantize
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_spec, random_weight
from bitline.testing.poison import poison
from bitline.testing.tolerance import FACTOR, reference64, torch_linear
from bitline.types import ActSpec, LinearSpec

pytestmark = pytest.mark.skipif(len(native.isas()) < 2, reason="no level with linear kernels here")

E, K, INNER, N = 5, 130, 33, 70
TOKENS = (1, 2, 3, 7, 17, 65)
BASE = LinearSpec(2 * INNER, K, types.uint4b8, (1, 32), scale_dtype=torch.float32)
NVFP4 = {"weight": types.float4_e2m1, "block": (1, 16), "scale_dtype": torch.float8_e4m3fn}
FORMATS = {
    "W4A16": {}, "bias": {"bias": True}, "float16": {"act_dtype": torch.float16, "bias": True},
    "float32": {"act_dtype": torch.float32, "bias": True}, "act-order": {"act_order": True},
    "zeros": {"weight": types.uint4, "zero": "int"}, "offsets": {"weight": types.uint5, "zero": "float"},
    "3 bits": {"weight": types.uint3b4}, "6 bits": {"weight": types.uint6b32}, "8 bits": {"weight": types.int8},
    "MXFP4": {"weight": types.float4_e2m1, "scale_dtype": torch.float8_e8m0fnu},
    "NVFP4": NVFP4 | {"scale2_block": (1 << 10, 1 << 10)}, "FP8": {"weight": types.float8_e4m3fn, "block": (16, 32)},
    "E5M2": {"weight": types.float8_e5m2}, "W4A8": {"act": ActSpec(types.int8)},
    "W8A8": {"weight": types.int8, "act": ActSpec(types.int8)},
    "W8A8 static": {"weight": types.int8, "act": ActSpec(types.int8, False, "tensor", 0, False)},
    "W8A8 tensor": {"weight": types.int8, "act": ActSpec(types.int8, True, "tensor")},
    "W8A8-FP8": {"weight": types.float8_e4m3fn, "act": ActSpec(types.float8_e4m3fn)},
    "block FP8": {"weight": types.float8_e4m3fn, "block": (16, 32),
                  "act": ActSpec(types.float8_e4m3fn, granularity="group", group_size=32)},
    "MXFP4 activations": {"weight": types.float4_e2m1, "scale_dtype": torch.float8_e8m0fnu,
                          "act": ActSpec(types.float4_e2m1, granularity="group", group_size=32, scale="e8m0")},
}  # fmt: skip
# Gates whose float32 arithmetic has the same bits in torch.
EXACT_GATES = (ExpertGate("relu2"), ExpertGate("relu", gated=False))


def specs_of(name, gate):
    """Both projections of a format."""
    changes = dict(FORMATS[name])
    up = BASE.replace(n=(1 + gate.gated) * INNER, k=K)
    down = BASE.replace(n=N, k=INNER)
    if "scale2_block" in changes:
        return [spec.replace(**changes | {"scale2_block": (spec.n, spec.k)}) for spec in (up, down)]
    return [spec.replace(**changes) for spec in (up, down)]


class Experts:
    """Experts of two specs, packed and stacked."""

    def __init__(self, specs, gate, kernel=Kernel, make=random_weight, count=E):
        self.kernel, self.specs, self.gate, self.count = kernel, specs, gate, count
        self.weights = [[make(spec, 10 * e + part) for e in range(count)] for part, spec in enumerate(specs)]
        self.stacks, self.biases = [], []
        for weights in self.weights:
            packed = [kernel.pack(weight)["weight"] for weight in weights]
            stack = _stack_like(packed[0], count)
            for e, tensor in enumerate(packed):
                stack[e] = tensor
            self.stacks.append(stack)
            biases = [weight.bias for weight in weights]
            self.biases.append(None if biases[0] is None else torch.stack(biases).to(weights[0].spec.act_dtype))

    def __call__(self, x, index, weights):
        assert self.kernel.can_experts(*self.specs, self.gate)
        (up, down), (up_bias, down_bias) = self.stacks, self.biases
        with poison():
            return self.kernel.apply_experts(x, index, weights, [up], up_bias, [down], down_bias, *self.specs, self.gate)

    def project(self, part, expert, x):
        """The same kernel for one expert."""
        bias = self.biases[part]
        return self.kernel.apply(x, [self.stacks[part][expert]], None if bias is None else bias[expert], self.specs[part])

    def looped(self, x, index, weights):
        """Expert by expert; the gate in float32, rounded once."""

        def expert(e, rows):
            h = self.project(0, e, rows)
            return self.project(1, e, self.gate(h.float()).to(h.dtype))

        return loop_over_experts(x, index, weights, self.count, expert)


def routing(tokens, top_k=2, count=E, seed=0, none=True):
    """Random experts, the same one twice in a row at times, and none for some; weights of both signs."""
    g = torch.Generator().manual_seed(seed + 100 * tokens)
    index = torch.randint(count + (none and tokens > 1), (tokens, top_k), generator=g)
    return index, torch.randn(tokens, top_k, generator=g)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("gate", EXACT_GATES, ids=lambda gate: gate.key)
@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_of_the_kernel_for_each_expert(kernel_level, threads, name, gate):
    experts = Experts(specs_of(name, gate), gate)
    for tokens in TOKENS:
        x = inputs(tokens, experts.specs[0], tokens)
        index, weights = routing(tokens)
        if bool((index == E).all()):
            index[0, 0] = 1
        assert torch.equal(experts(x, index, weights), experts.looped(x, index, weights)), tokens


def random_specs():
    """Two projections of random formats that fit each other. Ragged weights differ in size, and are not stacked."""
    for seed in range(80):
        up, down = random_spec(seed), random_spec(seed + 1000)
        gate = ExpertGate("relu2", gated=up.n % 2 == 0)
        if not up.ragged and not down.ragged and down.scale2_block is None:
            down = dataclasses.replace(down, k=up.n // (1 + gate.gated), act_dtype=up.act_dtype)
            if Kernel.can_experts(up, down, gate):
                yield pytest.param(up, down, gate, id=str(seed))


@pytest.mark.parametrize(("up", "down", "gate"), list(random_specs()))
def test_random_formats(up, down, gate):
    experts = Experts([up, down], gate, count=3)
    for tokens in (1, 4, 19):
        x, (index, weights) = inputs(tokens, up, tokens), routing(tokens, 3, 3, none=False)
        want, found = experts.looped(x, index, weights), experts(x, index, weights)
        assert torch.equal(found.isnan(), want.isnan()) and torch.equal(found.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("name", [name for name, changes in FORMATS.items() if "act" not in changes])
def test_lossless_data_is_exact(kernel_level, name):
    experts = Experts([spec.replace(act_dtype=torch.float32) for spec in specs_of(name, EXACT_GATES[1])], EXACT_GATES[1],
                      make=lossless_weight)  # fmt: skip
    for tokens in (1, 3, 17):
        x, (index, weights) = lossless_inputs(tokens, experts.specs[0], tokens), routing(tokens, none=False)
        weights = weights.sign()
        want = torch.zeros(tokens, N, dtype=torch.float64)
        for t in range(tokens):
            for j, e in enumerate(index[t].tolist()):
                h = reference64(x[t : t + 1], experts.weights[0][e]).relu().float()
                want[t] += weights[t, j] * reference64(h, experts.weights[1][e])[0].float()
        assert torch.equal(experts(x, index, weights).double(), want)


GATES = [ExpertGate(name, gated) for name in ACTIVATIONS for gated in (True, False)] + [ExpertGate("silu", True, 1.702, 7.0)]


def looped_in(experts, layer, x, index, weights):
    """Expert by expert by layer(rows, weight), all in x's dtype."""
    up, down = experts.weights
    return loop_over_experts(x, index, weights, E, lambda e, rows: layer(experts.gate(layer(rows, up[e])).to(x.dtype), down[e]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.key)
def test_errors_are_at_most_twice_those_of_dense_layers(gate, dtype):
    experts = Experts([spec.replace(act_dtype=dtype) for spec in specs_of("bias", gate)], gate)
    for tokens in TOKENS:
        x = inputs(tokens, experts.specs[0], tokens)
        index, weights = routing(tokens, none=False)
        exact = looped_in(experts, reference64, x.double(), index, weights.double())
        allowed = FACTOR * (looped_in(experts, torch_linear, x, index, weights).double() - exact).abs().max()
        assert (experts(x, index, weights).double() - exact).abs().max() <= allowed, tokens


SPECIAL = (0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 3, -3, 5.5, -5.5, 7, -7, 12, -12, 30, -30, 86, -86, 90, -90, 1e4, -1e4)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.key)
def test_gates_element_by_element(gate):
    """x = 0 and an identity: h is the bias, and y the gate's result."""
    identity = quantize(torch.eye(64), "W8A16", group_size=32).with_act_dtype(torch.float32)
    up = BASE.replace(n=(1 + gate.gated) * 64, k=32, bias=True, act_dtype=torch.float32)
    kernel = CPUBatchInvariantLinearKernel  # no digits of x, which are relative to the largest element
    experts = Experts([up, identity.spec], gate, kernel, count=1)
    experts.stacks[1][0] = kernel.pack(identity)["weight"]
    bias = torch.cat([torch.linspace(-9, 9, 42), torch.tensor(SPECIAL), torch.tensor(SPECIAL), torch.linspace(3, -4, 42)])[: up.n]
    experts.biases[0][0] = bias
    call = experts, (torch.zeros(1, 32), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    y, want = call[0](*call[1])[0].double(), gate(bias.double())
    scale = identity.dequantize(torch.float32).diagonal().double()
    cancelled = 1e-14 if "gelu" in gate.activation else 1e-25  # by torch's 1 + erf and 1 + tanh in float64
    assert torch.allclose(y, want * scale, rtol=4e-6, atol=cancelled)
    experts.biases[0][0, 3] = math.nan
    assert bool(call[0](*call[1]).isnan().all())


@pytest.fixture(scope="module")
def plain():
    gate = EXACT_GATES[0]
    return Experts(specs_of("W4A16", gate), gate)


def test_all_tokens_on_one_expert_and_more_than_one_pass(plain):
    for tokens, index in ((9, torch.full((9, 1), 3)), (1100, torch.full((1100, 1), 1)), (1100, routing(1100, 3)[0])):
        x = inputs(tokens, plain.specs[0], 1)
        weights = torch.rand(index.shape)
        assert torch.equal(plain(x, index, weights), plain.looped(x, index, weights))


def test_a_scale_of_the_tensor_is_of_all_tokens_of_an_expert():
    gate = EXACT_GATES[0]
    experts = Experts(specs_of("W8A8 tensor", gate), gate, count=2)
    x = inputs(1100, experts.specs[0], 1) * torch.linspace(0.1, 4, 1100).unsqueeze(1).bfloat16()
    index, weights = torch.zeros(1100, 1, dtype=torch.int64), torch.ones(1100, 1)
    assert torch.equal(experts(x, index, weights), experts.looped(x, index, weights))


def test_tokens_without_experts(plain):
    x, weights = inputs(4, plain.specs[0], 1), torch.full((4, 2), math.nan)
    index = torch.tensor([[E, E], [0, E], [E, 2], [E, E]])
    weights[1, 0], weights[2, 1] = 2.0, -1.0
    y = plain(x, index, weights)
    assert bool((y[[0, 3]] == 0).all())
    alone = plain(x[1:3], torch.tensor([[0], [2]]), torch.tensor([[2.0], [-1.0]]))
    assert torch.equal(y[1:3], alone) and bool(alone.any())
    assert bool((plain(x, torch.full((4, 2), E), weights) == 0).all())


def test_the_same_expert_twice_in_a_row(plain):
    x, index = inputs(1, plain.specs[0], 1), torch.tensor([[2, 2, 0]])
    weights = torch.tensor([[0.5, 0.25, 0.0]])
    assert torch.equal(plain(x, index, weights), plain.looped(x, index, weights))


def test_indices_and_weights_of_any_dtype_and_strides(plain):
    x, (index, weights) = inputs(7, plain.specs[0], 1), routing(7)
    want = plain(x, index, weights.bfloat16().float())
    assert torch.equal(plain(x, index.int(), weights.bfloat16()), want)
    wide = torch.full((7, 9), -1).index_copy(1, torch.tensor([1, 5]), index)[:, 1:6:4]
    assert not wide.is_contiguous()
    assert torch.equal(plain(x, wide, weights.bfloat16().double().T.contiguous().T), want)


@pytest.mark.parametrize("bad", [-1, E + 1, 1 << 40, -(1 << 62)])
def test_numbers_out_of_range(plain, bad):
    index = torch.tensor([[0, 1], [1, bad]])
    with pytest.raises(InputError, match="out of range"):
        plain(inputs(2, plain.specs[0], 1), index, torch.ones(2, 2))


def test_many_experts_of_which_few_are_used():
    gate, count = EXACT_GATES[0], 300
    experts = Experts([LinearSpec(8, 16, types.uint4b8, (1, 16)), LinearSpec(5, 4, types.uint4b8, (1, 4))], gate, count=count)
    for tokens, top_k in ((2, 4), (700, 3)):
        x, (index, weights) = inputs(tokens, experts.specs[0], 1), routing(tokens, top_k, count)
        assert torch.equal(experts(x, index, weights), experts.looped(x, index, weights))


@pytest.mark.parametrize("name", ["W4A16", "FP8", "float32"])
def test_a_batch_invariant_kernel_gives_a_token_the_same_bits_in_every_batch(kernel_level, name):
    experts = Experts(specs_of(name, GATES[0]), GATES[0], CPUBatchInvariantLinearKernel)
    x, (index, weights) = inputs(65, experts.specs[0], 1), routing(65)
    whole = experts(x, index, weights)
    for first, last in ((0, 1), (3, 5), (7, 40), (60, 65)):
        assert torch.equal(experts(x[first:last], index[first:last], weights[first:last]), whole[first:last])


def test_a_stack_runs_it_through_the_operator(plain, monkeypatch):
    from bitline.experts import OP, QuantExperts
    from bitline.select import Policy

    device, policy = torch.device("cpu"), Policy(backend="native")
    stacks = []
    for spec, weights in zip(plain.specs, plain.weights, strict=True):
        stack = ExpertStack(spec, E, device, policy)
        for e, weight in enumerate(weights):
            stack.put(e, weight)
        stacks.append(stack)
    calls = []
    apply = Kernel.apply_experts.__func__
    monkeypatch.setattr(Kernel, "apply_experts", classmethod(lambda cls, *a: (calls.append(1), apply(cls, *a))[1]))
    layer = QuantExperts([stacks[0]], stacks[1], plain.gate)
    x, (index, weights) = inputs(7, plain.specs[0], 1), routing(7)
    want = plain.looped(x, index, weights)
    assert torch.equal(layer(x, index, weights), want) and calls == [1]
    assert torch.equal(OP(x, index, weights, stacks[0].packed, None, stacks[1].packed, None, stacks[0].choice.best.name,
                          plain.specs[0].key, stacks[1].choice.best.name, plain.specs[1].key, plain.gate.key), want)  # fmt: skip
    assert layer(x[:0], index[:0], weights[:0]).shape == (0, N)


def test_schemes_that_torch_quantizes_are_left_to_the_loop():
    act = ActSpec(types.int8, granularity="group", group_size=128, symmetric=False)
    up, down = specs_of("W4A16", GATES[0])
    assert Kernel.can_experts(up, down, GATES[0])
    assert not Kernel.can_experts(up.replace(act=act), down, GATES[0])
    assert not Kernel.can_experts(up, down.replace(act=act), GATES[0])
    assert not Kernel.can_experts(up, down.replace(k=INNER + 1), GATES[0])


def test_weights_that_do_not_fit(plain):
    x, (index, weights) = inputs(3, plain.specs[0], 1), routing(3, none=False)
    up, down = (stack.clone() for stack in plain.stacks)
    other = Experts(specs_of("8 bits", EXACT_GATES[1]), EXACT_GATES[1])
    with pytest.raises(BitlineError, match="shapes do not fit"):
        Kernel.apply_experts(x, index, weights, [other.stacks[0]], None, [down], None, *plain.specs, plain.gate)
    up[:, :8] = 0
    with pytest.raises(BitlineError, match="another version"):
        Kernel.apply_experts(x, index, weights, [up], None, [down], None, *plain.specs, plain.gate)
