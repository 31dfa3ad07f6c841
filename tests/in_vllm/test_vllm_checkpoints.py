"""quantization="bitline" in vLLM: every format gives load_model's tokens, on one rank and two, eager and compiled."""

import pytest

pytest.importorskip("vllm.engine.arg_utils")

import vllm_models
from engine import check_bfloat16, check_reload, check_tokens, check_two_ranks, noisy


@pytest.fixture(autouse=True)
def verified(monkeypatch):
    monkeypatch.setenv("BITLINE_VERIFY", "1")


@pytest.mark.parametrize("name", vllm_models.BY_NAME)
def test_a_format_gives_the_tokens_of_load_model(name, checkpoint):
    check_tokens(checkpoint(name))


@pytest.mark.parametrize("name", ["gptq-actorder", "gguf-q4_0"])
def test_a_compiled_model_gives_the_same_tokens(name, checkpoint):
    """Act-order has operators of its own beside the kernel's; GGUF also has a quantized embedding."""
    check_tokens(checkpoint(name), enforce_eager=False)


@pytest.mark.parametrize("name", ["gptq-actorder", "gguf-q4_0", "gptq-bias"])
def test_two_ranks_give_the_same_tokens(name, checkpoint, monkeypatch):
    """Columns of act-order layers, rows of the vocabulary, and biases are cut; each rank checks its layers."""
    check_two_ranks(checkpoint(name), monkeypatch)


def test_bfloat16_gives_greedy_tokens(checkpoint):
    check_bfloat16(checkpoint("ct-w4a16"))


def test_weights_are_reloaded_in_place(checkpoint, tmp_path):
    other = vllm_models.write(tmp_path / "other", noisy(vllm_models.llama()), "gptq", "W4A16", 64)
    check_reload(checkpoint("gptq"), other, packed_addresses)


def packed_addresses(worker):
    """Where the packed tensors of all layers are: captured graphs hold these addresses."""
    layers = (m for m in worker.model_runner.model.modules() if hasattr(m, "bitline_parts"))
    return [t.data_ptr() for layer in layers for part in layer.bitline_parts for t in part.buffers()]
