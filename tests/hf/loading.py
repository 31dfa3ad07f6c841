"""A checkpoint through transformers' door and through load_model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import bitline
import bitline.hf

IDS = torch.tensor([[1, 5, 9, 77, 3]])


def through_transformers(path: Path, auto: Any = transformers.AutoModelForCausalLM, policy: Any = None, **options: Any) -> Any:
    """The model by from_pretrained."""
    config = options.pop("config_options", {})
    if path.suffix == ".gguf":
        options["gguf_file"], path = path.name, path.parent
    return auto.from_pretrained(path, quantization_config=bitline.hf.BitlineConfig(policy, **config), **options)


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Of a prompt."""
    with torch.inference_mode():
        found: torch.Tensor = model(ids % model.config.get_text_config().vocab_size).logits
    return found


def assert_same(path: Path, dtype: torch.dtype, policy: Any = None) -> Any:
    """Both doors give the same logits, layers and plan. -> the model by transformers."""
    mine, reference = through_transformers(path, policy=policy, dtype=dtype), bitline.load_model(path, dtype=dtype, policy=policy)
    ours, expected = logits(mine), logits(reference)
    assert expected.isfinite().all() and torch.equal(ours, expected)
    assert mine.bitline_weights.keys() == reference.bitline_weights.keys()
    kinds = [{name: type(module) for name, module in model.named_modules()} for model in (mine, reference)]
    assert kinds[0] == kinds[1]
    parameters = [{name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()} for model in (mine, reference)]
    assert parameters[0] == parameters[1]
    assert mine.generation_config.eos_token_id == reference.generation_config.eos_token_id
    return mine
