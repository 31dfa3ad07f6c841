"""Reference models: quantized files loaded by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def transformers_gguf_model(path: str | Path, dtype: torch.dtype) -> Any:
    """The model of a GGUF file, dequantized by transformers with the gguf package's formulas, on the CPU in `dtype`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = Path(path)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict({k: torch.as_tensor(v) for k, v in tensors.items()}, strict=False)
    untied = [name for name in missing if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if untied or unexpected:
        raise AssertionError(f"transformers did not load {path}: missing {untied}, unexpected {unexpected}")
    model.tie_weights()
    # transformers keeps rotary frequencies in float32 for every model dtype; .to(dtype) would round them.
    frequencies = {n: b.clone() for n, b in model.named_buffers() if n.endswith("inv_freq")}
    model = model.to(dtype).eval()
    for name, value in frequencies.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value
    return model
