"""A GGUF file as transformers would store it: names, rows, configuration and tokenizer."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitline.checkpoint import Checkpoint
from bitline.conversion.original import Layer, Original, Plain
from bitline.errors import CheckpointError
from bitline.generate import load_tokenizer
from bitline.gguf_bridge import GGUFNames
from bitline.skeleton import check_sizes, make_config, make_skeleton


def gguf_original(checkpoint: Checkpoint) -> Original:
    """Every layer and tensor under the names of transformers' model for this architecture.

    A quantized tensor with no place in the model, or whose place is no linear layer or embedding, is a CheckpointError.
    """
    check_sizes(checkpoint)
    config = make_config(checkpoint)
    model = make_skeleton(config, torch.float32, checkpoint)
    names = GGUFNames(model, checkpoint)
    modules = dict(model.named_modules())
    items: list[Layer | Plain] = []
    for record in checkpoint.layers():
        name = names.module(record.name)
        if not isinstance(modules.get(name), nn.Linear | nn.Embedding):
            raise CheckpointError(
                "a quantized tensor has no place in transformers' model", file=checkpoint.path, tensor=record.name,
                found=f"module {name}", expected="a linear layer or an embedding of that name",
            )  # fmt: skip
        items.append(Layer(name, record, functools.partial(_layer, names, record)))
    for name in checkpoint.dense_names():
        target = names.tensor(name)
        if target is None:
            if name.startswith("rope_"):
                continue  # llama.cpp's own tables, which transformers computes from the configuration
            raise CheckpointError("a tensor has no place in transformers' model", file=checkpoint.path, tensor=name)
        info = checkpoint.source.tensors[name]
        items.append(Plain(target, info.shape, info.nbytes, functools.partial(_plain, names, checkpoint, name)))
    settings = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    settings = {key: value for key, value in settings.items() if not key.startswith("_")}
    tokenizer = "tokenizer.ggml.tokens" in checkpoint.metadata
    save = functools.partial(_save_tokenizer, checkpoint) if tokenizer else None
    return Original(checkpoint, items, settings, {"quant_method": "gguf"}, None, save)


def _layer(names: GGUFNames, record: Any) -> Any:
    return names.reorder(record.name, record.weight())


def _plain(names: GGUFNames, checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor with the converter's changes undone, in its own dtype where that holds it."""
    stored = checkpoint.read(name)
    whole = names.convert(name, stored)
    own = whole.to(stored.dtype)
    return own if torch.equal(own.float(), whole) else whole


def _save_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    load_tokenizer(checkpoint).save_pretrained(folder)
