"""The decoder benchmark on a tiny model: its loop gives the model's own greedy tokens, and its report is complete."""

import sys
from pathlib import Path

import pytest
import torch

from bitline import QuantLinear
from tiny import llama

TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": False, "initializer_range": 0.3,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import decoder_gpu

    yield decoder_gpu
    for name in ("decoder_gpu", "_measure", "_machine"):
        sys.modules.pop(name, None)


@torch.inference_mode()
def test_the_loop_is_greedy_decoding(bench):
    model = llama()
    prompt = torch.randint(3, 100, (3, 5))
    decoder = bench.Decoder(model, prompt, 12)
    for _ in range(2):  # a rewound decoder does the same again
        ids = torch.cat((prompt, decoder.token), 1)
        for _ in range(6):
            decoder.step()
            want = model(input_ids=ids, use_cache=False).logits[:, -1]
            torch.testing.assert_close(decoder.logits, want, rtol=1e-4, atol=1e-4)
            ids = torch.cat((ids, decoder.token), 1)
        decoder.rewind()


@pytest.mark.parametrize(("backend", "batches"), [("", (1, 3)), ("eager", (2,))], ids=["plain", "compiled"])
def test_the_report(bench, backend, batches):
    report = bench.measure(
        TINY, "cpu", batches=batches, prompt=6, length=9, rounds=1, eager_steps=2, group=32, backend=backend, head=not backend
    )
    assert [(r["model"], r["batch"]) for r in report["runs"]] == [
        (name, batch) for name in ("bf16", "W4A16, head in bf16", "W4A16, head too")[: 2 if backend else 3] for batch in batches
    ]
    for row in report["runs"]:
        assert row["layers"] == 15 and row["step_ms"] > 0 and row["linear_ms"] > 0 and row["eager_ms"] > 0
        assert row["limit_ms"] == pytest.approx(row["bytes_ms"] + 15 * 2e-3, abs=1e-3)
    moved = [row["linear_bytes"] for row in report["runs"][:: len(batches)]]
    assert moved == sorted(set(moved), reverse=True)
    assert report["kernels"] and len(report["agreement"]) == len(batches)


@torch.inference_mode()
def test_a_wrong_layer_is_found(bench):
    model = bench.llama(TINY, "cpu")
    quantized, dense, exact = bench.quantize(model, "W4A16", 32)
    assert all(isinstance(m, QuantLinear) for m in quantized.values()) and len(quantized) == 15
    bench.agreement(model, exact, quantized, dense, 2, 6)
    name = "model.layers.1.mlp.down_proj"
    quantized[name] = quantized["model.layers.0.mlp.down_proj"]
    with pytest.raises(AssertionError, match="ours step"):
        bench.agreement(model, exact, quantized, dense, 2, 6)


@torch.inference_mode()
def test_merged_and_separate_layers_take_the_same_step(bench, monkeypatch):
    import decoder_merged

    monkeypatch.setitem(decoder_merged.SCHEMES, "W4A16", 32)
    found = []
    for merged in (False, True):
        model = bench.llama(TINY, "cpu")
        decoder_merged.quantize(model, "W4A16", merged=merged)
        timing = decoder_merged.Timing(model, 3, 6, 9, "eager")
        row = timing.times(1)
        assert row["step_ms"] > 0 and row["linear_ms"] > 0 and row["layers"] == (9 if merged else 15)
        found.append(timing.logits)
    for apart, together in zip(*found, strict=True):
        torch.testing.assert_close(apart, together, rtol=0.05, atol=0.05)
    sys.modules.pop("decoder_merged")
