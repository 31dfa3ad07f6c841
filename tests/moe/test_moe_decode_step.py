"""One token through layers with experts on a CPU: all but the MLP in one native call."""

import pytest
import torch
from forms import FORMS
from moe_models import make

import bitline
from bitline import native
from bitline.model import decode_step
from decoding import record_calls, token_logits

pytestmark = [
    pytest.mark.skipif(native.core() is None, reason="needs the native core"),
    pytest.mark.usefixtures("one_thread_inference"),
]
pytest.importorskip("transformers")
IDS = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def native_calls(monkeypatch):
    """Addresses of the described layers, whether their MLP is native."""
    return record_calls(monkeypatch, decode_layer=lambda at, *_: has_native_mlp(at))


def has_native_mlp(address):
    from bitline.model.decoder_layer import LayerFields

    return LayerFields.from_address(address)[18] != 0  # the packed weight of gate_proj


def logits(model):
    return token_logits(model, IDS)


@pytest.mark.parametrize("form", ["qwen3 gptq", "mixtral gptq", "qwen3 experts only"])
def test_layers_with_experts(form, tmp_path, native_calls, monkeypatch):
    folder, _ = FORMS[form](tmp_path)
    load = lambda dtype, **options: bitline.load_model(folder, dtype=dtype, **options)
    exact = logits(load(torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel")))
    plain = logits(load(torch.bfloat16, native_step=False))
    assert not native_calls
    fast = logits(load(torch.bfloat16))
    attention_is_packed = form != "qwen3 experts only"
    assert native_calls == ([False] * 2 * 37 if attention_is_packed else [])
    error, allowed = (fast - exact).abs(), (plain - exact).abs()
    assert error.mean() <= 1.5 * allowed.mean() and error.max() <= 2 * allowed.max()


def test_a_dense_layer_among_them_is_native_as_a_whole(tmp_path, native_calls):
    from forms import everything
    from moe_files import write

    model = make("qwen3_moe", mlp_only_layers=[0])
    loaded = bitline.load_model(write(tmp_path, "qwen3_moe", model, "gptq", everything("W4A16", 32)), dtype=torch.bfloat16)
    logits(loaded)
    assert native_calls == [True, False] * 37
    first, second = loaded.model.layers
    assert decode_step.has_native_step(first) and not decode_step.has_native_step(second)


def test_hooks_in_such_a_layer_are_called(tmp_path):
    model = bitline.load_model(FORMS["qwen3 gptq"](tmp_path)[0], dtype=torch.bfloat16)
    expected = logits(model)
    for name in ("mlp", "mlp.gate", "mlp.experts", "self_attn", "self_attn.o_proj", "input_layernorm"):
        calls = []
        handle = model.model.layers[0].get_submodule(name).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        found = logits(model)
        handle.remove()
        assert len(calls) == 38 and (not name.startswith("mlp") or torch.equal(found, expected)), name


def test_the_bits_of_the_parts(tmp_path):
    """What the native call hands to the MLP and adds to its output."""
    model = bitline.load_model(FORMS["mixtral gptq"](tmp_path)[0], dtype=torch.bfloat16)
    layer, seen = model.model.layers[1], []
    layer.mlp.register_forward_hook(lambda _module, arguments, y: seen.append((arguments[0], y)))
    layer.register_forward_hook(lambda _module, _arguments, y: seen.append(y))
    logits(model)
    (normed, out), y = seen[-2:]
    residual = y - out
    assert normed.shape == y.shape == (1, 1, 128)
    assert (layer.post_attention_layernorm(residual) - normed).abs().max() <= 0.05 * normed.abs().max()
