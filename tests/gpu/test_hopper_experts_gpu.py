"""Experts of GluonHopperLinearKernel on a Hopper GPU: accuracy, exact data, every config, CUDA graphs, determinism."""

import pytest
import torch
from graphs import captured

from bitline import types
from bitline.errors import InputError
from bitline.expert_gate import ExpertGate
from bitline.kernels.hopper import experts, experts_config
from bitline.testing import poison
from bitline.testing.generators import inputs, lossless_inputs
from bitline.types import ActSpec, LinearSpec
from experts_oracle import SILU, SWIGLU, Experts, routing, specs_of

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HOPPER, reason="needs an H100 or H200")]

F16, KERNEL = torch.float16, "GluonHopperLinearKernel"
RELU, TOKENS = ExpertGate("relu", False), (1, 2, 3, 7, 17, 65, 300, 2100)
W4 = LinearSpec(512, 768, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)  # the second projection
MX4 = LinearSpec(320, 192, types.float4_e2m1, (1, 32), scale_dtype=torch.float8_e8m0fnu, bias=True)
LAYERS = [  # (second projection, gate, K)
    (W4, SILU, 1024), (W4.replace(bias=True), RELU, 520), (MX4, SWIGLU, 512),
    (W4.replace(n=544, k=720, block=(1, 16)), ExpertGate("gelu"), 1032),  # W's last tiles are partial, K ends within a K block
    (W4.replace(weight=types.uint4, zero="int", block=(1, 64), act_dtype=F16, bias=True), ExpertGate("gelu_tanh"), 1024),
    (W4.replace(weight=types.int8, block=(1, 768)), ExpertGate("relu2"), 1024),
    (W4.replace(weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=torch.float32), SILU, 1024),
    (W4.replace(act_dtype=F16, scale_dtype=F16), SILU, 1024),
    (W4.replace(weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=torch.float32,
                act=ActSpec(types.float8_e4m3fn, True, "group", 128)), SILU, 1024),
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """How often all experts ran in one call."""
    seen, run = [], experts.run_experts
    monkeypatch.setattr(experts, "run_experts", lambda *a, **k: (seen.append(1), run(*a, **k))[1])
    return seen


def _run(layer, x, index, weights):
    """The layer's result, computed in poisoned memory, on the CPU."""
    with poison():
        name = KERNEL if layer.up[0].spec.act is None else "TritonFakeQuantLinearKernel"
        return layer.on(name, "cuda")(x.cuda(), index.cuda(), weights.cuda()).cpu()


@pytest.mark.parametrize("case", LAYERS, ids=lambda c: f"{c[0].scheme}-{c[1].activation}")
def test_random_layers(case, calls):
    down, gate, k = case
    up, _ = specs_of(down, gate, k)
    layer = Experts.make(up, down, gate, 8)
    for tokens in TOKENS:
        x, (index, weights) = inputs(tokens, up), routing(tokens, 2, 8)
        layer.check(_run(layer, x, index, weights), x, index, weights)
    assert len(calls) == len(TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F16])
def test_lossless_data_is_exact(dtype, calls):
    for base, gate in ((W4, RELU), (W4.replace(weight=types.uint4, zero="int", bias=True), ExpertGate("relu"))):
        up, down = specs_of(base.replace(act_dtype=dtype), gate, 520)
        layer = Experts.make(up, down, gate, 6, lossless=True)
        for tokens in TOKENS:
            x, (index, _) = lossless_inputs(tokens, up), routing(tokens, 2, 7, seed=tokens)  # 6 stands for no expert
            weights = torch.full(index.shape, 0.5)
            layer.check_exact(_run(layer, x, index, weights), x, index, weights, each=True)
    assert len(calls) == 2 * len(TOKENS)


@pytest.mark.parametrize("gate", [SILU, RELU], ids=["gated", "plain"])
@pytest.mark.parametrize("tile", [8, 16, 32, 64, 128])
def test_every_config(monkeypatch, gate, tile):
    """Each tile for few pairs and for many, and each shape of the small kernel."""
    up, down = specs_of(W4, gate, 1024)
    layer = Experts.make(up, down, gate, 8)
    shapes = experts_config._GATED if gate.gated else experts_config._PLAIN
    for shape in shapes if tile <= experts.LARGEST_BLOCK else (None,):
        for tokens in (3, 100):
            monkeypatch.setattr(experts, "_plans", {})
            if shape:
                monkeypatch.setattr(experts_config, "_GATED", (shape,))
                monkeypatch.setattr(experts_config, "_PLAIN", (shape,))
            monkeypatch.setattr(experts, "load_of", lambda *_, t=tokens: (tile, True, 1000.0 if t == 3 else 4.0))
            x, (index, weights) = inputs(tokens, up), routing(tokens, 2, 8, seed=tokens)
            layer.check(_run(layer, x, index, weights), x, index, weights)


@pytest.mark.parametrize("tokens", [4, 80, 300])
def test_a_graph_replays_with_other_routings(tokens):
    """Also with all tokens on one expert, and with numbers out of range, which count as no expert."""
    up, down = specs_of(W4, RELU, 520)
    layer = Experts.make(up, down, RELU, 6, lossless=True)
    module, x = layer.on(KERNEL, "cuda"), lossless_inputs(tokens, up)
    index, weights = torch.zeros(tokens, 2, dtype=torch.int64, device="cuda"), torch.full((tokens, 2), 0.5, device="cuda")
    static = x.cuda()
    graph, y = captured(lambda: module(static, index, weights), warm_up=2)
    for seed in range(5):
        other, _ = routing(tokens, 2, 7, seed)
        if seed == 3:
            other.fill_(6)
        index.copy_(other)
        if seed == 2:
            other[0], index[0] = 6, torch.tensor([-1, 1 << 32], device="cuda")
        if seed == 4:
            other.fill_(5), index.fill_(5)
        y.fill_(torch.nan)
        graph.replay()
        layer.check_exact(y.cpu(), x, other, weights.cpu(), each=True)


@pytest.mark.parametrize("tokens", [4, 80, 300, 2100])
def test_the_same_call_gives_the_same_bits(tokens):
    up, down = specs_of(W4, SILU, 520)
    module, x = Experts.make(up, down, SILU, 8).on(KERNEL, "cuda"), inputs(tokens, up, device="cuda")
    index, weights = (t.cuda() for t in routing(tokens, 2, 8))
    first = module(x, index, weights)
    assert all(torch.equal(module(x, index, weights), first) for _ in range(50))


def test_tensors_of_any_kind():
    """int32 numbers, bfloat16 weights, misaligned and strided tensors; one on a CPU is refused."""
    up, down = specs_of(W4, SILU, 520)
    module, x = Experts.make(up, down, SILU, 8).on(KERNEL, "cuda"), inputs(20, up, device="cuda")
    index, weights = (t.cuda() for t in routing(20, 2, 8))
    want = module(x, index, weights)
    shifted = torch.cat((x.new_zeros(1), x.view(-1)))[1:].view(x.shape)
    assert shifted.data_ptr() % 16 and torch.equal(module(shifted, index.int(), weights), want)
    assert torch.equal(module(x, index.t().contiguous().t(), torch.stack((weights, weights), 2)[..., 0]), want)
    assert torch.allclose(module(x, index, weights.bfloat16()).float(), want.float(), rtol=0.02, atol=0.1)
    with pytest.raises(InputError, match="on one GPU"):
        module(x, index.cpu(), weights)
