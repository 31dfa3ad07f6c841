"""experts_implementation="bitline": transformers' unquantized experts by the loop of QuantExperts."""

import forms
import pytest
import torch
import transformers
from loading import IDS, logits, through_transformers

import bitline
from bitline.experts import QuantExperts

KINDS = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_unquantized_models(kind, tmp_path):
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 4096}  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings | KINDS[kind], initializer_range=0.1)
    getattr(transformers, f"{kind}ForCausalLM")(config).float().save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    eager, mine = (load(tmp_path, experts_implementation=name, dtype=torch.float32) for name in ("eager", "bitline"))
    assert mine.config._experts_implementation == "bitline"
    torch.testing.assert_close(logits(mine), logits(eager), rtol=1e-4, atol=1e-5)
    mine.train()
    mine(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for name, p in mine.named_parameters() if "experts" in name)


@pytest.mark.parametrize("form", ["qwen3 layer unquantized", "qwen3 gptq"])
def test_beside_quantized_experts(form, tmp_path):
    path, _ = forms.FORMS[form](tmp_path)
    mine = through_transformers(path, experts_implementation="bitline", dtype=torch.float32)
    kinds = {isinstance(layer.mlp.experts, QuantExperts) for layer in mine.model.layers}
    assert kinds == ({True, False} if "unquantized" in form else {True})
    torch.testing.assert_close(logits(mine), logits(bitline.load_model(path, dtype=torch.float32)), rtol=1e-4, atol=1e-5)
