"""bitline.verify: a loaded model's packed layers against the checkpoint that they came from."""

import pytest
import torch

import bitline
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.linear import _resolve
from bitline.model.plan import quant_linears
from bitline.model.verify import verify
from tiny import compressed, llama

DOWN = "model.layers.1.mlp.down_proj"
POLICIES = [None, "ReferenceLinearKernel"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return compressed(tmp_path_factory.mktemp("tiny"), llama(attention_bias=True))[0]


def load(folder, **options):
    return bitline.load_model(folder, native_step=False, **options)


def flip(tensor, at=0):
    """Change one bit of a tensor."""
    tensor.view(-1).view(torch.uint8)[at] ^= 1


def test_a_sound_model(folder):
    model = load(folder)
    state = torch.get_rng_state()
    checks = verify(model)
    assert bitline.verify is verify and torch.equal(torch.get_rng_state(), state)
    assert {(c.layer, c.m) for c in checks} == {(name, m) for name, _ in quant_linears(model) for m in (1, 17)}
    assert all(c.ok and 0 < c.error <= c.allowed and c.cosine > 0.999 and c.nmse < 1e-4 for c in checks)


@pytest.mark.parametrize("kernel", POLICIES)
def test_one_wrong_bit_of_any_packed_tensor(folder, kernel):
    model = load(folder, policy=None if kernel is None else bitline.Policy(kernel=kernel))
    layer = model.get_submodule(DOWN)
    for name, buffer in layer.named_buffers():
        if buffer.numel() == 0:
            continue
        flip(buffer, buffer.nbytes // 2)
        with pytest.raises(bitline.VerificationError) as caught:
            verify(model)
        assert caught.value.tensor == DOWN and name.removeprefix("packed_") in caught.value.found
        assert "1 of" in caught.value.found and str(folder) in str(caught.value)
        flip(buffer, buffer.nbytes // 2)
    verify(model)


def test_stale_scales_of_another_layer(folder):
    model = load(folder, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    first, second = (model.get_submodule(f"model.layers.{i}.mlp.down_proj") for i in range(2))
    second.get_buffer("packed_scale").copy_(first.get_buffer("packed_scale"))
    with pytest.raises(bitline.VerificationError, match=r"layers\.1\.mlp\.down_proj.*packed tensor scale differs"):
        verify(model)


def test_a_wrong_bias(folder):
    model = load(folder)
    model.get_submodule("model.layers.0.self_attn.q_proj").bias[3] += 1
    with pytest.raises(bitline.VerificationError, match=r"q_proj"):
        verify(model)


def test_other_layers_that_are_off_are_counted(folder):
    model = load(folder)
    for _, layer in quant_linears(model):
        flip(layer._packed[0], layer._packed[0].nbytes // 2)
    with pytest.raises(bitline.VerificationError, match="13 other layers are off too"):
        verify(model)


def test_a_wrong_kernel(folder, monkeypatch):
    model = load(folder, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    apply = ReferenceLinearKernel.apply
    monkeypatch.setattr(ReferenceLinearKernel, "apply", lambda x, *rest: apply(x, *rest) * (1 if x.shape[0] == 1 else 1.5))
    for _, layer in quant_linears(model):
        layer._direct = layer._eager = None
    _resolve.cache_clear()
    try:
        with pytest.raises(bitline.VerificationError, match=r"not the reference's.*ReferenceLinearKernel at M=17"):
            verify(model)
    finally:
        monkeypatch.undo()
        _resolve.cache_clear()


def test_merged_layers(folder):
    model = load(folder, merge=True)
    merged = [name for name, _ in quant_linears(model) if name.endswith(("qkv_proj", "gate_up_proj"))]
    assert merged and {c.layer for c in verify(model)} == {name for name, _ in quant_linears(model)}
    flip(model.get_submodule(merged[0])._packed[0], 4000)
    with pytest.raises(bitline.VerificationError, match=merged[0].replace(".", r"\.")):
        verify(model)


def test_while_loading(folder, monkeypatch):
    pack = bitline.QuantLinear._pack

    def damaged(self, weight, device):
        pack(self, weight, device)
        if weight.origin == DOWN:
            flip(self._packed[0], 4000)

    monkeypatch.setattr(bitline.QuantLinear, "_pack", damaged)
    load(folder)
    with pytest.raises(bitline.VerificationError, match=r"layers\.1\.mlp\.down_proj"):
        load(folder, verify=True)


def test_a_model_without_quantized_layers(tmp_path):
    llama().save_pretrained(tmp_path)
    assert verify(load(tmp_path, verify=True)) == []
    with pytest.raises(bitline.InputError, match="nothing to verify"):
        verify(torch.nn.Linear(3, 3))


# ---- layers of no known checkpoint ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_alone_against_its_own_packed_weight(scheme, dtype):
    torch.manual_seed(0)
    layer = bitline.QuantLinear(bitline.quantize(torch.randn(96, 128), scheme), bias=torch.randn(96), act_dtype=dtype)
    checks = verify(torch.nn.Sequential(layer))
    assert [c.m for c in sorted(checks, key=lambda c: c.m)] == [1, 17] and all(c.ok for c in checks)


def test_a_layer_alone_on_a_kernel_that_is_wrong_above_m_1(monkeypatch):
    layer = bitline.QuantLinear(bitline.quantize(torch.randn(96, 128), "W4A16"))
    run = layer.forward
    layer.forward = lambda x: run(x) if len(x) == 1 else run(x).roll(1, 0)
    with pytest.raises(bitline.VerificationError, match="M=17"):
        verify(layer)


def test_static_activation_scales_need_the_checkpoint():
    layer = bitline.QuantLinear(bitline.quantize(torch.randn(96, 128), "FP8"))
    with pytest.raises(bitline.InputError, match="against its checkpoint alone"):
        verify(layer)
