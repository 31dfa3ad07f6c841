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
from bitline.conversion.packing import same_numbers
from bitline.errors import CheckpointError
from bitline.model.gguf_names import GGUFNameMap
from bitline.model.meta_model import check_config_sizes, make_config, make_meta_model
from bitline.model.tokenizer import load_tokenizer


def gguf_original(checkpoint: Checkpoint) -> Original:
    """Every layer and tensor under the names of transformers' model for this architecture.

    A quantized tensor with no place in the model, or whose place is no linear layer or embedding, is a CheckpointError.
    """
    check_config_sizes(checkpoint)
    config = make_config(checkpoint)
    model = make_meta_model(config, torch.float32, checkpoint)
    names = GGUFNameMap(model, checkpoint)
    places = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    items: list[Layer | Plain] = []
    for record in checkpoint.layers():
        name = names.module_name(record.name)
        if not isinstance(modules.get(name), nn.Linear | nn.Embedding):
            raise CheckpointError(
                "a quantized tensor has no place in transformers' model", file=checkpoint.path, tensor=record.name,
                found=f"module {name}", expected="a linear layer or an embedding of that name",
            )  # fmt: skip
        _check_shape(checkpoint, record.name, (record.spec.n, record.spec.k), places.get(f"{name}.weight"))
        items.append(Layer(name, record, functools.partial(_layer, names, record)))
    for name in checkpoint.dense_names():
        target = names.parameter_name(name)
        if target is None:
            if name.startswith("rope_"):
                continue  # llama.cpp's own tables, which transformers computes from the configuration
            raise CheckpointError("a tensor has no place in transformers' model", file=checkpoint.path, tensor=name)
        info = checkpoint.source.tensors[name]
        _check_shape(checkpoint, name, info.shape, places.get(target))
        items.append(Plain(target, info.shape, info.nbytes, functools.partial(_plain, names, checkpoint, name)))
    settings = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    settings = {key: value for key, value in settings.items() if not key.startswith("_")}
    tokenizer = "tokenizer.ggml.tokens" in checkpoint.metadata
    save = functools.partial(_save_tokenizer, checkpoint) if tokenizer else None
    return Original(checkpoint, items, settings, {"quant_method": "gguf"}, None, save)


def _check_shape(checkpoint: Checkpoint, name: str, found: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    """Refuse a tensor that transformers would not load into its place."""
    if found != expected:
        raise CheckpointError(
            "a tensor has another shape than its place in transformers' model", file=checkpoint.path, tensor=name,
            found=list(found), expected=None if expected is None else list(expected),
            fix="the metadata does not belong to these tensors",
        )  # fmt: skip


def _layer(names: GGUFNameMap, record: Any) -> Any:
    return names.permute_rows(record.name, record.weight())


def _plain(names: GGUFNameMap, checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor with the converter's changes undone, in its own dtype where that holds it."""
    stored = checkpoint.read(name)
    if not same_numbers(stored, stored.float()):
        raise CheckpointError("a plain tensor is not exact in float32, which transformers reads it in", file=checkpoint.path,
                              tensor=name, found=str(stored.dtype).removeprefix("torch."))  # fmt: skip
    whole = names.convert_tensor(name, stored)
    own = whole.to(stored.dtype)
    return own if same_numbers(own, whole) else whole


def _save_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    load_tokenizer(checkpoint).save_pretrained(folder)
