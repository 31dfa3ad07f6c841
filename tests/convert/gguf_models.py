"""Small models to convert, and llama.cpp's output for one of them."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

import bitline
from tiny import compressed, llama, random_model


def other(kind, **changes):
    """A random two-layer model of another architecture, with the sizes of tiny.llama."""
    settings = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": False, "initializer_range": 0.3,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return random_model(kind, settings | changes)


def checkpoint(folder, model, *, float_dtype=torch.float16):
    """The model as compressed-tensors W4A16 with 16-bit scales and random biases."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    folder, model = compressed(folder, model.to(float_dtype))
    tensors, state = load_file(folder / "model.safetensors"), model.state_dict()
    tensors |= {name: state[name].clone() for name in tensors if name.endswith("bias")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def byte_level_bpe(folder, pre):
    """Save a byte-level BPE tokenizer of 256 bytes, one merge, a special token and a user-defined one."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(letters)} | {"ab": 256}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b")]))
    tokenizer.pre_tokenizer = pre
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens([AddedToken("user", normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template="{{ messages }}").save_pretrained(folder)


def largest_logprob_difference(kind, folder):
    """llama.cpp against transformers: the largest difference in log probability of the ten likeliest tokens after six prompts."""
    import xllamacpp
    from tokenizers import pre_tokenizers

    settings = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 264, "max_position_embeddings": 256,
                "initializer_range": 0.1, "bos_token_id": 257}  # fmt: skip
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    made = {"llama": lambda: llama(**settings), "llama3": lambda: llama(**settings, rope_parameters=rope)}
    more = {"sliding_window": None} if kind == "mistral" else {}
    model = made.get(kind, lambda: other(kind.capitalize(), **settings, **more))()
    source = checkpoint(folder / "source", model)
    byte_level_bpe(source, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    bitline.convert(source, folder / "m.gguf", to="gguf")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(folder / "m.gguf"), 256, 1
    params.verbosity, params.warmup = -1, False
    server, model, worst, seen = xllamacpp.Server(params), model.float(), 0.0, 0
    generator = torch.Generator().manual_seed(5)
    for i in range(6):
        ids = torch.randint(3, 256, (1, 20 + 20 * i), generator=generator)
        with torch.no_grad():
            wanted = torch.log_softmax(model(ids).logits[0, -1], -1)
        answer = server.handle_completions({"prompt": ids[0].tolist(), "n_predict": 1, "n_probs": 10, "temperature": 0.0})
        answer = json.loads(answer) if isinstance(answer, str) else answer
        content = (answer["choices"][0].get("logprobs") or {}).get("content")  # absent if a token is half a character
        for token in content[0]["top_logprobs"] if content else ():
            worst, seen = max(worst, abs(token["logprob"] - float(wanted[token["id"]]))), seen + 1
    assert seen >= 20
    return worst
