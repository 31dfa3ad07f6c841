"""The state dict of packed modules: what a state fits is loaded, whole; anything else is refused and changes nothing."""

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitline import InputError, QuantLinear, native, quantize
from bitline.expert_gate import ExpertGate
from bitline.kernels.torch.int4_cpu import TorchInt4PackLinearKernel
from bitline.model.embedding import QuantEmbedding
from bitline.platform import Platform
from bitline.testing.generators import random_spec, random_weight
from test_experts import experts, routing

KERNELS = ["ReferenceLinearKernel", "CPUWNA16LinearKernel", "TorchInt4PackLinearKernel"]


def weight(seed, scheme="W4A16", bias=True, dtype=torch.bfloat16, n=48):
    g = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(n, 128, generator=g).to(dtype), scheme, bias=torch.randn(n, generator=g) if bias else None)


def layer(seed, kernel="ReferenceLinearKernel", **kwargs):
    if kernel.startswith("CPUW") and native.core() is None:
        pytest.skip("needs the native core")
    if kernel == TorchInt4PackLinearKernel.__name__ and not TorchInt4PackLinearKernel.is_supported(Platform.detect("cpu")):
        pytest.skip("needs AVX2")
    return QuantLinear(weight(seed, **kwargs), kernel=kernel)


X = torch.randn(3, 128, generator=torch.Generator().manual_seed(9)).bfloat16()


def unchanged(made, load, match):
    before, y = made.state_dict(), made(X)
    before = {name: t.clone() for name, t in before.items()}
    with pytest.raises((InputError, RuntimeError), match=match):
        load()
    assert all(torch.equal(t.view(torch.uint8), before[name].view(torch.uint8)) for name, t in made.state_dict().items())
    assert torch.equal(made(X), y)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A8"])
def test_a_state_is_loaded_into_a_layer_that_is_packed_alike(kernel, scheme, tmp_path):
    first, second = layer(0, kernel, scheme=scheme), layer(1, kernel, scheme=scheme)
    assert not torch.equal(first(X), second(X))
    addresses = [t.data_ptr() for t in second._packed]
    save_file(first.state_dict(), tmp_path / "layer.safetensors")
    assert second.load_state_dict(load_file(tmp_path / "layer.safetensors")).missing_keys == []
    assert torch.equal(first(X), second(X)) and [t.data_ptr() for t in second._packed] == addresses


@pytest.mark.parametrize("seed", range(40))
def test_states_of_every_kind_of_weight(seed):
    spec = random_spec(seed)
    first, second = (QuantLinear(random_weight(spec, s), kernel="ReferenceLinearKernel") for s in (seed, seed + 1000))
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, spec.k).to(spec.act_dtype)
    assert torch.equal(first(x).nan_to_num(), second(x).nan_to_num())


def test_a_state_of_another_spec_kernel_machine_or_version_is_refused(monkeypatch):
    made = layer(0)
    for other in (layer(1, bias=False), layer(1, scheme="W8A16"), layer(1, n=64)):
        unchanged(made, lambda other=other: made.load_state_dict(other.state_dict()), "packed tensors fit only the kernel")
    if native.core() is not None:
        unchanged(made, lambda: made.load_state_dict(layer(1, "CPUWNA16LinearKernel").state_dict()), "CPUWNA16LinearKernel")
    monkeypatch.setattr("bitline.linear.__version__", "0.0.1")
    of_another_version = layer(1).state_dict()
    monkeypatch.undo()
    unchanged(made, lambda: made.load_state_dict(of_another_version), r"bitline 0\.0\.1")


def test_a_state_that_is_not_whole_changes_nothing():
    made, state = layer(0), layer(1).state_dict()
    nameless = {name: t for name, t in state.items() if name != "_extra_state"}
    unchanged(made, lambda: made.load_state_dict(nameless), "without a description")
    unchanged(made, lambda: made.load_state_dict({n: t for n, t in state.items() if n != "packed_scale"}), "packed_scale")
    unchanged(made, lambda: made.load_state_dict({}), "packed_codes")
    unchanged(made, lambda: made.load_state_dict({"weight": torch.zeros(48, 128)}), "Missing key")
    y = made(X)
    for part in ({}, {n: t for n, t in state.items() if n != "packed_scale"}):
        assert "packed_codes" in made.load_state_dict(part, strict=False).missing_keys and torch.equal(made(X), y)
    result = copy.deepcopy(made).load_state_dict(state | {"more": torch.zeros(1)}, strict=False)
    assert result.missing_keys == []
    with pytest.raises(RuntimeError, match="more"):
        copy.deepcopy(made).load_state_dict(state | {"more": torch.zeros(1)})


@pytest.mark.parametrize("kernel", KERNELS)
def test_layers_can_be_pickled(kernel):
    made = layer(0, kernel)
    stored = io.BytesIO()
    torch.save(made, stored)
    stored.seek(0)
    for twin in (pickle.loads(pickle.dumps(made)), torch.load(stored, weights_only=False), copy.deepcopy(made)):
        assert torch.equal(twin(X), made(X)) and twin._packed[0] is twin.get_buffer(twin._buffer_names[0])


def test_a_model_with_packed_layers(tmp_path):
    def model(seed):
        embedding = QuantEmbedding(weight(seed, bias=False, dtype=torch.float32), torch.bfloat16, "cpu")
        return torch.nn.Sequential(embedding, layer(seed), torch.nn.Linear(48, 4, dtype=torch.bfloat16))

    first, second = model(0), model(1)
    ids = torch.tensor([[0, 5, 47]])
    save_file(first.state_dict(), tmp_path / "model.safetensors")
    second.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(first(ids), second(ids))


def test_stacks_of_experts(tmp_path):
    first, second = experts()[0], experts(bias=False)[0]
    for stack in (second.up[0], second.down):
        for tensor in stack.packed:
            tensor.view(torch.uint8).zero_() if tensor.numel() else None
    save_file(first.state_dict(), tmp_path / "experts.safetensors")
    assert set(load_file(tmp_path / "experts.safetensors")) == set(second.state_dict())
    second.load_state_dict(load_file(tmp_path / "experts.safetensors"))
    x, index, weights = routing(7, 2)
    assert torch.equal(first(x, index, weights), second(x, index, weights))
    with pytest.raises(InputError, match="packed tensors fit only"):
        experts(ExpertGate("relu2", False))[0].load_state_dict(first.state_dict())
