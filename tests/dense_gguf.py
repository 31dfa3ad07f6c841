"""Models as GGUF files, by the gguf package's writer: llama.cpp's names, metadata and row order of q and k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

Encoder = Callable[[np.ndarray, GGMLQuantizationType], np.ndarray]


def start(path: Path, architecture: str, config: Any, rope_theta: float = 10000.0) -> gguf.GGUFWriter:
    """A writer with the metadata that all architectures have. config: of transformers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope_theta)
    writer.add_vocab_size(config.vocab_size)
    return writer


def add_tokenizer(writer: gguf.GGUFWriter, tokens: Sequence[str], merges: Sequence[str], pre: str = "default") -> None:
    """A byte-pair tokenizer; all tokens are ordinary ones."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(list(merges))


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write what the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensors(
    writer: gguf.GGUFWriter,
    model: Any,
    architecture: str,
    kind: str,
    *,
    head: bool = True,
    encode: Encoder = gguf.quants.quantize,
) -> None:
    """A dense model's tensors: matrices of whole blocks as this type, others in float32. head: the output layer too."""
    config, quant = model.config, GGMLQuantizationType[kind]
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
        target, data = f"{names.get_name(stem)}.{leaf}", np.ascontiguousarray(data)
        if data.ndim == 2 and data.shape[1] % gguf.GGML_QUANT_SIZES[quant][0] == 0:
            writer.add_tensor(target, encode(data, quant), raw_dtype=quant)
        else:
            writer.add_tensor(target, data)


def write_dense(path: Path, model: Any, architecture: str, kind: str, *, head: bool = True) -> Path:
    """A dense model without a tokenizer."""
    writer = start(path, architecture, model.config)
    add_tensors(writer, model, architecture, kind, head=head)
    return finish(writer, path)
