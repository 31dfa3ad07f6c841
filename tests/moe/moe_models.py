"""Tiny random mixture-of-experts models of transformers, and their matrices under the names that checkpoints have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIZES = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.1, "num_experts_per_tok": 2, "head_dim": 32,
}  # fmt: skip
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 64, "intermediate_size": 160, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 6, "moe_intermediate_size": 64, "intermediate_size": 160,
                              "shared_expert_intermediate_size": 96}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 96}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "intermediate_size": 96, "sliding_window": 32,
                           "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek_v3": ("DeepseekV3", {
        "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 128, "intermediate_size": 256, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 16}),
}  # fmt: skip
IDS = torch.tensor([[1, 5, 9, 77, 3, 120, 64, 31, 8, 9, 2]])


def make(kind: str, **changes: Any) -> Any:
    """A random model in float32. Routers and biases are random too, and far from ties."""
    import transformers

    prefix, own = CLASSES[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | own | changes))
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    for name, tensor in model.state_dict().items():
        if re.search(r"(gate|router)\.weight$", name):
            tensor.normal_(std=0.5)
        elif name.endswith(("bias", "sinks")):
            tensor.normal_(std=0.1)
        elif name.endswith("norm.weight"):
            tensor.uniform_(0.5, 1.5)
    return model


class Matrix(NamedTuple):
    """A weight of a checkpoint. name: its module there. weight: [N, K], a view of the model's parameter. owner: the module that
    multiplies by it. expert, part: of an expert; part 0 is the gate, 1 is "up", 2 is "down". router: it chooses experts."""

    name: str
    weight: Tensor
    owner: Any
    expert: int | None = None
    part: int = 0
    router: bool = False


_PARTS = {"mixtral": ("w1", "w3", "w2")}  # the names of gate, up and down; others have those of transformers


def disk_name(kind: str, name: str) -> str:
    """A tensor's name in checkpoints of the kind."""
    return name.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name


def matrices(kind: str, model: Any, *, stacked: bool = False) -> Iterator[Matrix]:
    """The linear layers but the head, routers, and every expert's gate, up and down; stacked: its parameters as they are."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            yield Matrix(disk_name(kind, name), module.weight.data, module)
        elif name.endswith(("mlp.gate", "mlp.router")):
            yield Matrix(disk_name(kind, name), module.weight.data, module, router=True)
        elif "gate_up_proj" in module._parameters:
            for e in range(module.gate_up_proj.shape[0]):
                gate_up, down = module.gate_up_proj.data[e], module.down_proj.data[e]
                where = disk_name(kind, name)
                if stacked:
                    yield Matrix(f"{where}.gate_up_proj", gate_up, module, e, 0)
                    yield Matrix(f"{where}.down_proj", down, module, e, 2)
                    continue
                for part, (leaf, weight) in enumerate(
                    zip(_PARTS.get(kind, ("gate_proj", "up_proj", "down_proj")), (*gate_up.chunk(2), down), strict=True)
                ):
                    yield Matrix(f"{where}.{e}.{leaf}", weight, module, e, part)


def others(kind: str, model: Any, taken: set[str]) -> dict[str, Tensor]:
    """Every tensor of the model that is none of `matrices`, whose names are `taken`, under its checkpoint name."""
    found = {}
    for name, tensor in model.state_dict().items():
        name = disk_name(kind, name)
        if name.removesuffix(".weight") not in taken and not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor.clone()
    return found
