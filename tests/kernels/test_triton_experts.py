"""Experts on the Triton weight-only kernels, under Triton's interpreter, in a process of its own."""

from types import SimpleNamespace

import pytest
import torch
from interpreter import INTERPRETED, needs_interpreter, run_interpreted, tiers

from bitline import types
from bitline.errors import InputError
from bitline.expert_gate import ACTIVATIONS, ExpertGate
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel
from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel
from bitline.testing import poison
from bitline.testing.generators import inputs, lossless_inputs
from bitline.types import ActSpec, LinearSpec
from experts_oracle import SILU, SWIGLU, Experts, routing, specs_of
from thinning import thinned

pytest.importorskip("triton")

if INTERPRETED:
    import triton
    import triton.language as tl

    from bitline.kernels.triton import experts
    from bitline.kernels.triton.device import experts_gate
    from bitline.kernels.triton.heuristics import DeviceTraits

    @triton.jit
    def gate_kernel(h_ptr, y_ptr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
        i = tl.arange(0, 64)
        gate, up = tl.load(h_ptr + i), tl.load(h_ptr + 64 + i)
        if GATED:
            y = experts_gate.gate_up(gate, up, ACTIVATION, ALPHA, LIMIT)
        else:
            y = experts_gate.activate(gate, ACTIVATION)
        tl.store(y_ptr + i, y)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
W4 = LinearSpec(17, 16, types.uint4b8, (1, 32), scale_dtype=BF16)  # the second projection
RELU = ExpertGate("relu", False)
LAYERS = [  # (second projection, gate, K)
    (W4, SILU, 72),
    (W4.replace(n=33, k=37, weight=types.uint4, zero="int", bias=True, act_dtype=F16), SILU, 45),
    (W4.replace(k=35, weight=types.uint3, zero="int", act_order=True), SILU, 70),
    (W4.replace(weight=types.uint2, zero="float", scale_dtype=F16, bias=True), SWIGLU, 72),
    (W4.replace(weight=types.uint6b32, act_dtype=F16, block=(1, 16), bias=True), ExpertGate("gelu"), 48),
    (W4.replace(k=24, weight=types.int8, act_dtype=F32, block=(1, 48), bias=True), ExpertGate("gelu_tanh"), 100),
    (W4.replace(weight=types.uint5b16, n=128, k=128, block=(1, 64)), ExpertGate("relu2", False), 128),
    (W4.replace(weight=types.nf4, block=(1, 64), scale_dtype=F32, act_dtype=F32), ExpertGate("relu2"), 72),
]
MX4 = LinearSpec(17, 40, types.float4_e2m1, (1, 32), scale_dtype=torch.float8_e8m0fnu)
FLOATS = [
    (MX4.replace(bias=True), SWIGLU, 72),
    (MX4.replace(k=33, block=(1, 16), scale_dtype=torch.float8_e4m3fn, act_dtype=F16), SILU, 50),
    (MX4.replace(k=130, weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=F32), SILU, 72),
]


TOKENS, GROUPS = ActSpec(types.int8), ActSpec(types.float8_e4m3fn, True, "group", 128)
QUANTIZED = [  # activations are fake-quantized
    (W4.replace(act=TOKENS, bias=True), SILU, 72),
    (W4.replace(k=130, weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=F32, act=GROUPS), SILU, 200),
    (MX4.replace(act=ActSpec(types.float4_e2m1, True, "group", 32, scale="e8m0")), SWIGLU, 72),
    (MX4.replace(act=ActSpec(types.int8, True, "token", 0, False), act_dtype=F16), ExpertGate("relu2", False), 72),
]


def _name(base):
    if base.act is not None:
        return "TritonFakeQuantLinearKernel"
    return "TritonMinifloatLinearKernel" if base.weight.kind == "float" else "TritonW4A16LinearKernel"


def _run(layer, x, index, weights):
    """The layer's result, computed in poisoned memory."""
    kernel = _name(layer.up[0].spec)
    with poison():
        experts_layer = layer.on(kernel)
        assert experts_layer.down.choice.best.name == kernel
        return experts_layer(x, index, weights)


@tiers
def test_under_the_interpreter(tier):
    run_interpreted(__file__, tier)


@needs_interpreter
@pytest.mark.parametrize("case", thinned(LAYERS + FLOATS + QUANTIZED, 8), ids=lambda c: f"{c[0].scheme}-{c[1].activation}")
@pytest.mark.parametrize("tokens", [2, 40])  # a block for each pair, and pairs sorted by expert
def test_random_layers(case, tokens):
    down, gate, k = case
    up, _ = specs_of(down, gate, k)
    layer = Experts.make(up, down, gate, 4)
    x, (index, weights) = inputs(tokens, up), routing(tokens, 2, 4)
    layer.check(_run(layer, x, index, weights), x, index, weights)


@needs_interpreter
@pytest.mark.parametrize("tokens", thinned([1, 2, 3, 7, 17, 33, 65, 200], 4, start=1))
@pytest.mark.parametrize("dtype", thinned([BF16, F16, F32], 3))
def test_lossless_data_is_exact(tokens, dtype):
    """All sums are exact, so that any wrong term shows; weights are powers of two."""
    cases = ((W4, RELU), (W4.replace(n=9, weight=types.uint4, zero="int", bias=True), ExpertGate("relu")))
    for base, gate in cases[:1] if tokens == 2 else cases:
        up, down = specs_of(base.replace(act_dtype=dtype), gate, 72)
        layer = Experts.make(up, down, gate, 6, lossless=True)
        x, (index, weights) = lossless_inputs(tokens, up), routing(tokens, 2, 6, seed=tokens)
        weights = torch.exp2(-torch.arange(2.0)).expand_as(weights)
        layer.check_exact(_run(layer, x, index, weights), x, index, weights)


@needs_interpreter
@pytest.mark.exhaustive
def test_float32_has_the_bits_of_the_reference_kernel_on_lossless_data():
    up, down = specs_of(W4.replace(act_dtype=F32, bias=True), ExpertGate("relu"), 72)
    layer = Experts.make(up, down, ExpertGate("relu"), 4, lossless=True)
    x, (index, _) = lossless_inputs(36, up), routing(36, 2, 4)
    weights = torch.full((36, 2), 0.5)
    want = layer.on("ReferenceLinearKernel")(x, index, weights)
    assert torch.equal(_run(layer, x, index, weights), want)


ROUTINGS = {  # [T, k] of 4 experts
    "all on one": torch.full((70, 1), 2),
    "empty experts": torch.tensor([[0, 3]]).expand(40, 2),
    "the same expert twice": torch.tensor([[1, 1], [2, 2], [3, 0]]),
    "no expert here and there": torch.tensor([[4, 1], [2, 4], [4, 4]]),
    "no expert, sorted": torch.tensor([[4, 1, 2], [2, 4, 4], [4, 4, 4]]).repeat(30, 1),
    "no expert anywhere": torch.full((50, 2), 4),
    "columns": torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [2, 2, 4, 1]]).repeat(1, 10).t(),
    "int32": torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
}


@needs_interpreter
@pytest.mark.parametrize("name", thinned(list(ROUTINGS), 4, start=3))
def test_routings(name):
    index = ROUTINGS[name]
    up, down = specs_of(W4.replace(bias=True), RELU, 72)
    layer = Experts.make(up, down, RELU, 4, lossless=True)
    x, weights = lossless_inputs(index.shape[0], up), torch.full(index.shape[::-1], 0.5, dtype=BF16).t()
    layer.check_exact(_run(layer, x, index, weights), x, index, weights)


@needs_interpreter
def test_no_tokens():
    up, down = specs_of(W4, SILU, 72)
    layer = Experts.make(up, down, SILU, 2)
    assert _run(layer, inputs(0, up), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)).shape == (0, 17)


@needs_interpreter
@pytest.mark.parametrize("bad", thinned([-1, 3, 1 << 32], 3, start=2))
def test_numbers_out_of_range(bad):
    """On a CPU they are an error; the device code takes them for no expert, without reading anything of theirs."""
    up, down = specs_of(W4, RELU, 72)
    layer = Experts.make(up, down, RELU, 2, lossless=True)
    for tokens in (2, 33):
        x, index, weights = lossless_inputs(tokens, up), torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2)
        index[1, 0] = bad
        with pytest.raises(InputError, match="expert"):
            _run(layer, x, index, weights)
        q = layer.on("TritonW4A16LinearKernel")
        plan = experts.experts_plan((up, down), RELU, q.up[0].packed, q.down.packed, (None, None), index, weights)
        y = torch.full((tokens, down.n), torch.nan)
        with poison():
            plan.run(x, index, weights, q.up[0].packed, None, q.down.packed, None, y)
        index[1, 0] = 2
        layer.check_exact(y.to(x.dtype), x, index, weights)


@needs_interpreter
@pytest.mark.parametrize("size", thinned([(70, 1), (65, 7), (2100, 3), (129, 40)], 2, start=1), ids=str)
def test_sorted_pairs_and_blocks(size):
    """Each expert's pairs in ascending order, cut into blocks; blocks beyond those are marked as unused."""
    pairs, count = size
    up, down = specs_of(W4, RELU, 72)
    index = torch.randint(-1, count + 1, (pairs, 1), generator=torch.Generator().manual_seed(pairs))
    plan = experts.ExpertsPlan(
        (up, down), RELU, count, (1, 1), (False, False), experts.Load(16, True, (False, False)), torch.device("cpu")
    )
    with poison():
        (_, in_order, blocks), num_blocks = plan.routes(index)
    expert, start, end = blocks[:-1].view(3, num_blocks).tolist()
    found = [(e, in_order[s : min(s + plan.tile_m, t)].tolist()) for e, s, t in zip(expert, start, end, strict=True) if e < count]
    want = []
    for e in range(count):
        members = (index.view(-1) == e).nonzero().view(-1)
        want += [(e, part.tolist()) for part in members.split(plan.tile_m) if len(part)]
    assert found == want and all(e == count for e in expert[len(want) :]) and blocks[-1] == len(want)
    check_gather(index, in_order, blocks, num_blocks, plan.tile_m, count)


def check_gather(index, in_order, blocks, num_blocks, tile, count):
    """Rows of x in the blocks' order, each expert's from a whole tile on; what no pair has stays as it was."""
    from bitline.kernels.triton.device import experts_sort

    pairs, k = index.numel(), 24
    x = torch.arange(pairs * k, dtype=torch.float32).view(pairs, k)
    out, rows = torch.full((num_blocks * tile, k), -1.0), torch.full((pairs,), -1, dtype=torch.int32)
    experts_sort.gather_kernel[(num_blocks * tile,)](x, in_order, blocks, out, rows, 1, num_blocks, count, k, tile, 16)
    valid = (index.view(-1) >= 0) & (index.view(-1) < count)
    assert torch.equal(rows >= 0, valid) and torch.equal(out[rows[valid].long()], x[valid])
    assert int((out >= 0).all(1).sum()) == int(valid.sum())
    of_row = blocks[:num_blocks][rows[valid].long() // tile]
    assert torch.equal(of_row.long(), index.view(-1)[valid])


@needs_interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(activation):
    """Every activation, gated or not, also far from zero and for NaN and infinite inputs."""
    edges = torch.tensor([0.0, -0.0, 200.0, -200.0, torch.nan, torch.inf])
    h = torch.cat((torch.linspace(-12, 12, 58), edges, torch.linspace(9, -9, 63), torch.tensor([torch.nan]))).view(1, 128)
    for gate in (ExpertGate(activation), ExpertGate(activation, False), ExpertGate(activation, True, 1.702, 7.0)):
        y = torch.empty(64)
        gate_kernel[(1,)](h, y, gate.activation, gate.gated, gate.alpha, gate.limit)
        want = gate(h.double() if gate.gated else h[:, :64].double())[0].float()
        torch.testing.assert_close(y, want, rtol=2e-5, atol=1e-6, equal_nan=True)


@needs_interpreter
@pytest.mark.exhaustive
def test_many_tokens_take_several_launches(monkeypatch):
    monkeypatch.setattr(experts, "SCRATCH_ELEMENTS", 17 * 2 * 35)
    up, down = specs_of(W4, RELU, 72)
    layer = Experts.make(up, down, RELU, 3, lossless=True)
    x, (index, weights) = lossless_inputs(80, up), routing(80, 2, 3)
    weights = torch.full_like(weights, 0.5)
    layer.check_exact(_run(layer, x, index, weights), x, index, weights)


@needs_interpreter
@pytest.mark.exhaustive
@pytest.mark.parametrize("traits", [(False, True, 65536, False), (False, False, 65536, False), (True, False, 65536, True)])
def test_tiles_of_other_gpus(traits, monkeypatch):
    """RDNA, CDNA, and NVIDIA before sm80."""
    monkeypatch.setattr(experts, "device_traits", lambda device: DeviceTraits(*traits))
    monkeypatch.setattr(experts, "_plans", {})
    monkeypatch.setattr(experts, "_plans_of_pairs", {})
    up, down = specs_of(W4.replace(n=33, act_dtype=F16), RELU, 72)
    layer = Experts.make(up, down, RELU, 3, lossless=True)
    for tokens in (2, 65):
        x, (index, weights) = lossless_inputs(tokens, up), routing(tokens, 2, 3)
        weights = torch.full_like(weights, 0.5)
        layer.check_exact(_run(layer, x, index, weights), x, index, weights)
    assert len(experts._plans) == 2


def test_tiles_and_the_sort():
    from bitline.kernels.triton import experts

    assert [experts.tile_for(mean) for mean in (1, 6, 6.1, 28, 29, 64, 200, 201, 9999)] == [8, 8, 16, 16, 32, 64, 64, 128, 128]
    small, large = 2_400_000, 91_000_000  # of 768 x 2048 and 14336 x 4096, 4 bits
    assert experts.load_of(8, 128, (1536, 2048), small) == (8, False, (True, True))
    assert experts.load_of(32, 128, (1536, 2048), small) == (8, False, (False, False))  # 28 of 32 pairs have their own expert
    assert experts.load_of(65, 128, (1536, 2048), small).is_sorted
    assert experts.load_of(8, 8, (28672, 4096), large) == (8, True, (False, True))  # unsorted, 3 experts would be read again
    assert experts.load_of(8192, 8, (28672, 4096), large) == (128, True, (False, False))


def test_what_does_not_fit_together_is_left_to_the_loop():
    for kernel, base in ((TritonW4A16LinearKernel, W4), (TritonMinifloatLinearKernel, MX4)):
        up, down = specs_of(base, SILU, 72)
        assert kernel.can_experts(up, down, SILU)
        assert not kernel.can_experts(up, down, RELU) and not kernel.can_experts(up.replace(act_dtype=F16), down, SILU)
        assert not kernel.can_experts(up, down, SimpleNamespace(activation="mish", gated=True))
