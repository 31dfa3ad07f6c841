"""bitline.ops: quantization alone and after a norm or a gate, against the chain of torch's operators, and as a layer's input."""

import pytest
import torch

from bitline import ActSpec, InputError, LinearSpec, QuantLinear, ops, types
from bitline.quantized_input import reference_input
from bitline.testing import random_weight

E4M3, INT8 = types.float8_e4m3fn, types.int8
ACTS = [
    ActSpec(E4M3), ActSpec(INT8), ActSpec(INT8, symmetric=False), ActSpec(E4M3, True, "tensor"), ActSpec(E4M3, False, "tensor"),
    ActSpec(INT8, False, "tensor", symmetric=False), ActSpec(E4M3, True, "group", 128), ActSpec(INT8, True, "group", 32),
    ActSpec(E4M3, True, "group", 32, scale="e8m0"), ActSpec(E4M3, limit=1.5), ActSpec(E4M3, True, "group", 96),
]  # fmt: skip
STATIC = {"scale": torch.tensor([0.02]), "zero": torch.tensor([3], dtype=torch.int32)}


def data(*shape, dtype=torch.bfloat16, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def static_of(act):
    return {name: t for name, t in STATIC.items() if not act.dynamic and (name == "scale" or not act.symmetric)}


def same(found, want, shape):
    assert found.codes.shape == shape and torch.equal(
        found.codes.flatten().view(torch.uint8), want.codes.flatten().view(torch.uint8)
    )
    assert found.scales.shape == want.scales.shape and torch.equal(found.scales, want.scales)
    assert (
        torch.equal(found.zero, want.zero)
        if want.zero is not None and want.zero.numel()
        else not want.codes.numel() or found.zero is None
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(300,), (7, 300), (2, 3, 64), (65, 33), (0, 300), (2, 0, 16)])
@pytest.mark.parametrize("act", ACTS, ids=str)
def test_quantize(act, shape, dtype):
    x = data(*shape, dtype=dtype)
    same(ops.quantize(x, act, **static_of(act)), reference_input(x.view(-1, shape[-1]), act, *static_of(act).values()), shape)


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_a_layer_takes_it_with_the_bits_of_its_own_quantization(act):
    weight_type = E4M3 if act.dtype is E4M3 else INT8
    weight = random_weight(LinearSpec(48, 200, weight_type, (1, 200), scale_dtype=torch.float32, act=act))
    layer, x = QuantLinear(weight, kernel="ReferenceLinearKernel"), data(2, 3, 200)
    assert torch.equal(layer(ops.quantize(x, act, weight.input_scale, weight.input_zero)), layer(x))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("act", [ACTS[0], ACTS[2], ACTS[5], ACTS[6]], ids=str)
def test_rms_norm_quantize_is_the_chain_of_transformers(act, residual):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, rest = data(2, 3, 256), data(2, 3, 256, seed=2) if residual else None
    norm = LlamaRMSNorm(256, 1e-5).to(torch.bfloat16).requires_grad_(False)
    norm.weight.copy_(data(256, seed=3))
    found, total = ops.rms_norm_quantize(x, norm.weight, 1e-5, act, rest, **static_of(act))
    want_total = x if rest is None else x + rest
    assert torch.equal(total, want_total) and (residual or total is x)
    same(found, ops.quantize(norm(want_total), act, **static_of(act)), x.shape)


@pytest.mark.parametrize("act", [ACTS[0], ACTS[2], ACTS[5], ACTS[6]], ids=str)
def test_silu_mul_quantize_is_the_chain_of_torch(act):
    both = data(2, 3, 512)
    gate, up = both.chunk(2, -1)
    want = ops.quantize(torch.nn.functional.silu(gate) * up, act, **static_of(act))
    same(ops.silu_mul_quantize(both, None, act, **static_of(act)), want, gate.shape)
    same(ops.silu_mul_quantize(gate.contiguous(), up, act, **static_of(act)), want, gate.shape)


def test_inputs_that_are_not_contiguous():
    wide = data(6, 128)
    for x in (
        wide[:, ::2],
        wide[:, 64:],
        data(64, 6).T,
        data(4, 64)[::2],
        data(3, 2, 64).transpose(0, 1),
        data(64).expand(5, 64),
    ):
        same(ops.quantize(x, ACTS[0]), ops.quantize(x.contiguous(), ACTS[0]), x.shape)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ops.quantize(x, ActSpec(types.float4_e2m1, granularity="group", group_size=16, scale="e4m3")), "float4_e2m1"),
        (lambda x: ops.quantize(x, ACTS[4]), "needs its scale"),
        (lambda x: ops.quantize(x.int(), ACTS[0]), "floating-point"),
        (lambda x: ops.rms_norm_quantize(x, data(63), 1e-5, ACTS[0]), r"\[63\]"),
        (lambda x: ops.rms_norm_quantize(x, data(64).float(), 1e-5, ACTS[0]), "float32"),
        (lambda x: ops.rms_norm_quantize(x, data(64), 1e-5, ACTS[0], data(2, 64)), r"\[2, 64\]"),
        (lambda x: ops.silu_mul_quantize(data(3, 65), None, ACTS[0]), "even"),
        (lambda x: ops.silu_mul_quantize(x, data(3, 32), ACTS[0]), r"\[3, 32\]"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call(data(3, 64))


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_compiled_with_a_shape_that_changes(act):
    static = static_of(act)

    def block(x, weight, rest, both):
        a, total = ops.rms_norm_quantize(x, weight, 1e-5, act, rest, **static)
        return a, total, ops.silu_mul_quantize(both, None, act, **static), ops.quantize(x, act, **static)

    torch._dynamo.reset()  # all schemes share one code object, and compilations of a code object are limited
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (3, 17):
        args = data(m, 256), data(256, seed=2), data(m, 256, seed=3), data(m, 512, seed=4)
        found, want = compiled(*args), block(*args)
        assert torch.equal(found[1], want[1])
        for a, b in zip((found[0], found[2], found[3]), (want[0], want[2], want[3]), strict=True):
            same(a, b, b.codes.shape)


@pytest.mark.parametrize("act", [ActSpec(INT8), ActSpec(INT8, symmetric=False), ActSpec(INT8, True, "group", 32)], ids=str)
def test_the_operator_declares_what_it_does(act):
    x = data(3, 64)
    for other, rest, source in ((None, None, "plain"), (data(64), x, "rms_norm"), (x, None, "silu_mul")):
        torch.library.opcheck(ops.OP, (x, other, rest, 1e-5, None, None, source, str(act)))
