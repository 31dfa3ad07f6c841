"""A Llama of the stubs' layers, which loads tensors as SGLang's does: a name without a parameter is an error."""

import json
from types import SimpleNamespace

import torch
from sglang.srt.layers import linear
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader import loader, utils
from torch import nn


class Block(nn.Module):
    def __init__(self, config, quant_config, prefix):
        super().__init__()
        hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        bias = config.model_type == "qwen2"
        common = {"quant_config": quant_config}
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.self_attn.qkv_proj = QKVParallelLinear(
            hidden, hidden // heads, heads, kv, bias=bias, prefix=f"{attn}.qkv_proj", **common
        )
        self.self_attn.o_proj = RowParallelLinear(hidden, hidden, bias=False, prefix=f"{attn}.o_proj", **common)
        wide = config.intermediate_size
        self.mlp.gate_up_proj = MergedColumnParallelLinear(
            hidden, [wide, wide], bias=False, prefix=f"{mlp}.{self.gate_up}", **common
        )
        self.mlp.down_proj = RowParallelLinear(wide, hidden, bias=False, prefix=f"{mlp}.down_proj", **common)
        self.input_layernorm, self.post_attention_layernorm = nn.Module(), nn.Module()
        for norm in (self.input_layernorm, self.post_attention_layernorm):
            norm.weight = nn.Parameter(torch.empty(hidden))

    gate_up = "gate_up_proj"


class Llama(nn.Module):
    block = Block

    def __init__(self, config, quant_config=None):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, quant_config=quant_config)
        self.model.layers = nn.ModuleList(
            self.block(config, quant_config, f"model.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.model.norm = nn.Module()
        self.model.norm.weight = nn.Parameter(torch.empty(config.hidden_size))
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=quant_config, prefix="lm_head")
        self.seen = []

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        fused = (("q_proj", "qkv_proj"), ("k_proj", "qkv_proj"), ("v_proj", "qkv_proj"))
        at = {}
        for name, tensor in weights:
            self.seen.append(name)
            target = name
            for part, whole in fused:
                target = target.replace(part, whole)
            parameter = parameters[target]
            if target in ("lm_head.weight", "model.embed_tokens.weight"):
                shard = self.get_submodule(target.removesuffix(".weight")).shard_indices
                tensor = tensor[shard.org_vocab_start_index : shard.org_vocab_end_index]
            rows = at.get(target, 0)
            parameter.data[rows : rows + tensor.shape[0]] = tensor
            at[target] = rows + tensor.shape[0]


def load(path, *, rank=0, size=1, model_class=Llama, load_format="auto", dtype=torch.float32):
    """A checkpoint through the stubs' DefaultModelLoader, on one of `size` ranks."""
    settings = SimpleNamespace(**json.loads((path / "config.json").read_text()))
    config = SimpleNamespace(
        model_path=str(path), revision=None, hf_config=settings, quantization="bitline", dtype=dtype, is_draft_model=False
    )
    linear.STUB_GROUP[0] = SimpleNamespace(rank_in_group=rank, world_size=size) if size > 1 else None
    utils.STUB_MODEL[0] = model_class
    load_config = SimpleNamespace(load_format=load_format, download_dir=None)
    return loader.DefaultModelLoader(load_config).load_model(model_config=config, device_config=SimpleNamespace(device="cpu"))
