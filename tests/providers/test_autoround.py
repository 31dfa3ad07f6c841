"""AutoRound's layers through vLLM's methods: GPTQ and AWQ packing, and inputs that must not be ignored silently."""

import fakes
import fakes_xpu
import pytest
import torch

from bitline import types
from bitline.conversion import pack_codes
from bitline.errors import InputError
from bitline.kernels.linear import INCARKLinearMethod, INCLayerConfig, INCXPULinearMethod, get_ark_state
from bitline.testing.generators import inputs, random_weight
from bitline.types import LinearSpec

W4 = LinearSpec(64, 256, types.uint4b8, (1, 64), scale_dtype=torch.bfloat16)


def loaded(method, weight):
    layer, spec = torch.nn.Module(), weight.spec
    method.create_weights(layer, spec.k, [spec.n // 2, spec.n // 2], spec.k, spec.n, spec.act_dtype)
    codes = weight.unpacked().t().contiguous()
    gptq = (codes.long().view(-1, 8, spec.n) << (4 * torch.arange(8))[None, :, None]).sum(1).to(torch.int32)
    layer.qweight.data.copy_(pack_codes.pack_awq(weight.codes, spec.k) if method.is_awq_packed else gptq)
    layer.scales.data.copy_(weight.scale.t())
    return layer, gptq


@pytest.mark.parametrize("awq", [False, True])
def test_xpu(awq):
    weight, method = random_weight(W4, 3), INCXPULinearMethod(INCLayerConfig(4, 64, True, awq))
    layer, gptq = loaded(method, weight)
    if awq:
        assert torch.equal(method._convert_awq_qweight_to_gptq(layer.qweight.data), gptq)
    with fakes_xpu.xpu():
        method.process_weights_after_loading(layer)
        method.process_weights_after_loading(layer)
        x = inputs(6, W4).view(2, 3, 256)
        bias = torch.randn(64).bfloat16()
        y = method.apply_weights(layer, x, bias)
        assert torch.equal(method.apply(layer, x, bias), y) and layer.qweight.numel() == 0
        with pytest.raises(InputError, match="does not fit the layer"):
            method.apply(layer, x.half())
    torch.testing.assert_close(y.float(), x.float() @ weight.dequantize().T + bias.float(), rtol=1e-2, atol=1e-2)


def test_nothing_is_ignored():
    weight, method = random_weight(W4, 3), INCXPULinearMethod(INCLayerConfig(4, 64))
    with pytest.raises(InputError, match="have not been processed"):
        method.apply(torch.nn.Module(), inputs(1, W4))
    layer, _ = loaded(method, weight)
    layer.qzeros.data[0, 0] = 0x12345678
    with pytest.raises(InputError, match="qzeros hold zero points"):
        method.process_weights_after_loading(layer)
    layer, _ = loaded(method, weight)
    layer.g_idx.data.copy_(layer.g_idx.data.flip(0))
    with pytest.raises(InputError, match="act-order"):
        method.process_weights_after_loading(layer)
    for config in (
        INCLayerConfig(8),
        INCLayerConfig(sym=False),
        INCLayerConfig(bits=8, is_awq=True),
        INCLayerConfig(group_size=0),
    ):
        with pytest.raises(InputError):
            INCXPULinearMethod(config)
    with pytest.raises(InputError, match="whole int32s"):
        method.create_weights(torch.nn.Module(), 100, [64], 100, 64, torch.bfloat16)


def test_ark_counts_only_with_a_loaded_library(monkeypatch):
    monkeypatch.setattr("sys.modules", {**__import__("sys").modules, "auto_round_kernel": None})
    get_ark_state.cache_clear()
    state = get_ark_state()
    assert not state.available and "cannot be imported" in state.reason and get_ark_state() is state
    with pytest.raises(ImportError, match="cannot be imported"):
        INCARKLinearMethod(INCLayerConfig())
    monkeypatch.undo()
    get_ark_state.cache_clear()
    with fakes.module("auto_round_kernel.qlinear", QuantLinear=object):
        assert "no backend library" in get_ark_state().reason
    get_ark_state.cache_clear()
