"""Tiny models, and checkpoints of them written without the readers' code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import bitline

SETTINGS = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


def random_model(kind: str, settings: dict[str, Any]) -> Any:
    """A random causal language model of transformers, as "Llama", in float32. settings: of its config."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()


def llama(**changes: Any) -> Any:
    """A random Llama of two layers: hidden 64, 4 heads over 2 key-value heads."""
    return random_model("Llama", SETTINGS | changes)


def compressed(
    folder: Path, model: Any, *, group: int = 32, skip: tuple[str, ...] = ("lm_head",), config: dict[str, Any] | None = None
) -> tuple[Path, Any]:
    """Write a model as compressed-tensors W4A16 and set its weights to the dequantized ones. -> (folder, model)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    done = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(s in name for s in skip):
            qw = bitline.quantize(module.weight.detach(), "W4A16", group_size=group)
            tensors[f"{name}.weight_packed"] = qw.codes.contiguous().view(torch.int32)
            tensors[f"{name}.weight_scale"] = qw.scale.contiguous()
            tensors[f"{name}.weight_shape"] = torch.tensor(qw.shape)
            module.weight.data = qw.dequantize()
            done.add(f"{name}.weight")
    for name, tensor in model.state_dict().items():
        if name not in done and not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors[name] = tensor.clone()
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    quantization = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": list(skip),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    settings = json.loads(model.config.to_json_string()) | {"quantization_config": quantization} | (config or {})
    settings["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, model


def rewrite(folder: Path, change: Any) -> Path:
    """Edit the tensors of a folder: `change` mutates their dict."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
