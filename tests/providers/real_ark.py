"""The real auto-round-lib. Run by test_cpu_providers.py in a process with the package on its path."""

import sys
from pathlib import Path

import pytest
import torch

import bitline
from bitline import Platform, types
from bitline.conversion import pack_codes
from bitline.kernels.linear import INCARKLinearMethod, INCLayerConfig, get_ark_state
from bitline.kernels.providers.ark import ArkInt8WNA16LinearKernel, ArkWNA16LinearKernel
from bitline.select import Policy
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, random_weight
from bitline.types import LinearSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from layer_grid import FORMATS, check_grid

HERE = Platform.detect("cpu")
W4 = LinearSpec(64, 256, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
U4 = W4.replace(weight=types.uint4, zero="int")
SPECS = [
    spec
    for base in (W4, U4, W4.replace(weight=types.uint8b128), W4.replace(weight=types.uint8, zero="int"),
                 W4.replace(weight=types.uint2b2), W4.replace(act_dtype=torch.float16, scale_dtype=torch.float16))
    for spec in (base, base.replace(bias=True), base.replace(n=33, k=96, block=(1, 32)), base.replace(n=7, k=72, block=(1, 8)),
                 base.replace(block=(1, 256)), base.replace(n=1, k=40, block=(1, 40), bias=True))
]  # fmt: skip


def test_the_library_is_loaded():
    state = get_ark_state()
    assert state.available and state.reason is None and state.ark.cpu_lib is not None and get_ark_state() is state


def test_conforms():
    """Also proves that no weight gives another one's outputs: the suite packs and frees many at the same addresses."""
    report = check_kernel(ArkWNA16LinearKernel, SPECS)
    assert len(report.passed) == len(SPECS), report.refused


@pytest.mark.parametrize("name", FORMATS)
def test_every_accepted_layer_of_the_grid(name):
    check_grid(name, [(ArkWNA16LinearKernel, HERE), (ArkInt8WNA16LinearKernel, HERE)])


def test_int8_activations_are_close_and_by_name_alone():
    weight = random_weight(W4, 3)
    packed = list(ArkInt8WNA16LinearKernel.pack(weight).values())
    for m in (0, 1, 2, 17, 65):
        x = inputs(m, W4, m)
        y, exact = ArkInt8WNA16LinearKernel.apply(x, packed, None, W4).float(), x.float() @ weight.dequantize().T
        assert (y - exact).norm() <= 0.03 * exact.norm()
    best = bitline.choose(W4, HERE, Policy(kernel="ArkInt8WNA16LinearKernel")).best.name
    assert best == "ArkInt8WNA16LinearKernel" != bitline.choose(W4, HERE, Policy()).best.name


def pack_int32(fields):
    """uint8 [R, C] of 4-bit fields to int32 [R, C / 8], the first in the low bits."""
    return (fields.long().view(fields.shape[0], -1, 8) << (4 * torch.arange(8))).sum(2).to(torch.int32)


@pytest.mark.parametrize("awq", [False, True])
@pytest.mark.parametrize("sym", [False, True])
def test_a_layer_through_vllms_method(awq, sym):
    """GPTQ v1 stores zero points minus one."""
    weight = random_weight(W4 if sym else U4, 5)
    method, layer = INCARKLinearMethod(INCLayerConfig(4, 128, sym, awq)), torch.nn.Module()
    method.create_weights(layer, 256, [32, 32], 256, 64, torch.bfloat16)
    layer.qweight.data.copy_(pack_codes.pack_awq(weight.codes, 256) if awq else pack_int32(weight.unpacked()).t())
    layer.scales.data.copy_(weight.scale.t())
    if not sym:
        fields = weight.zero.t().contiguous()
        layer.qzeros.data.copy_(pack_int32(pack_codes.awq_interleave(fields) if awq else (fields - 1) & 15))
    method.process_weights_after_loading(layer)
    x = inputs(5, weight.spec)
    expected = x.float() @ weight.dequantize().T
    torch.testing.assert_close(method.apply(layer, x).float(), expected, rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rs", __file__]))
