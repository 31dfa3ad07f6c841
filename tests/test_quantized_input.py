"""Inputs that are quantized before the layer: the same bits as a layer that quantizes them itself, and refusals."""

import copy
import dataclasses

import pytest
import torch

from bitline import ActSpec, InputError, Policy, QuantizedInput, QuantLinear, types
from bitline.act_quant import fake_quantize
from bitline.kernels.registry import kernel_by_name
from bitline.quantized_input import code_dtype, reference_input
from bitline.testing import check, inputs, random_weight
from bitline.types import LinearSpec

E4M3, INT8 = types.float8_e4m3fn, types.int8
FP8 = LinearSpec(48, 200, E4M3, (1, 200), scale_dtype=torch.float32, act=ActSpec(E4M3))
MXFP4 = ActSpec(types.float4_e2m1, granularity="group", group_size=32, scale="e8m0")
W8A8 = FP8.replace(weight=INT8, act=ActSpec(INT8))
SPECS = [
    FP8, FP8.replace(bias=True, act_dtype=torch.float32), FP8.replace(block=(48, 200), act=ActSpec(E4M3, False, "tensor")),
    FP8.replace(act=ActSpec(E4M3, True, "tensor")), FP8.replace(block=(16, 32), act=ActSpec(E4M3, True, "group", 32)),
    FP8.replace(block=(1, 32), act=ActSpec(E4M3, True, "group", 64, scale="e8m0")), W8A8,
    W8A8.replace(act=ActSpec(INT8, symmetric=False), bias=True), W8A8.replace(act=ActSpec(INT8, False, "tensor")),
    W8A8.replace(act=ActSpec(INT8, False, "tensor", symmetric=False)),
    W8A8.replace(act=ActSpec(INT8, granularity="group", group_size=32)),
]  # fmt: skip


def made(spec, kernel="ReferenceLinearKernel", seed=1):
    weight = random_weight(spec, seed)
    return QuantLinear(weight, policy=Policy(kernel=kernel)), weight


def quantized(x, weight):
    return reference_input(x.reshape(-1, x.shape[-1]), weight.spec.act, weight.input_scale, weight.input_zero)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.scheme)
def test_the_values_are_those_of_fake_quantize(spec):
    weight, x = random_weight(spec, 1), inputs(7, spec)
    found = quantized(x, weight).dequantize(spec.act)
    assert torch.equal(found, fake_quantize(x, spec.act, weight.input_scale, weight.input_zero))


@pytest.mark.parametrize("m", [0, 1, 2, 3, 7, 17, 65])
@pytest.mark.parametrize("kernel", ["ReferenceLinearKernel", "BatchInvariantLinearKernel", "TorchInt8ScaledMMLinearKernel"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.scheme)
def test_the_same_bits_as_from_a_tensor(spec, kernel, m):
    if not kernel_by_name(kernel).can_implement(spec):
        pytest.skip("another scheme")
    layer, weight = made(spec, kernel)
    x = inputs(m, spec, m)
    assert torch.equal(layer(quantized(x, weight)), layer(x))


@pytest.mark.parametrize("shape", [(200,), (2, 3, 200), (2, 0, 200), (4, 1, 200)])
@pytest.mark.parametrize("spec", [FP8, SPECS[4], SPECS[7]], ids=lambda s: s.scheme)
def test_batch_dimensions_and_shapes_of_scales(spec, shape):
    layer, weight = made(spec)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(spec.act_dtype)
    codes, scales, zero = quantized(x, weight)
    want = layer(x)
    for lead in ((), shape[:-1]):
        shaped = [t if t is None or not lead or not t.numel() else t.reshape(*lead, -1) for t in (scales, zero)]
        out = layer(QuantizedInput(codes.view(shape), *shaped))
        assert out.shape == (*shape[:-1], 48) and torch.equal(out, want)


def test_a_kernel_that_takes_none_quantizes_what_is_read_back():
    """With a static FP8 scale those are the same codes."""
    spec = FP8.replace(block=(48, 200), act=ActSpec(E4M3, False, "tensor"))
    layer, weight = made(spec, "CPUWNA16LinearKernel") if _has_native() else made(spec)
    x = inputs(17, spec)
    assert torch.equal(layer(quantized(x, weight)), layer(x))
    spec = W8A8.replace(k=208, block=(1, 208))
    layer, weight = made(spec, "CPUWNA16LinearKernel") if _has_native() else made(spec)
    x = inputs(17, spec)
    q = quantized(x, weight)
    check(layer(q), q.dequantize(spec.act, spec.act_dtype), weight)


def _has_native():
    from bitline import Platform

    return Platform.detect("cpu").native


@pytest.mark.parametrize(
    ("spec", "change", "words"),
    [
        (FP8.replace(act=None), lambda q: q, "takes no quantized input"),
        (FP8.replace(act=MXFP4), lambda q: q, "float4_e2m1"),
        (FP8, lambda q: q._replace(codes=q.codes[:, :199]), r"\[7, 199\].*200"),
        (FP8, lambda q: q._replace(codes=q.codes.float()), "float32"),
        (W8A8, lambda q: q._replace(codes=q.codes.to(torch.int16)), "int16"),
        (FP8, lambda q: q._replace(scales=q.scales[:1]), r"\[1\].*7 float32"),
        (FP8, lambda q: q._replace(scales=q.scales.double()), "float64"),
        (FP8.replace(act=ActSpec(E4M3, False, "tensor")), lambda q: q._replace(scales=torch.ones(7)), r"\[7\].*1 float32"),
        (FP8, lambda q: q._replace(zero=torch.zeros(7, dtype=torch.int32)), "zero points"),
        (SPECS[7], lambda q: q._replace(zero=None), "zero points"),
        (SPECS[7], lambda q: q._replace(zero=q.zero.long()), "zero points"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(spec, change, words):
    layer, weight = made(spec)
    act = FP8.act if spec.act is None or code_dtype(spec.act) is None else spec.act
    q = change(reference_input(inputs(7, spec), act, weight.input_scale, weight.input_zero))
    with pytest.raises(InputError, match=words):
        layer(q)


def test_a_layer_with_an_input_multiplier_refuses():
    weight = dataclasses.replace(random_weight(FP8), spec=FP8.replace(input_multiplier=True), input_multiplier=torch.ones(200))
    with pytest.raises(InputError, match="multiplier"):
        QuantLinear(weight)(reference_input(inputs(3, FP8), FP8.act))


def test_one_operator_when_compiled_with_a_shape_that_changes():
    layer, weight = made(FP8)
    graphs = []

    def backend(graph, _example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q: layer(q), backend=backend, fullgraph=True, dynamic=True)
    for m in (3, 17):
        q = quantized(inputs(m, FP8, m), weight)
        assert torch.equal(compiled(q), layer(q))
    calls = [n for n in graphs[0].graph.nodes if n.op == "call_function" and "linear_quantized" in str(n.target)]
    assert len(calls) == 1


def test_on_the_meta_device_and_in_a_copy():
    layer, weight = made(FP8)
    q = quantized(inputs(3, FP8), weight)
    assert torch.equal(copy.deepcopy(layer)(q), layer(q))
    meta = layer.to("meta")
    assert meta(QuantizedInput(*(None if t is None else t.to("meta") for t in q))).shape == (3, 48)
    weight = random_weight(W8A8)  # torch cannot compare FP8 tensors there
    torch.library.opcheck(
        torch.ops.bitline.linear_quantized.default,
        (*quantized(inputs(3, W8A8), weight), made(W8A8)[0]._packed, None, "ReferenceLinearKernel", W8A8.key),
    )
