"""One token after another without the model's own forward: the same bits, and when the forward is called all the same."""

import copy

import pytest
import torch

import bitline
import tiny
from bitline import native
from bitline.model.load import load_model
from bitline.model.token_step import TokenStep
from decoding import generated_tokens, prompt_cache, write_family

pytestmark = [
    pytest.mark.skipif(native.core() is None, reason="needs the native core"),
    pytest.mark.usefixtures("one_thread_inference"),
]
transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16
PROMPT = torch.tensor([[1, 5, 9, 33, 7]])


@pytest.fixture
def load(tmp_path):
    """A loaded model of an architecture, with random weights."""

    def make(name="Llama", **changes):
        folder = write_family(tmp_path / name, name, **changes)
        with torch.inference_mode(mode=False):
            return load_model(folder, dtype=BF16)

    return make


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "llama3", "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}])  # fmt: skip
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_logits_are_the_forwards(name, rope, load):
    """Over the ends of a KV cache's buffers and of a block of rotations."""
    model = load(name, **({"rope_parameters": {"rope_theta": 10000.0, **rope}} if rope else {}))
    ids = torch.randint(3, 100, (1, 300))
    cache, other = prompt_cache(model, ids[:, :200]), prompt_cache(model, ids[:, :200])
    step = TokenStep.of(model, cache)
    for i in range(200, 300):
        expected = model(input_ids=ids[:, i : i + 1], past_key_values=other, use_cache=True).logits
        assert torch.equal(step.logits(ids[:, i : i + 1]), expected)
    assert [layer.length for layer in cache.layers] == [300, 300]
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, other.layers, strict=True))


def test_generation_calls_the_forward_for_the_prompt_only(load, monkeypatch):
    model, calls = load(), []
    expected = model.generate(PROMPT, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    decoder = type(model.model)
    own = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *a, **k: calls.append(1) or own(*a, **k))
    monkeypatch.setattr("bitline.model.token_step.calls_layers_in_order", lambda _: True)  # the patched one has another source
    assert list(generated_tokens(model, PROMPT)) == expected and len(calls) == 1


@pytest.mark.parametrize("part", ["", "model"])
def test_a_forward_that_its_class_gets_later_is_called_for_each_token(part, load, monkeypatch):
    model, calls = load(), []
    expected = generated_tokens(model, PROMPT)
    cls = type(model.get_submodule(part))
    own = cls.forward
    monkeypatch.setattr(cls, "forward", lambda *a, **k: calls.append(1) or own(*a, **k))
    assert generated_tokens(model, PROMPT) == expected and len(calls) == 20
    monkeypatch.undo()
    assert generated_tokens(model, PROMPT) == expected and len(calls) == 20


class WrappedAttention(torch.nn.Module):
    """Another attention module, with none of its attributes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments, **options):
        return self.inner(*arguments, **options)


@pytest.mark.parametrize("index", [0, 1])
def test_replaced_attention_is_called_for_each_token(index, load):
    model, calls = load(), []
    layer = model.model.layers[index]
    layer.self_attn = WrappedAttention(layer.self_attn)
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert len(generated_tokens(model, PROMPT)) == 20 == len(calls)


@pytest.mark.parametrize("part", ["", "model"])
def test_hooks_on_the_model_are_called_for_each_token(part, load):
    model, calls = load(), []
    expected = generated_tokens(model, PROMPT)
    model.get_submodule(part).register_forward_hook(lambda *_: calls.append(1))
    assert generated_tokens(model, PROMPT) == expected and len(calls) == 20


@pytest.mark.parametrize("part", ["model.embed_tokens", "model.norm", "lm_head", "model.layers.1", "model.layers.0.mlp"])
def test_hooks_on_parts_are_called_for_each_token(part, load):
    model, calls = load(), []
    expected = generated_tokens(model, PROMPT)
    model.get_submodule(part).register_forward_hook(lambda *_: calls.append(1))
    tokens = generated_tokens(model, PROMPT)
    assert len(calls) == 20 and (part.endswith("mlp") or tokens == expected)  # with the hook torch's modules compute that layer


def test_a_model_that_changed_since_the_last_text_generates_anew(load):
    model = load()
    before = generated_tokens(model, PROMPT)
    other = copy.deepcopy(model)
    for each in (model, other):
        each.model.layers[1].mlp.down_proj.reload(bitline.quantize(torch.ones(64, 160), "W4A16", group_size=32))
    assert generated_tokens(model, PROMPT) == generated_tokens(other, PROMPT) != before


def test_other_models_and_caches_have_no_step(load):
    model = load()
    cache = prompt_cache(model, PROMPT)
    assert TokenStep.of(model, cache) is not None
    filled = transformers.DynamicCache(config=model.config)
    for layer in filled.layers:
        layer.update(torch.zeros(1, 2, 3, 16, dtype=BF16), torch.zeros(1, 2, 3, 16, dtype=BF16))
    assert TokenStep.of(model, filled) is None
    model.model.rotary_emb.rope_type = "dynamic"
    assert TokenStep.of(model, cache) is None
    model.model.rotary_emb.rope_type = "default"
    model.train()
    assert TokenStep.of(model, cache) is None
    model.eval()
    model.forward = model.forward
    assert TokenStep.of(model, cache) is None
    del model.forward
    model.model.layers = torch.nn.ModuleList([*model.model.layers, model.model.layers[0]])
    assert TokenStep.of(model, cache) is None
    assert TokenStep.of(tiny.llama(), cache) is None and TokenStep.of(torch.nn.Linear(2, 2), cache) is None


def test_a_step_that_fails_leaves_the_token_to_the_model(load, monkeypatch):
    model = load()
    expected = generated_tokens(model, PROMPT)
    monkeypatch.setattr(native.core(), "decode_layers", lambda *a: -2)  # no memory
    assert generated_tokens(model, PROMPT) == expected


def test_weights_that_go_away_meanwhile_are_not_freed(load):
    """The addresses that native code has stay valid, also where somebody breaks the rule that the model must not change."""
    model = load()
    cache = prompt_cache(model, PROMPT)
    step = TokenStep.of(model, cache)
    expected = step.logits(PROMPT[:, :1])
    for held in cache.layers:
        held.length -= 1
    for layer in model.model.layers:
        layer.input_layernorm.weight.data = torch.zeros(64, dtype=BF16)
        layer.mlp.down_proj.reload(bitline.quantize(torch.zeros(64, 160), "W4A16", group_size=32))
    torch.full((1 << 20,), torch.nan)
    assert torch.equal(step.logits(PROMPT[:, :1]), expected)
