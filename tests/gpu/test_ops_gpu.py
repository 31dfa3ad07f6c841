"""bitline.ops and quantized inputs on a GPU: against torch's chain, captured, compiled, and as the input of each kernel."""

import pytest
import torch
from graphs import captured

from bitline import ActSpec, LinearSpec, Platform, QuantLinear, choose, ops, types
from bitline.quantized_input import reference_input
from bitline.testing import check, inputs, random_weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")]
E4M3, INT8 = types.float8_e4m3fn, types.int8
ACTS = [
    ActSpec(E4M3), ActSpec(INT8), ActSpec(INT8, symmetric=False), ActSpec(E4M3, False, "tensor"), ActSpec(INT8, False, "tensor"),
    ActSpec(INT8, False, "tensor", symmetric=False), ActSpec(E4M3, True, "group", 128), ActSpec(INT8, True, "group", 32),
    ActSpec(E4M3, True, "group", 32, scale="e8m0"), ActSpec(E4M3, True, "tensor"),
]  # fmt: skip
SHAPES = [(1, 64), (3, 8192), (65, 300), (7, 20000)]  # each compiles a kernel or two
FP8 = LinearSpec(256, 512, E4M3, (1, 512), scale_dtype=torch.float32, act=ActSpec(E4M3))
SPECS = [
    FP8, FP8.replace(bias=True, n=40, k=200), FP8.replace(block=(256, 512), act=ACTS[3]),
    FP8.replace(block=(128, 128), act=ACTS[6]), FP8.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu, act=ACTS[8]),
    FP8.replace(weight=INT8, act=ACTS[1]), FP8.replace(weight=INT8, act=ACTS[2], bias=True, n=40, k=200),
    FP8.replace(weight=INT8, act=ACTS[5]),
]  # fmt: skip


def static_of(act):
    if act.dynamic:
        return ()
    both = torch.tensor([0.02], device="cuda"), torch.tensor([3], dtype=torch.int32, device="cuda")
    return both[: 1 + (not act.symmetric)]


def same(found, want):
    assert torch.equal(found.codes.view(torch.uint8).flatten(), want.codes.view(torch.uint8).flatten())
    assert torch.equal(found.scales, want.scales) and (found.zero is None or torch.equal(found.zero, want.zero))


def close(found, want):
    """A few codes a step away: sums have another order, and exponentials and roots another last bit."""
    assert torch.allclose(found.scales, want.scales, rtol=1.6e-2, atol=0)
    differ = (found.codes.float() != want.codes.float()).float().mean()
    assert float(differ) < 0.05
    act_error = (found.codes.float() - want.codes.float()).abs()
    assert bool((act_error <= (33 if found.codes.dtype != torch.int8 else 2)).all())


@pytest.mark.parametrize(
    ("act", "dtype"),
    [*((act, torch.bfloat16) for act in ACTS), (ACTS[0], torch.float16), (ACTS[2], torch.float16), (ACTS[6], torch.float32)],
    ids=str,
)
def test_quantize_has_the_bits_of_the_reference(act, dtype):
    for m, k in SHAPES:
        x = torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(m)).mul(20).to(dtype)
        x[-1, : k // 2] = 0
        same(ops.quantize(x, act, *static_of(act)), reference_input(x, act, *static_of(act)))
        both = torch.stack((x, -x), 1).view(m, 2 * k)
        same(ops.quantize(both[:, k:], act, *static_of(act)), reference_input(-x, act, *static_of(act)))


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_norm_and_gate(act):
    for m, k in SHAPES:
        g = torch.Generator("cuda").manual_seed(m)
        x, rest, weight, both = (
            torch.randn(*shape, device="cuda", generator=g).bfloat16() for shape in ((m, k), (m, k), (k,), (m, 2 * k))
        )
        total = x + rest
        values = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        found, new = ops.rms_norm_quantize(x, weight, 1e-5, act, rest, *static_of(act))
        assert torch.equal(new, total)
        close(found, reference_input(weight * values.bfloat16(), act, *static_of(act)))
        gate, up = both.chunk(2, -1)
        want = reference_input(torch.nn.functional.silu(gate) * up, act, *static_of(act))
        close(ops.silu_mul_quantize(both, None, act, *static_of(act)), want)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.scheme)
def test_every_kernel_takes_a_quantized_input(spec):
    weight = random_weight(spec, 1, "cuda")
    for candidate in choose(spec, Platform.detect("cuda")).candidates:
        kernel = candidate.kernel
        if not candidate.verdict or not kernel.exact:
            continue
        layer = QuantLinear(weight, kernel=kernel.__name__)
        for m in (1, 2, 3, 7, 17, 65):
            x = inputs(m, spec, m, "cuda")
            q = ops.quantize(x, spec.act, weight.input_scale, weight.input_zero)
            check(layer(q), x if kernel.takes_quantized_input else q.dequantize(spec.act, spec.act_dtype), weight)


def test_captured_and_compiled():
    weight = random_weight(FP8, 1, "cuda")
    layer = QuantLinear(weight, kernel="RowWiseTorchFP8ScaledMMLinearKernel")
    gain, x, rest = torch.ones(512, device="cuda").bfloat16(), *(inputs(17, FP8, seed, "cuda") for seed in (1, 2))

    def block(x, rest):
        quantized, total = ops.rms_norm_quantize(x, gain, 1e-5, FP8.act, rest)
        return layer(quantized), total

    with torch.inference_mode():
        want = block(x, rest)
        compiled = torch.compile(block, fullgraph=True)
        found = compiled(x, rest)
        assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
        static_x = rest.clone()
        graph, out = captured(lambda: block(static_x, rest))
        static_x.copy_(x)
        graph.replay()
        assert torch.equal(out[0], want[0]) and torch.equal(out[1], want[1])
