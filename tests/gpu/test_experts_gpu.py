"""Experts on the Triton weight-only kernels on a real device: accuracy, exact data, CUDA graphs, determinism, large shapes."""

import pytest
import torch
from graphs import captured

from bitline import types
from bitline.expert_gate import ExpertGate
from bitline.kernels.triton import experts
from bitline.testing import poison
from bitline.testing.generators import inputs, lossless_inputs
from bitline.types import LinearSpec
from experts_oracle import SILU, SWIGLU, Experts, routing, specs_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")]

RELU, F16 = ExpertGate("relu", False), torch.float16
W4 = LinearSpec(200, 136, types.uint4b8, (1, 32), scale_dtype=torch.bfloat16)  # the second projection
MX4 = LinearSpec(200, 136, types.float4_e2m1, (1, 32), scale_dtype=torch.float8_e8m0fnu)
LAYERS = [  # (second projection, gate, K)
    (W4, SILU, 520),
    (W4.replace(n=512, k=512, block=(1, 128)), SILU, 1024),
    (W4.replace(n=512, k=768, block=(1, 128), act_dtype=F16, bias=True), ExpertGate("gelu"), 2048),
    (W4.replace(n=33, k=37, weight=types.uint4, zero="int", bias=True, act_dtype=F16), SILU, 45),
    (W4.replace(weight=types.uint3, zero="int", act_order=True), ExpertGate("gelu_tanh"), 300),
    (W4.replace(weight=types.uint2, zero="float", scale_dtype=F16, bias=True), SWIGLU, 256),
    (W4.replace(weight=types.uint6b32, block=(1, 16), act_dtype=F16), ExpertGate("relu2", False), 520),
    (W4.replace(weight=types.int8, act_dtype=torch.float32, block=(1, 136)), SILU, 520),
    (W4.replace(weight=types.nf4, block=(1, 64), scale_dtype=torch.float32), SILU, 512),
    (MX4.replace(bias=True), SWIGLU, 520),
    (MX4.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, act_dtype=F16), SILU, 512),
    (MX4.replace(weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=torch.float32), SILU, 512),
]


def _name(spec):
    return "TritonMinifloatLinearKernel" if spec.weight.kind == "float" else "TritonW4A16LinearKernel"


def _run(layer, x, index, weights):
    """The layer's result, computed in poisoned memory, on the CPU."""
    with poison():
        return layer.on(_name(layer.up[0].spec), "cuda")(x.cuda(), index.cuda(), weights.cuda()).cpu()


@pytest.mark.parametrize("case", LAYERS, ids=lambda c: f"{c[0].weight}-{c[1].activation}")
def test_random_layers(case):
    down, gate, k = case
    up, _ = specs_of(down, gate, k)
    layer = Experts.make(up, down, gate, 8)
    for tokens in (1, 7, 17, 65, 300, 2100):
        x, (index, weights) = inputs(tokens, up), routing(tokens, 2, 8)
        layer.check(_run(layer, x, index, weights), x, index, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F16, torch.float32])
def test_lossless_data_is_exact(dtype):
    for down, gate in ((W4, RELU), (W4.replace(n=33, weight=types.uint4, zero="int", bias=True), ExpertGate("relu"))):
        up, down = specs_of(down.replace(act_dtype=dtype), gate, 520)
        layer = Experts.make(up, down, gate, 6, lossless=True)
        for tokens in (1, 2, 3, 7, 17, 32, 33, 65, 1000):
            x, (index, _) = lossless_inputs(tokens, up), routing(tokens, 2, 7, seed=tokens)  # 6 stands for no expert
            weights = torch.full(index.shape, 0.5)
            layer.check_exact(_run(layer, x, index, weights), x, index, weights)


@pytest.mark.parametrize("tokens", [4, 300])
def test_a_graph_replays_with_other_routings(tokens):
    """Also with numbers out of range, which count as no expert."""
    up, down = specs_of(W4, RELU, 520)
    layer = Experts.make(up, down, RELU, 6, lossless=True)
    module, x = layer.on("TritonW4A16LinearKernel", "cuda"), lossless_inputs(tokens, up)
    index, weights = torch.zeros(tokens, 2, dtype=torch.int64, device="cuda"), torch.full((tokens, 2), 0.5, device="cuda")
    static = x.cuda()
    graph, y = captured(lambda: module(static, index, weights), warm_up=1)
    for seed in range(3):
        other, _ = routing(tokens, 2, 7, seed)
        index.copy_(other)
        if seed == 2:
            other[0], index[0] = 6, torch.tensor([-1, 1 << 32], device="cuda")
        y.fill_(torch.nan)
        graph.replay()
        layer.check_exact(y.cpu(), x, other, weights.cpu())


def test_the_same_call_gives_the_same_bits():
    up, down = specs_of(W4, SILU, 520)
    module, x = Experts.make(up, down, SILU, 8).on("TritonW4A16LinearKernel", "cuda"), inputs(300, up, device="cuda")
    index, weights = (t.cuda() for t in routing(300, 2, 8))
    first = module(x, index, weights)
    assert all(torch.equal(module(x, index, weights), first) for _ in range(10))


@pytest.mark.parametrize("size", [(65, 1), (4000, 7), (100_003, 512)], ids=str)
def test_sorted_pairs(size):
    pairs, count = size
    up, down = specs_of(W4, RELU, 520)
    index = torch.randint(-1, count + 1, (pairs, 1), generator=torch.Generator().manual_seed(pairs)).cuda()
    plan = experts.ExpertsPlan(
        (up, down), RELU, count, (5, 2), (False, False), experts.Load(64, True, (False, False)), index.device
    )
    with poison():
        (_, in_order, blocks), num_blocks = plan.routes(index)
    flat = index.view(-1).cpu()
    valid = ((flat >= 0) & (flat < count)).nonzero().view(-1)
    assert torch.equal(in_order[: len(valid)].cpu().long(), valid[flat[valid].argsort(stable=True)])
    want = torch.bincount(flat[valid], minlength=count).add(plan.tile_m - 1).div(plan.tile_m, rounding_mode="floor")
    expert = blocks[:-1].view(3, num_blocks)[0].cpu().long()
    assert torch.equal(torch.bincount(expert, minlength=count + 1)[:count], want)


def test_an_expert_beyond_two_giga_elements():
    """The second expert's codes start 2**31 elements after the first's: they are found with 64-bit offsets."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    up, down = specs_of(W4, RELU, 520)
    layer = Experts.make(up, down, RELU, 2, lossless=True)
    module = layer.on("TritonW4A16LinearKernel", "cuda")
    codes, *others = module.up[0].packed
    stride = (1 << 31) + 64
    far = torch.empty(stride + codes[0].numel(), dtype=torch.int32, device="cuda")
    far = far.as_strided(codes.shape, (stride, *codes.stride()[1:])).copy_(codes)
    for tokens in (3, 65):
        x, index, weights = lossless_inputs(tokens, up), torch.tensor([[1, 0]] * tokens), torch.full((tokens, 2), 0.5)
        y = experts.run_experts(
            x.cuda(), index.cuda(), weights.cuda(), [far, *others], None, module.down.packed, None, up, down, RELU
        )
        layer.check_exact(y.cpu(), x, index, weights)
