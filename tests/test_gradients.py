"""Gradients with respect to x: what each kernel unpacks, the operator's backward, compiled, through experts."""

import dataclasses

import pytest
import torch

from bitline import InputError, QuantLinear, native, quantize, types
from bitline.expert_gate import ExpertGate
from bitline.experts import QuantExperts
from bitline.kernels import registry
from bitline.kernels.base import Kernel, unit_row_products
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.platform import Platform
from bitline.testing.generators import random_spec, random_weight
from bitline.types import ActSpec, LinearSpec
from test_experts import E, K, experts, routing

CPU = Platform.detect("cpu")
NATIVE = pytest.mark.skipif(native.core() is None, reason="needs the native core")
ULPS = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
SCHEMES = ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "NVFP4A16", "MXFP4", "NVFP4", "MXFP8"]


def kernels_here():
    return [e.kernel for e in registry.entries() if e.kernel.is_supported(CPU) and "cpu" in e.kernel.platforms]


def weights(dtype):
    """Weights of many schemes."""
    for n, k in ((64, 128), (128, 512)):
        dense = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype)
        yield from (quantize(dense, scheme) for scheme in SCHEMES)
        mxfp6 = LinearSpec(n, k, types.float6_e2m3, (1, 32), scale_dtype=torch.float8_e8m0fnu, act_dtype=dtype)
        yield random_weight(mxfp6)


def same(w, weight, dtype):
    want = weight.dequantize(dtype).float()
    assert w.shape == want.shape and w.dtype == dtype
    finite = want.isfinite()
    near = (w.float() - want).abs()[finite] <= ULPS[dtype] * want[finite].abs().max().clamp(min=1e-30)
    assert bool(near.all()), (w.float() - want).abs()[finite].max()


@NATIVE
@pytest.mark.parametrize("seed", range(400))
def test_the_native_kernel_unpacks_what_it_packed(seed):
    spec = random_spec(seed)
    weight = random_weight(spec, seed)
    packed = list(CPUWNA16LinearKernel.pack(weight).values())
    w = CPUWNA16LinearKernel.unpack(packed, spec)
    same(w, weight, spec.act_dtype)
    if not spec.scale2_block:  # two levels of scales are multiplied in another order
        assert torch.equal(w.nan_to_num(), weight.dequantize(spec.act_dtype).nan_to_num())


@NATIVE
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 7), (33, 129), (100, 4096), (700, 1000)])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_the_native_kernel_unpacks_in_chunks_of_rows(n, k, bits, monkeypatch):
    monkeypatch.setattr("bitline.bitstream.rows_per_chunk", lambda k: 64)
    kind = types.SCALAR_TYPES[f"uint{bits}b{1 << (bits - 1)}"]
    weight = random_weight(LinearSpec(n, k, kind, (1, 128), scale_dtype=torch.float16, act_dtype=torch.float32), bits)
    assert torch.equal(
        CPUWNA16LinearKernel.unpack([*CPUWNA16LinearKernel.pack(weight).values()], weight.spec), weight.dequantize()
    )


@pytest.mark.parametrize("kernel", kernels_here(), ids=lambda k: k.__name__)
def test_every_kernel_of_this_cpu_unpacks(kernel):
    ran = 0
    for dtype in kernel.act_dtypes:
        for weight in weights(dtype):
            if kernel.can_implement(weight.spec):
                same(kernel.unpack([*kernel.pack(weight).values()], weight.spec), weight, dtype)
                ran += 1
    assert ran


def test_unit_rows_are_exact_for_weight_only_schemes():
    for dtype in ULPS:
        weight = quantize(torch.randn(40, 300).to(dtype), "W4A16_ASYM", group_size=100)
        packed = [*ReferenceLinearKernel.pack(weight).values()]
        assert torch.equal(unit_row_products(ReferenceLinearKernel, packed, weight.spec), weight.dequantize(dtype))


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("dtype", [types.int8, types.float8_e4m3fn])
@pytest.mark.parametrize("granularity", ["token", "tensor", "group"])
def test_unit_rows_of_codes(dynamic, dtype, granularity):
    if granularity != "tensor" and not dynamic:
        return
    act = ActSpec(dtype, dynamic, granularity, 32 if granularity == "group" else 0)
    spec = LinearSpec(24, 96, types.int8, (1, 96), scale_dtype=torch.float32, act=act, act_dtype=torch.float32)
    weight = random_weight(spec, 3)
    packed = [*ReferenceLinearKernel.pack(weight).values()]
    assert torch.equal(unit_row_products(ReferenceLinearKernel, packed, spec), weight.dequantize())


def test_a_static_scheme_of_a_kernel_without_codes_is_refused():
    class Opaque(ReferenceLinearKernel):
        takes_quantized_input = False
        unpack = classmethod(Kernel.unpack.__func__)

    spec = LinearSpec(8, 32, types.int8, (1, 32), act=ActSpec(types.int8, False, "tensor"), act_dtype=torch.float32)
    packed = [*Opaque.pack(random_weight(spec)).values()]
    with pytest.raises(InputError, match="Opaque has no gradient"):
        Opaque.unpack(packed, spec)
    dynamic = spec.replace(act=ActSpec(types.int8))
    weight = random_weight(dynamic)
    same(Opaque.unpack([*Opaque.pack(weight).values()], dynamic), weight, torch.float32)


# ---- layers -------------------------------------------------------------------------------------------------------------


def layer_and_plain(scheme="W4A16", bias=True, kernel="auto", n=48, k=64):
    g = torch.Generator().manual_seed(0)
    w = quantize(torch.randn(n, k, generator=g), scheme, bias=torch.randn(n, generator=g) if bias else None)
    return QuantLinear(w, kernel=kernel), w.dequantize()


@pytest.mark.parametrize("kernel", ["auto", "ReferenceLinearKernel", "CPUWNA16LinearKernel"])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (17, 64), (2, 3, 64), (0, 64), (2, 0, 64)])
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_the_gradient_of_x(scheme, shape, kernel):
    if kernel.startswith("CPUW") and native.core() is None:
        pytest.skip("needs the native core")
    layer, w = layer_and_plain(scheme, kernel=kernel)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer(x.detach()))
    grad = torch.randn(y.shape)
    y.backward(grad)
    assert torch.allclose(x.grad, grad @ w, rtol=1e-5, atol=1e-5)


def test_an_input_multiplier_is_part_of_the_gradient():
    w = quantize(torch.randn(48, 64), "W4A16")
    multiplier = torch.rand(64) + 0.5
    scaled = dataclasses.replace(w, spec=w.spec.replace(input_multiplier=True), input_multiplier=multiplier)
    x = torch.randn(3, 64, requires_grad=True)
    QuantLinear(scaled)(x).sum().backward()
    assert torch.allclose(x.grad, (torch.ones(3, 48) @ w.dequantize()) * multiplier, rtol=1e-5, atol=1e-5)


def test_calls_without_a_gradient_skip_the_operator(monkeypatch):
    layer, _ = layer_and_plain()
    x = torch.randn(3, 64, requires_grad=True)
    with torch.no_grad():
        assert not layer(x).requires_grad
    with torch.inference_mode():
        assert not layer(x).requires_grad
    called = []
    monkeypatch.setattr("bitline.linear.OP", lambda *a: called.append(a))
    layer(x.detach())
    assert not called


def test_the_weight_may_not_change_between_forward_and_backward():
    layer, _ = layer_and_plain(kernel="ReferenceLinearKernel")
    x = torch.randn(3, 64, requires_grad=True)
    y = layer(x)
    layer._packed[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kernel", ["auto", "ReferenceLinearKernel"])
def test_the_operator_passes_torchs_checks(kernel):
    layer, _ = layer_and_plain(kernel=kernel)
    arguments = (layer._packed, *layer._op_arguments)
    x = torch.randn(3, 64, requires_grad=True)
    torch.library.opcheck(torch.ops.bitline.linear.default, (x, *arguments))
    kernel_name, key = layer._op_arguments[1:]
    torch.library.opcheck(torch.ops.bitline.linear_input_grad.default, (torch.randn(3, 48), layer._packed, kernel_name, key))


def test_compiled():
    layer, w = layer_and_plain()
    compiled = torch.compile(lambda x: layer(torch.nn.functional.silu(x)).square().sum(), backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 64, requires_grad=True)
    compiled(x).backward()
    plain = x.detach().clone().requires_grad_()
    torch.nn.functional.linear(torch.nn.functional.silu(plain), w, layer.bias).square().sum().backward()
    assert torch.allclose(x.grad, plain.grad, rtol=1e-4, atol=1e-3)


def test_gradient_checkpointing():
    layer, w = layer_and_plain()
    x = torch.randn(5, 64, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.allclose(x.grad, torch.ones(5, 48) @ w, rtol=1e-5, atol=1e-5)


# ---- experts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [ExpertGate("silu"), ExpertGate("silu", True, 1.702, 7.0), ExpertGate("relu2", False)], ids=str)
def test_gradients_through_experts(gate):
    module, up, down = experts(gate, bias=True)
    assert isinstance(module, QuantExperts)
    x, index, weights = routing(17, 2)
    index[3, 1] = E  # no expert
    x.requires_grad_(), weights.requires_grad_()
    out = module(x, index, weights)
    grad = torch.randn(17, K)
    out.backward(grad)
    plain_x, plain_weights = (t.detach().double().requires_grad_() for t in (x, weights))
    linear = lambda v, w: v @ w.dequantize(torch.float32).double().t() + w.bias.double()
    rows = []
    for t in range(17):
        parts = [
            plain_weights[t, j] * linear(gate(linear(plain_x[t], up[e])), down[e])
            for j, e in enumerate(index[t].tolist())
            if e < E
        ]
        rows.append(sum(parts))
    torch.stack(rows).backward(grad.double())
    for got, want in ((x.grad, plain_x.grad), (weights.grad, plain_weights.grad)):
        assert (got.double() - want).abs().max() <= 1e-5 * want.abs().max()
