"""Many architectures, and tiny GGUF files: every linear layer is replaced, the logits equal the dequantized model's."""

import pytest
import torch

import bitline
from bitline.model.plan import quant_linears
from bitline.testing.oracle import transformers_gguf_model
from dense_gguf import write_dense
from tiny import compressed, llama, random_model

REFERENCE = bitline.Policy(kernel="ReferenceLinearKernel")
IDS = torch.tensor([[1, 5, 9, 77, 3]])
SETTINGS = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES = {
    "Qwen2": (14, {}), "Qwen3": (14, {"head_dim": 16}), "Mistral": (14, {"head_dim": 16}), "Phi3": (8, {}), "Phi": (12, {}),
    "Gemma2": (14, {"head_dim": 16, "tie_word_embeddings": True}), "GPTNeoX": (8, {}), "Falcon": (8, {}), "Cohere": (14, {}),
    "OPT": (12, {"word_embed_proj_dim": 64, "ffn_dim": 160}), "Olmo2": (14, {}), "Granite": (14, {}), "SmolLM3": (14, {}),
    "Mixtral": (8, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def logits(model):
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(tmp_path, name):
    layers, changes = ARCHITECTURES[name]
    folder, dense = compressed(tmp_path, random_model(name, SETTINGS | changes))
    model = bitline.load_model(folder, dtype=torch.float32, policy=REFERENCE)
    assert len(list(quant_linears(model))) == layers
    assert torch.equal(logits(model), logits(dense))


# ---- GGUF ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("head", [True, False], ids=["own head", "tied head"])
def test_llama_gguf_row_order_is_undone(tmp_path, kind, head):
    path = write_dense(tmp_path / "m.gguf", llama(), "llama", kind, head=head)
    model = bitline.load_model(path, dtype=torch.float32, policy=REFERENCE)
    # Seven linear layers in each of two blocks, and the head.
    assert len(list(quant_linears(model))) == 15
    assert torch.equal(logits(model), logits(transformers_gguf_model(path, torch.float32)))


def test_qwen2_gguf_with_biases(tmp_path):
    import transformers

    torch.manual_seed(0)
    dense = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SETTINGS)).float().eval()
    for name, p in dense.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    path = write_dense(tmp_path / "m.gguf", dense, "qwen2", "Q8_0")
    model = bitline.load_model(path, dtype=torch.float32, policy=REFERENCE)
    assert model.model.layers[0].self_attn.k_proj.spec.bias
    torch.testing.assert_close(logits(model), logits(transformers_gguf_model(path, torch.float32)), rtol=1e-5, atol=1e-5)


def test_gguf_of_an_unknown_architecture(tmp_path):
    path = write_dense(tmp_path / "m.gguf", llama(), "llama", "Q8_0")
    raw = path.read_bytes().replace(b"llama", b"lxama")
    path.write_bytes(raw)
    with pytest.raises(bitline.CheckpointError, match="lxama"):
        bitline.load_model(path)
