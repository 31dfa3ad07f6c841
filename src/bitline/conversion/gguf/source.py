"""A GGUF file as a SourceModel: names, row order, configuration and tokenizer as transformers would have them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitline.checkpoint import Checkpoint
from bitline.conversion.source_model import QuantizedLayer, SourceModel, UnquantizedTensor
from bitline.conversion.tensor_bits import same_values
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord
from bitline.model.gguf_names import GGUFNameMap
from bitline.model.meta_model import check_config_sizes, make_config, make_meta_model
from bitline.model.tokenizer import load_tokenizer
from bitline.types import dtype_name
from bitline.weight import QuantizedWeight


def gguf_source_model(checkpoint: Checkpoint) -> SourceModel:
    """Every layer and tensor under the names of transformers' model for this architecture.

    A tensor that the model has no parameter for, or whose shape differs from the parameter's, is a CheckpointError.
    """
    check_config_sizes(checkpoint)
    config = make_config(checkpoint)
    model = make_meta_model(config, torch.float32, checkpoint)
    names = GGUFNameMap(model, checkpoint)
    entries: list[QuantizedLayer | UnquantizedTensor] = [*_layers(checkpoint, model, names)]
    entries += _unquantized(checkpoint, model, names)
    settings = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    settings = {key: value for key, value in settings.items() if not key.startswith("_")}
    has_tokenizer = "tokenizer.ggml.tokens" in checkpoint.metadata
    save_tokenizer = functools.partial(_save_tokenizer, checkpoint) if has_tokenizer else None
    return SourceModel(checkpoint, entries, settings, {"quant_method": "gguf"}, None, save_tokenizer)


def _layers(checkpoint: Checkpoint, model: Any, names: GGUFNameMap) -> list[QuantizedLayer]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    layers = []
    for record in checkpoint.layers():
        name = names.module_name(record.name)
        if not isinstance(modules.get(name), nn.Linear | nn.Embedding):
            raise CheckpointError(
                "transformers' model has no module for a quantized tensor", file=checkpoint.path, tensor=record.name,
                found=f"module {name}", expected="a linear layer or an embedding of that name",
            )  # fmt: skip
        _check_shape(checkpoint, record.name, (record.spec.n, record.spec.k), shapes.get(f"{name}.weight"))
        layers.append(QuantizedLayer(name, record, functools.partial(_read_layer, names, record)))
    return layers


def _unquantized(checkpoint: Checkpoint, model: Any, names: GGUFNameMap) -> list[UnquantizedTensor]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = []
    for name in checkpoint.dense_names():
        target = names.parameter_name(name)
        if target is None:
            if name.startswith("rope_"):
                continue  # llama.cpp's tables, which transformers computes from the configuration
            raise CheckpointError("transformers' model has no parameter for a tensor", file=checkpoint.path, tensor=name)
        info = checkpoint.source.tensors[name]
        _check_shape(checkpoint, name, info.shape, shapes.get(target))
        read = functools.partial(_read_unquantized, names, checkpoint, name)
        tensors.append(UnquantizedTensor(target, info.shape, info.nbytes, read))
    return tensors


def _check_shape(checkpoint: Checkpoint, name: str, found: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    """Refuse a tensor that transformers would not load into the parameter."""
    if found != expected:
        raise CheckpointError(
            "a tensor has a different shape than transformers' parameter", file=checkpoint.path, tensor=name,
            found=list(found), expected=None if expected is None else list(expected),
            fix="the metadata does not belong to these tensors",
        )  # fmt: skip


def _read_layer(names: GGUFNameMap, record: LayerRecord) -> QuantizedWeight:
    return names.permute_rows(record.name, record.weight())


def _read_unquantized(names: GGUFNameMap, checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor with the converter's changes undone, in its own dtype where that is exact, else float32."""
    stored = checkpoint.read(name)
    if not same_values(stored, stored.float()):
        raise CheckpointError("an unquantized tensor is not exact in float32, which transformers reads it in",
                              file=checkpoint.path, tensor=name, found=dtype_name(stored.dtype))  # fmt: skip
    converted = names.convert_tensor(name, stored)
    own_dtype = converted.to(stored.dtype)
    return own_dtype if same_values(own_dtype, converted) else converted


def _save_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    load_tokenizer(checkpoint).save_pretrained(folder)
