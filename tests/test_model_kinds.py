"""Models of every kind: encoders, encoders with decoders, vision, speech, images and text, with all linear layers packed."""

import pytest
import torch

import bitline
from bitline.conversion import quantize_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGES = {"image_size": 32, "patch_size": 8}
T5 = {"decoder_start_token_id": 0, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 100, "num_mel_bins": 8, "max_source_positions": 32,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
QWEN_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def words():
    return {"input_ids": torch.tensor([[5, 6, 7]])}


def picture():
    return {"pixel_values": torch.randn(1, 3, 32, 32)}


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, vocab_size=100, max_position_embeddings=64)), words()


def classifier():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig(**SIZES, vocab_size=100, num_labels=3, pad_token_id=0)), words()


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(**T5)), words() | {"decoder_input_ids": torch.tensor([[0, 5]])}


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SIZES, **IMAGES)), picture()


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    inputs = {"input_features": torch.randn(1, 8, 64), "decoder_input_ids": torch.tensor([[1, 5, 6]])}
    return WhisperForConditionalGeneration(WhisperConfig(**WHISPER)), inputs


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIZES, **IMAGES, projection_dim=64),
        text_config=LlamaConfig(**SIZES, vocab_size=100), image_token_index=99,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config), picture() | {"input_ids": torch.tensor([[5] + [99] * 16 + [7]])}


def qwen_vl():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = SIZES | {"vocab_size": 100, "num_key_value_heads": 2, "rope_parameters": QWEN_ROPE}
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)), words()


@pytest.mark.parametrize("make", [bert, classifier, t5, vit, whisper, llava, qwen_vl])
def test_outputs_are_those_of_dequantized_weights(tmp_path, make):
    torch.manual_seed(0)
    model, inputs = make()
    model.bfloat16().save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", group_size=32)
    loaded = bitline.load_model(tmp_path / "quantized", dtype=torch.float32, policy=bitline.Policy("ReferenceLinearKernel"))
    assert type(loaded) is type(model)
    dense = type(model).from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    modules = dict(dense.named_modules())
    heads = {name for name in modules if name.endswith(("lm_head", "predictions.decoder", "proj_out"))}
    linear = {name for name, m in modules.items() if isinstance(m, torch.nn.Linear)} - heads
    assert set(loaded.bitline_weights) == linear
    for name in linear:
        weight = modules[name].weight
        expected = bitline.quantize(weight.detach().bfloat16(), "W4A16", group_size=32).dequantize()
        assert torch.equal(loaded.bitline_weights[name]().dequantize(), expected), name
        weight.data = expected
    with torch.no_grad():
        ours, theirs = loaded(**inputs).logits, dense(**inputs).logits
    assert theirs.isfinite().all() and torch.allclose(ours, theirs, rtol=0, atol=2e-6)


def test_an_encoder_with_a_decoder_generates(tmp_path):
    torch.manual_seed(0)
    model, _ = t5()
    model.save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", group_size=32)
    loaded = bitline.load_model(tmp_path / "quantized")
    assert loaded.generate(**words(), max_new_tokens=5, min_new_tokens=5).shape == (1, 6)
