"""The kernels road: vLLM's own quantization configs run on Bitline's kernels and give the tokens of bitline.load_model."""

import logging

import pytest

pytest.importorskip("vllm.engine.arg_utils")

import torch
import vllm_models
from engine import engine, expected, generate, regret, served

# vLLM's own methods accept float32 for compressed-tensors alone.
FLOAT32 = ("ct-w4a16", "ct-w8a8", "ct-fp8", "ct-w8a16", "ct-mxfp4", "ct-mxfp8", "ct-nvfp4a4")
# In bfloat16 other sums give other tokens where two are close: how close, in standard deviations of the logits. FP8 codes of
# activations flip with the last bit of a sum: inputs off by 1e-3 move this model's logits by half a deviation.
BFLOAT16 = {"gptq": 0.1, "gptq-bias": 0.1, "awq": 0.1, "fp8-block": 0.5, "quark-mxfp6": 0.1, "quark-mxfp6-e2m3": 0.1,
            "quark-mxfp6-activations": 0.5}  # fmt: skip


def used_kernels(worker):
    """The classes of vLLM's kernels that run a layer of Bitline's."""
    layers = [m for m in worker.model_runner.model.modules() if hasattr(m, "bitline_parts")]
    return [part.choice.best.name for layer in layers for part in layer.bitline_parts]


@pytest.mark.parametrize("name", [*FLOAT32, *BFLOAT16])
def test_vllms_own_methods_run_on_bitlines_kernels(name, checkpoint, monkeypatch):
    monkeypatch.setenv("BITLINE_VERIFY", "1")
    path, is_close = checkpoint(name), BFLOAT16.get(name)
    with engine(path, dtype="float32" if is_close is None else "bfloat16") as llm:
        tokens = generate(llm)
        assert tokens == expected(path) if is_close is None else regret(path, tokens) < is_close
        (names,) = llm.collective_rpc(used_kernels)
        assert len(names) == 8  # four layers in each of two blocks, each on a kernel that does not emulate
        assert not any("Emulation" in n or "Reference" in n for n in names)


def test_other_tokens_are_far_from_greedy(checkpoint):
    path = checkpoint("fp8-block")
    assert regret(path, [token + 1 for token in expected(path)]) > 1


def test_a_kernel_is_logged_once_per_distinct_layer_with_the_reason(checkpoint, monkeypatch):
    from bitline.engines import packed_layer

    class Recorder(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    lines, logger, recorder = [], logging.getLogger("vllm.plugins.bitline"), Recorder()
    monkeypatch.setattr(packed_layer, "_logged", set())
    logger.addHandler(recorder)
    served(checkpoint("ct-w4a16"))
    logger.removeHandler(recorder)
    lines = [line for line in lines if " runs on " in line]
    assert len(lines) == 4 and all("runner-up" in line for line in lines)
    assert any(line.startswith("model.layers.0.self_attn.qkv_proj ([512, 256] uint4b8 g64") for line in lines)


def test_weights_are_reloaded(checkpoint, tmp_path):
    path, model = checkpoint("ct-w4a16"), vllm_models.llama()
    for parameter in model.parameters():
        parameter.data.mul_(-1.5)
    other = vllm_models.write(tmp_path / "other", model, "compressed-tensors", "W4A16", 64, dtype=torch.bfloat16)
    with engine(path) as llm:
        first = generate(llm)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.reset_prefix_cache()
        assert generate(llm) == expected(other) != first


def test_disabled_kernels_give_way_to_vllms(checkpoint, monkeypatch):
    """VLLM_DISABLED_KERNELS names our classes as it names vLLM's."""
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "BitlineInt8ScaledMMLinearKernel,BitlineInt8ScaledMMEmulationLinearKernel")
    with engine(checkpoint("ct-w8a8"), dtype="bfloat16") as llm:
        assert llm.collective_rpc(used_kernels) == [[]]
        assert len(generate(llm)) == 12


def test_emulation_comes_after_vllms_kernels(checkpoint, monkeypatch):
    """With every kernel but the reference disabled, vLLM's own kernel runs the layers."""
    from bitline.kernels import registry

    registry.load()
    fast = [entry.name for entry in registry.entries() if not entry.kernel.emulates]
    monkeypatch.setenv("BITLINE_DISABLED_KERNELS", ",".join(fast))
    with engine(checkpoint("ct-w8a8"), dtype="bfloat16") as llm:
        assert llm.collective_rpc(used_kernels) == [[]]
