"""The real zentorch. Run by test_cpu_providers.py in a process with the package on its path."""

import sys
from pathlib import Path

import pytest
import torch

import bitline
from bitline import Platform, bitstream, types
from bitline.act_quant import exact_div
from bitline.kernels import linear as vllm
from bitline.kernels.providers.zentorch import ZentorchInt8ScaledMMLinearKernel, ZentorchWNA16LinearKernel
from bitline.select import Policy
from bitline.testing import check, inputs, random_weight
from bitline.testing.conformance import check_kernel
from bitline.types import ActSpec, LinearSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from layer_grid import FORMATS, check_grid

HERE = Platform.detect("cpu")
zen = pytest.mark.skipif(not {"zen", "avx512"} <= HERE.features, reason="zentorch needs an AMD Zen CPU with AVX-512")
W4 = LinearSpec(64, 256, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
W4S = [
    W4,
    W4.replace(bias=True),
    W4.replace(weight=types.uint4, zero="int"),
    W4.replace(n=33, k=264, block=(1, 24)),
    W4.replace(block=(1, 256)),
    W4.replace(n=7, k=8, block=(1, 8)),
    W4.replace(weight=types.uint4, zero="int", n=31, k=72, block=(1, 8), bias=True),
]
W8A8 = LinearSpec(33, 77, types.int8, (1, 77), scale_dtype=torch.bfloat16, act=ActSpec(types.int8))


@zen
def test_w4a16_conforms():
    """Also proves that no weight gives another one's outputs: the suite packs and frees many at the same addresses."""
    report = check_kernel(ZentorchWNA16LinearKernel, W4S)
    assert len(report.passed) == len(W4S), report.refused


@zen
@pytest.mark.parametrize("name", FORMATS)
def test_every_accepted_layer_of_the_grid(name):
    check_grid(name, [(ZentorchWNA16LinearKernel, HERE), (ZentorchInt8ScaledMMLinearKernel, HERE)])


@zen
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_w8a8_computes_by_its_own_definition(dtype):
    torch.manual_seed(1)
    for n, k in ((64, 256), (33, 77)):
        weight = bitline.quantize(torch.randn(n, k).to(torch.bfloat16), "W8A8").with_act_dtype(dtype)
        layer = bitline.QuantLinear(weight, kernel="ZentorchInt8ScaledMMLinearKernel")
        for m in (0, 1, 2, 17, 65):
            x = torch.randn(m, k).to(dtype)
            step = exact_div(x.float().abs().amax(-1, keepdim=True), 127.0) if m else x.float()
            expected = (x.float() / step).round() * step @ weight.dequantize().t() if m else x.new_empty(0, n).float()
            torch.testing.assert_close(layer(x).float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()) if m else 0)


@zen
def test_an_inexact_kernel_runs_only_where_it_is_asked_for():
    candidates = {c.name: c for c in bitline.choose(W8A8, HERE, Policy()).candidates}
    assert "exact" in candidates["ZentorchInt8ScaledMMLinearKernel"].verdict.reason
    for policy in (Policy(kernel="ZentorchInt8ScaledMMLinearKernel"), Policy(backend="zentorch")):
        assert bitline.choose(W8A8, HERE, policy).best.name == "ZentorchInt8ScaledMMLinearKernel"


def ct_layer(weight, group):
    """A compressed-tensors layer, packed along K, and its config."""
    spec = weight.spec
    config = vllm.MPLinearLayerConfig((spec.k, spec.n), (spec.k, spec.n), spec.weight, torch.bfloat16, group, spec.zero == "int",
                                       False)  # fmt: skip
    layer = torch.nn.Module()
    layer.weight_packed = vllm.PackedParameter(weight.codes.view(torch.int32).clone(), packed_dim=1, packed_factor=8)
    layer.weight_scale = vllm.GroupScaleParameter(weight.scale.clone(), group)
    if weight.zero is not None:
        packed = bitstream.pack(weight.zero.t().contiguous(), 4).view(torch.int32).t().contiguous()
        layer.weight_zero_point = vllm.PackedParameter(packed, packed_dim=0, packed_factor=8)
    return layer, config


@zen
@pytest.mark.parametrize("spec", [W4, W4.replace(weight=types.uint4, zero="int")])
def test_a_vllm_layer_is_processed_once_and_its_parameters_are_freed(spec):
    weight, x = random_weight(spec, 1), inputs(3, spec)
    layer, config = ct_layer(weight, 128)
    kernel = vllm.ZentorchWNA16LinearKernel(config)
    kernel.process_weights_after_loading(layer)
    assert layer._bitline_kernel == "ZentorchWNA16LinearKernel" and layer.weight_packed.numel() == layer.weight_scale.numel() == 0
    before = [getattr(layer, name) for name in layer._bitline_names]
    check(kernel.apply_weights(layer, x), x, weight)
    kernel.process_weights_after_loading(layer)
    assert all(getattr(layer, name) is tensor for name, tensor in zip(layer._bitline_names, before, strict=True))


@zen
def test_a_refused_layer_goes_to_the_cpu_kernel_with_its_parameters_unchanged():
    """Its scales are float16, which zentorch would round."""
    weight, x = random_weight(W4.replace(scale_dtype=torch.float16), 1), inputs(3, W4)
    layer, config = ct_layer(weight, 128)
    kernel = vllm.ZentorchWNA16LinearKernel(config)
    kept = {name: p.data.clone() for name, p in layer.named_parameters()}
    kernel.process_weights_after_loading(layer)
    assert layer._bitline_kernel == "CPUWNA16LinearKernel"
    assert all(torch.equal(p.data, kept[name]) for name, p in layer.named_parameters())
    check(kernel.apply_weights(layer, x), x, weight)
    ordered = vllm.MPLinearLayerConfig((256, 64), (256, 64), types.uint4b8, torch.bfloat16, 128, False, True)
    with pytest.raises(ValueError, match="another order"):
        vllm.ZentorchWNA16LinearKernel(ordered)


@zen
def test_refused_layers_fall_back_to_bitlines_kernels():
    for spec in (W4.replace(act_order=True), W4.replace(k=200), W4.replace(weight=types.uint8b128)):
        choice = bitline.choose(spec, HERE, Policy(backend="zentorch", strict=False))
        assert choice.best.name == bitline.choose(spec, HERE, Policy()).best.name and "zentorch" in choice.note


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rs", __file__]))
