"""Greedy decoding: Bitline's loop against transformers' generate, for every model family that uses it."""

import pytest
import torch

import tiny
from bitline import native
from bitline.errors import InputError
from bitline.model import generate as module

IDS = torch.tensor([[1, 5, 9, 33]])


class IdTokenizer:
    """A tokenizer whose text is the token ids."""

    eos_token_id = 2

    def decode(self, ids, **_options):
        return " ".join(map(str, ids if isinstance(ids, list) else ids.tolist()))


def both(model, monkeypatch, **options):
    """Generate with Bitline's loop, then with transformers'."""
    assert module._is_plain_greedy(model)
    ours = module.generate(model, IdTokenizer(), IDS, **options)
    monkeypatch.setattr(module, "_is_plain_greedy", lambda _model: False)
    return ours, module.generate(model, IdTokenizer(), IDS, **options)


def family(name):
    import transformers

    settings = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2, "initializer_range": 0.3,
    }  # fmt: skip
    more = {"Mistral": {"sliding_window": 6}, "Gemma2": {"sliding_window": 6, "head_dim": 16}, "Qwen3": {"head_dim": 16}}
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**settings, **more.get(name, {}))
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2"])
@pytest.mark.parametrize("stop", [True, False])
def test_same_tokens_as_transformers(name, stop, monkeypatch):
    ours, theirs = both(family(name), monkeypatch, max_new_tokens=20, stop=stop)
    assert ours.token_ids == theirs.token_ids and ours.text == theirs.text and ours.new_tokens == theirs.new_tokens
    assert stop or ours.new_tokens == 20


@pytest.mark.parametrize("several", [False, True])
def test_stops_at_eos(several, monkeypatch):
    model = tiny.llama()
    first = module.generate(model, IdTokenizer(), IDS, max_new_tokens=12, stop=False).token_ids
    stops = [first[3], 99] if several else first[3]
    model.generation_config.eos_token_id = stops
    ours, theirs = both(model, monkeypatch, max_new_tokens=12)
    assert ours.token_ids == theirs.token_ids and len(ours.token_ids) <= 4 and ours.token_ids[-1] == first[3]


def test_text_is_streamed(monkeypatch):
    chunks = []
    ours, theirs = both(tiny.llama(), monkeypatch, max_new_tokens=6, stop=False, on_text=chunks.append)
    text = "".join(chunks)
    assert text[: len(text) // 2] == text[len(text) // 2 :] and ours.text in text and theirs.text == ours.text


@pytest.mark.parametrize(
    "change", [{"repetition_penalty": 1.3}, {"cache_implementation": "static"}, {"suppress_tokens": [3]}, {"use_cache": False}]
)
def test_other_generation_options_use_transformers(change):
    model = tiny.llama()
    for name, value in change.items():
        setattr(model.generation_config, name, value)
    assert not module._is_plain_greedy(model)
    assert module.generate(model, IdTokenizer(), IDS, max_new_tokens=3, stop=False).new_tokens == 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_logits(bad):
    model = tiny.llama()
    model.lm_head.weight.data[7] = bad
    with pytest.raises(InputError, match="NaN or infinite"):
        module.generate(model, IdTokenizer(), IDS, max_new_tokens=3)


@pytest.mark.skipif(native.core() is None or native.core().threads_from != 2, reason="torch's OpenMP threads and a native core")
def test_torch_runs_alone_while_its_threads_are_held_up():
    """Generation is a scope of `native.adapted_threads`: a busy machine lowers torch's number of threads in it only."""
    core, model, seen = native.core(), tiny.llama(), []

    def as_on_a_busy_machine(*_):
        core.pretend_contended(10**12)
        core.empty_parallel_regions(1, 4)
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    quiet = module.generate(model, IdTokenizer(), IDS, max_new_tokens=4, stop=False)
    torch.set_num_threads(2)
    try:
        with model.register_forward_pre_hook(as_on_a_busy_machine):
            busy = module.generate(model, IdTokenizer(), IDS, max_new_tokens=4, stop=False)
        assert torch.get_num_threads() == 2
    finally:
        core.pretend_contended(0)
        torch.set_num_threads(before)
    assert seen == [1] * 4 and busy.token_ids == quiet.token_ids
