"""Many architectures, and tiny GGUF files: every linear layer is replaced, the logits equal the dequantized model's."""

import gguf
import numpy as np
import pytest
import torch

import bitline
from bitline.model.plan import quant_linears
from bitline.testing.oracle import transformers_gguf_model
from tiny import compressed, llama

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
    import transformers

    layers, changes = ARCHITECTURES[name]
    config = getattr(transformers, f"{name}Config")(**(SETTINGS | changes))
    torch.manual_seed(0)
    folder, dense = compressed(tmp_path, getattr(transformers, f"{name}ForCausalLM")(config).float().eval())
    model = bitline.load_model(folder, dtype=torch.float32, policy=REFERENCE)
    assert len(list(quant_linears(model))) == layers
    assert torch.equal(logits(model), logits(dense))


# ---- GGUF ------------------------------------------------------------------------------------------------------------------


def write_gguf(path, model, architecture: str, kind: gguf.GGMLQuantizationType, *, head: bool):
    """Write a model as llama.cpp's converter does: its names, metadata, and row order of q and k."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(160)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and not head:
            continue
        stem, _, leaf = name.rpartition(".")
        data = tensor.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        target = f"{names.get_name(stem)}.{leaf}"
        if data.ndim == 2 and data.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("head", [True, False], ids=["own head", "tied head"])
def test_llama_gguf_row_order_is_undone(tmp_path, kind, head):
    path = write_gguf(tmp_path / "m.gguf", llama(), "llama", gguf.GGMLQuantizationType[kind], head=head)
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
    path = write_gguf(tmp_path / "m.gguf", dense, "qwen2", gguf.GGMLQuantizationType.Q8_0, head=True)
    model = bitline.load_model(path, dtype=torch.float32, policy=REFERENCE)
    assert model.model.layers[0].self_attn.k_proj.spec.bias
    torch.testing.assert_close(logits(model), logits(transformers_gguf_model(path, torch.float32)), rtol=1e-5, atol=1e-5)


def test_gguf_of_an_unknown_architecture(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama(), "llama", gguf.GGMLQuantizationType.Q8_0, head=True)
    raw = path.read_bytes().replace(b"llama", b"lxama")
    path.write_bytes(raw)
    with pytest.raises(bitline.CheckpointError, match="lxama"):
        bitline.load_model(path)
