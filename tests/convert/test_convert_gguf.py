"""To and from GGUF: names, row order, metadata and tokenizers, on whole models whose logits must not change."""

import json

import pytest
import torch
from external_decoders import gguf_tensors
from gguf_models import byte_level_bpe, checkpoint, largest_logprob_difference, other
from record_interop import LLAMA_CPP
from safetensors.torch import load_file, save_file

import bitline
from bitline.conversion.gguf.tokenizer import tokenizer_metadata
from bitline.conversion.open_source import source_model
from bitline.errors import CheckpointError, ConversionError, InputError
from tiny import llama

_EXACT = {"dtype": torch.float32, "policy": bitline.Policy(kernel="ReferenceLinearKernel")}


MODELS = {
    "llama": lambda: llama(), "biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "tied": lambda: llama(tie_word_embeddings=True), "wide heads": lambda: llama(head_dim=32),
    "mistral": lambda: other("Mistral", sliding_window=None), "qwen2": lambda: other("Qwen2"),
    "qwen3": lambda: other("Qwen3", head_dim=128),
}  # fmt: skip


def logits(path):
    model = bitline.load_model(path, **_EXACT)
    with torch.no_grad():
        return model(torch.arange(1, 40).unsqueeze(0)).logits


@pytest.mark.parametrize("kind", MODELS)
def test_round_trip_through_gguf(kind, tmp_path):
    """A round trip through llama.cpp's names and row order keeps the logits bit for bit."""
    source = checkpoint(tmp_path / "source", MODELS[kind]())
    before = logits(source)
    report = bitline.convert(source, tmp_path / "model.gguf", to="gguf")
    assert report.exact and len(report.layers) == 14 and {layer.after for layer in report.layers} == {"uint4b8 g32"}
    assert torch.equal(logits(tmp_path / "model.gguf"), before)
    for to in ("compressed-tensors", "gptq", "awq"):
        back = bitline.convert(tmp_path / "model.gguf", tmp_path / to, to=to)
        assert back.exact and torch.equal(logits(tmp_path / to), before)
        original, again = bitline.open_checkpoint(source), bitline.open_checkpoint(tmp_path / to)
        assert {r.name for r in original.layers()} == {r.name for r in again.layers()}
        assert set(original.dense_names()) == set(again.dense_names())


def test_metadata_that_llama_cpp_requires(tmp_path):
    source = checkpoint(tmp_path / "source", llama(rms_norm_eps=1e-5))
    bitline.convert(source, tmp_path / "m.gguf", to="gguf")
    found = bitline.open_checkpoint(tmp_path / "m.gguf").metadata
    wanted = {
        "general.architecture": "llama", "general.file_type": 2, "general.quantization_version": 2, "llama.block_count": 2,
        "llama.context_length": 64, "llama.embedding_length": 64, "llama.feed_forward_length": 160,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.attention.key_length": 16,
        "llama.rope.dimension_count": 16, "llama.rope.freq_base": 10000.0, "llama.vocab_size": 100,
        "tokenizer.ggml.model": "no_vocab",
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    tensors = gguf_tensors(tmp_path / "m.gguf")
    assert {"token_embd.weight", "output.weight", "output_norm.weight", "blk.1.ffn_down.weight", "blk.0.attn_q.weight"} <= set(
        tensors
    )


def test_vectors_are_float32_and_matrices_keep_their_dtype(tmp_path):
    source = checkpoint(tmp_path / "source", llama(attention_bias=True), float_dtype=torch.bfloat16)
    bitline.convert(source, tmp_path / "m.gguf", to="gguf")
    opened = bitline.open_checkpoint(tmp_path / "m.gguf").source
    kinds = {name: (kind, len(shape)) for name, (kind, shape) in opened.ggml.items()}
    assert all(kind == "F32" for kind, rank in kinds.values() if rank == 1)
    assert kinds["token_embd.weight"] == kinds["output.weight"] == ("BF16", 2)


def test_llama3_frequency_factors(tmp_path):
    """rope_freqs divides the default frequencies; the quotients are the inv_freq that transformers computes."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512}  # fmt: skip
    model = lambda: llama(rope_parameters=rope, max_position_embeddings=4096, head_dim=64)
    source = checkpoint(tmp_path / "source", model())
    bitline.convert(source, tmp_path / "m.gguf", to="gguf")
    factors = gguf_tensors(tmp_path / "m.gguf")["rope_freqs.weight"]
    plain = 1 / (500000.0 ** (torch.arange(0, 64, 2).double() / 64))
    torch.testing.assert_close((plain / factors.double()).float(), model().model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert factors.min() == 1 and factors.max() == 8 and ((factors > 1) & (factors < 8)).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, r"this architecture.*gpt_neox"), ({"model_type": None}, "this architecture"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "rotary embeddings.*yarn"),
        ({"num_hidden_layers": "two"}, "no usable num_hidden_layers"), ({"vocab_size": -1}, "no usable vocab_size"),
    ],
)  # fmt: skip
def test_models_that_llama_cpp_would_run_differently_are_refused(changes, message, tmp_path):
    source = checkpoint(tmp_path / "source", llama())
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=message):
        bitline.convert(source, tmp_path / "m.gguf", to="gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_tensor_without_a_llama_cpp_name_is_refused(tmp_path):
    source = checkpoint(tmp_path / "source", llama())
    tensors = load_file(source / "model.safetensors") | {"model.layers.0.mlp.strange.weight": torch.ones(4, 64)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"no name in llama\.cpp.*strange"):
        bitline.convert(source, tmp_path / "m.gguf", to="gguf")


def test_gguf_to_gguf_is_refused(tmp_path):
    source = checkpoint(tmp_path / "source", llama())
    bitline.convert(source, tmp_path / "m.gguf", to="gguf")
    with pytest.raises(InputError, match="gguf file already"):
        bitline.convert(tmp_path / "m.gguf", tmp_path / "n.gguf", to="gguf")


def test_gguf_tensor_without_a_module_is_refused(tmp_path):
    import bases

    raw = bases.gguf_bytes(bases.PAIRS, bases.one_matrix("blk.0.strange.weight")[0], bases.q8_0(32, 64))
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match="no module for a quantized tensor"):
        bitline.convert(tmp_path / "m.gguf", tmp_path / "out", to="gptq")


# ---- tokenizers ----------------------------------------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split_pre_tokenizer(digits):
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_CONTRACTIONS + digits + _REST), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def pre_tokenizers_by_name():
    from tokenizers import pre_tokenizers

    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return {
        "gpt-2": bytes_, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_]),
        "llama-bpe": split_pre_tokenizer(r"\p{N}{1,3}"), "qwen2": split_pre_tokenizer(r"\p{N}"),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers(name, tmp_path):
    """The file names the pre-tokenizer; the expression itself is in llama.cpp."""
    source = checkpoint(tmp_path / "source", llama(vocab_size=264, bos_token_id=257))
    byte_level_bpe(source, pre_tokenizers_by_name()[name])
    bitline.convert(source, tmp_path / "m.gguf", to="gguf")
    found = bitline.open_checkpoint(tmp_path / "m.gguf").metadata
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == name
    tokens, types = found["tokenizer.ggml.tokens"], list(found["tokenizer.ggml.token_type"])
    assert len(tokens) == len(types) == 264 and tokens[256:260] == ["ab", "<s>", "user", "[PAD259]"]
    assert types[255:260] == [1, 1, 3, 4, 5] and found["tokenizer.ggml.merges"] == ["a b"]
    assert found["tokenizer.ggml.bos_token_id"] == 257 and found["tokenizer.chat_template"] == "{{ messages }}"
    back = bitline.convert(tmp_path / "m.gguf", tmp_path / "back", to="compressed-tensors")
    assert (tmp_path / "back" / "tokenizer.json").is_file() and any("tokenizer" in note for note in back.notes)


def test_sentencepiece_tokenizers(tmp_path):
    import sentencepiece

    source = checkpoint(tmp_path / "source", llama(vocab_size=80))
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog and the cat\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(source / "tokenizer"), vocab_size=60, model_type="bpe", minloglevel=2
    )
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    bitline.convert(source, tmp_path / "m.gguf", to="gguf")
    found = bitline.open_checkpoint(tmp_path / "m.gguf").metadata
    assert found["tokenizer.ggml.model"] == "llama" and len(found["tokenizer.ggml.scores"]) == 80
    assert found["tokenizer.ggml.tokens"][:3] == ["<unk>", "<s>", "</s>"]
    assert list(found["tokenizer.ggml.token_type"])[:4] == [2, 3, 3, 1] and found["tokenizer.ggml.tokens"][79] == "[PAD79]"
    assert found["tokenizer.ggml.bos_token_id"] == 1 and found["tokenizer.ggml.add_bos_token"] in (True, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(pre_tokenizer={"type": "Whitespace"}), "no name for the tokenizer's pre-tokenizer"),
        (lambda t: t.update(pre_tokenizer=None), "no name for the tokenizer's pre-tokenizer"),
        (lambda t: t["model"].update(type="Unigram"), "Unigram"),
        (lambda t: t["model"].update(byte_fallback=True), "byte fallback"),
        (lambda t: t["added_tokens"].append({"id": 900, "content": "far", "special": True}), "more tokens than the model"),
        (lambda t: t["model"].update(vocab=None), "cannot be written|TypeError"),
        (lambda t: t["model"].update(merges=[["a", "b", "c"]]), "cannot be written"),
    ],
)  # fmt: skip
def test_unsupported_tokenizers_are_refused(change, message, tmp_path):
    source = checkpoint(tmp_path / "source", llama(vocab_size=264))
    byte_level_bpe(source, pre_tokenizers_by_name()["gpt-2"])
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    change(tokenizer)
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConversionError, match=message):
        tokenizer_metadata(source_model(bitline.open_checkpoint(source)), 264)


@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_llama_cpp_predicts_the_same_tokens(kind, tmp_path):
    """Where llama.cpp is installed: its next-token probabilities are transformers', up to its 8-bit activations."""
    pytest.importorskip("xllamacpp")
    assert largest_logprob_difference(kind, tmp_path) < 0.3
