"""Every format through from_pretrained: the bits of load_model, in float32 and bfloat16, and the same greedy tokens."""

import forms
import pytest
import torch
from loading import IDS, assert_same, logits, through_transformers
from whole_models import FIXTURES, complete

import bitline
from bitline.experts import QuantExperts
from bitline.model.embedding import QuantEmbedding
from bitline.model.plan import quant_linears
from dense_gguf import write_dense
from thinning import thinned
from tiny import compressed, llama

DTYPES = [torch.float32, torch.bfloat16]
GGUF_KINDS = ["Q4_0", "Q8_0", "F16", "BF16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fixture", thinned(FIXTURES, 16))
def test_fixtures(tmp_path, fixture, dtype):
    model = assert_same(complete(fixture, tmp_path), dtype)
    assert model.bitline_weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", thinned(list(forms.FORMS), 6))
def test_mixture_of_experts(tmp_path, form, dtype):
    path, _ = forms.FORMS[form](tmp_path)
    model = assert_same(path, dtype)
    assert any(isinstance(module, QuantExperts) for module in model.modules())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_gguf(tmp_path, kind, head, dtype):
    dense = llama(tie_word_embeddings=not head)
    path = tmp_path / "model.gguf"
    write_dense(path, dense, "llama", kind, head=head)
    model = assert_same(path, dtype)
    quantized = kind.startswith("Q")
    assert isinstance(model.model.embed_tokens, QuantEmbedding) == quantized
    assert len(list(quant_linears(model))) == 15 * quantized


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_heads_and_biases(tmp_path, tied, dtype):
    dense = llama(tie_word_embeddings=tied, attention_bias=True)
    for name, parameter in dense.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    folder, _ = compressed(tmp_path, dense, skip=() if not tied else ("lm_head",))
    model = assert_same(folder, dtype)
    if tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_merged_siblings(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    policy = bitline.Policy(batch_invariant=True)
    merged = through_transformers(folder, policy=policy, dtype=torch.float32, config_options={"merge": True})
    reference = bitline.load_model(folder, dtype=torch.float32, policy=policy, merge=True)
    assert {name for name, _ in quant_linears(merged)} == {name for name, _ in quant_linears(reference)}
    assert "model.layers.0.self_attn.qkv_proj" in merged.bitline_weights
    assert torch.equal(logits(merged), logits(reference))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_tokens(tmp_path, dtype, cache):
    folder, _ = compressed(tmp_path, llama())
    tokens = [
        model.generate(IDS, max_new_tokens=12, do_sample=False, cache_implementation=cache, min_new_tokens=12)
        for model in (through_transformers(folder, dtype=dtype), bitline.load_model(folder, dtype=dtype))
    ]
    assert tokens[0].shape == (1, 17) and torch.equal(*tokens)


def test_several_shards(tmp_path):
    import json

    from safetensors.torch import load_file, save_file

    folder, _ = compressed(tmp_path, llama())
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f for f, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert_same(folder, torch.float32)
