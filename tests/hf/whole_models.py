"""Whole models around the layers of a fixture: a Llama of its sizes whose other parameters are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bitline

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
FIXTURES = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())


def sizes(shapes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Configuration of a Llama whose layers have these shapes [N, K], by their last names."""
    found: dict[str, int] = {}
    for name, (n, k) in shapes.items():
        leaf = name.rpartition(".")[2]
        found |= {"down_proj": {"hidden_size": n, "intermediate_size": k}, "o_proj": {"hidden_size": n, "heads": k}}.get(leaf, {})
        found |= {"hidden_size": k, "intermediate_size": n} if leaf in ("gate_proj", "up_proj") else {}
        found |= {"hidden_size": k, "heads": n} if leaf == "q_proj" else {}
        found |= {"hidden_size": k, "kv": n} if leaf in ("k_proj", "v_proj") else {}
    hidden = found.get("hidden_size", 128)
    heads, kv = found.get("heads", hidden), found.get("kv", hidden)
    head = next(size for size in (64, 32, 16, 8) if heads % size == kv % size == 0)
    layers = 1 + max(int(name.split(".")[2]) for name in shapes)
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": found.get("intermediate_size", 256), "head_dim": head,
        "num_attention_heads": heads // head, "num_key_value_heads": kv // head, "num_hidden_layers": layers, "vocab_size": 100,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "rms_norm_eps": 1e-6,
    }  # fmt: skip


def fit(shapes: dict[str, tuple[int, int]], settings: dict[str, Any]) -> bool:
    """Whether a Llama of these settings has layers of these shapes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    return all(tuple(model.get_submodule(name).weight.shape) == shape for name, shape in shapes.items())


def complete(fixture: str, folder: Path) -> Path:
    """Write the fixture's layers and random unquantized parameters for the rest of a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source = CHECKPOINTS / fixture
    records = bitline.open_checkpoint(source).layers()
    config = json.loads((source / "config.json").read_text())
    shapes = {record.name: (record.spec.n, record.spec.k) for record in records}
    settings = sizes(shapes)
    if not fit(shapes, settings):  # layers of different models: keep one
        shapes = dict([next(item for item in shapes.items() if item[1][0] % 8 == item[1][1] % 8 == 0)])
        settings = sizes(shapes)
    with safe_open(source / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(source / "model.safetensors")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings, initializer_range=0.3))
    for name in (name for record in records if record.name not in shapes for name in record.tensors):
        del tensors[name]
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in shapes:
            tensors.setdefault(name, tensor.to(torch.bfloat16))
    kept = {key: value for key, value in config.items() if key in ("quantization_config", "compression_config")}
    folder.mkdir(parents=True, exist_ok=True)
    for other in source.glob("*.json"):
        if other.name not in ("config.json", "PRODUCED_BY.json"):
            (folder / other.name).write_text(other.read_text())
    (folder / "config.json").write_text(json.dumps(settings | kept))
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    return folder
