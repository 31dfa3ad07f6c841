"""Qwen3-MoE as a GGUF file by the gguf package's writer and quantizers; the model gets that package's dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

import dense_gguf
from bitline.formats.gguf.ggml_types import BLOCK_SIZES

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, model: Any, kind: Callable[[str], str], tokenizer: bool = False) -> Path:
    """A file of the model. kind: the block type of a tensor, by its name in the file; norms and routers are F32."""
    config = model.config
    tokens = ["w", *map(str, range(10)), *(f"w{i}" for i in range(config.vocab_size - 11))]
    writer = dense_gguf.start(path, "qwen3moe", config, config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if tokenizer:
        dense_gguf.add_tokenizer(writer, tokens, [f"w {i}" for i in range(10)])
    for name, tensor in _tensors(model):
        quantization = kind(name) if tensor.dim() > 1 and "ffn_gate_inp" not in name else "F32"
        data, values = blocks(tensor, quantization)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType[quantization])
        tensor.copy_(values)
    return dense_gguf.finish(writer, path)


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Names in the file, and views of the model's parameters: experts are stacks of gate, up and down."""
    found = []
    for full_name, tensor in model.state_dict().items():
        stem = full_name.removesuffix(".weight")
        if stem in TOP:
            found.append((TOP[stem], tensor))
            continue
        _, _, layer, rest = stem.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            found += [(f"blk.{layer}.ffn_gate_exps", gate), (f"blk.{layer}.ffn_up_exps", up)]
        elif rest == "mlp.experts.down_proj":
            found.append((f"blk.{layer}.ffn_down_exps", tensor))
        else:
            found.append((f"blk.{layer}.{NAMES[rest]}", tensor))
    return found


def blocks(tensor: torch.Tensor, kind: str) -> tuple[np.ndarray, torch.Tensor]:
    """A tensor's blocks and their values by the gguf package. Q4_K, which it cannot write, is random bits of moderate size."""
    if kind == "F32":
        return tensor.contiguous().numpy(), tensor
    if kind == "Q4_K":
        raw = _random_q4_k(tuple(tensor.shape))
    else:
        raw = gguf.quants.quantize(tensor.contiguous().numpy(), GGMLQuantizationType[kind])
    return raw, torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[kind]).copy())


def _random_q4_k(shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of random codes and 6-bit scales; a value is about 0.1 large, and zero on average."""
    size, nbytes = BLOCK_SIZES["Q4_K"]
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), dtype=np.uint8)
    step = 10.0**-3.5 * rng.uniform(0.5, 1.5, raw.shape[:-1])
    raw[..., :2] = step.astype(np.float16)[..., None].view(np.uint8)
    raw[..., 2:4] = (7.5 * step).astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)
