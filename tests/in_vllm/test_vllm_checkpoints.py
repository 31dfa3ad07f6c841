"""quantization="bitline" in vLLM: every format gives load_model's tokens, on one rank and two, eager and compiled."""

import pytest

pytest.importorskip("vllm.engine.arg_utils")

import torch
import vllm_models
from engine import engine, expected, generate, regret, served


@pytest.fixture(autouse=True)
def verified(monkeypatch):
    monkeypatch.setenv("BITLINE_VERIFY", "1")


@pytest.mark.parametrize("name", vllm_models.BY_NAME)
def test_a_format_gives_the_tokens_of_load_model(name, checkpoint):
    path = checkpoint(name)
    assert served(path, quantization="bitline") == expected(path)


@pytest.mark.parametrize("name", ["gptq-actorder", "gguf-q4_0"])
def test_a_compiled_model_gives_the_same_tokens(name, checkpoint):
    """Act-order has operators of its own beside the kernel's; GGUF also has a quantized embedding."""
    path = checkpoint(name)
    assert served(path, quantization="bitline", enforce_eager=False) == expected(path)


@pytest.mark.parametrize("name", ["gptq-actorder", "gguf-q4_0", "gptq-bias"])
def test_two_ranks_give_the_same_tokens(name, checkpoint, monkeypatch):
    """Columns of act-order layers, rows of the vocabulary, and biases are cut; each rank checks its layers."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    path = checkpoint(name)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert served(path, quantization="bitline", **options) == expected(path)


def test_bfloat16_gives_greedy_tokens(checkpoint):
    path = checkpoint("ct-w4a16")
    assert regret(path, served(path, quantization="bitline", dtype="bfloat16")) < 0.1


def test_weights_are_reloaded_in_place(checkpoint, tmp_path):
    path, model = checkpoint("gptq"), vllm_models.llama()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    other = vllm_models.write(tmp_path / "other", model, "gptq", "W4A16", 64)
    with engine(path, quantization="bitline") as llm:
        first = generate(llm)
        (before,) = llm.collective_rpc(packed_addresses)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.reset_prefix_cache()
        assert generate(llm) == expected(other) != first
        assert llm.collective_rpc(packed_addresses) == [before]
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        llm.reset_prefix_cache()
        assert generate(llm) == first


def packed_addresses(worker):
    """Where the packed tensors of all layers are: captured graphs hold these addresses."""
    layers = (m for m in worker.model_runner.model.modules() if hasattr(m, "bitline_parts"))
    return [t.data_ptr() for layer in layers for part in layer.bitline_parts for t in part.buffers()]
