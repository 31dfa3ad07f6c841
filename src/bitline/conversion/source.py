"""From an open checkpoint to what is converted, for safetensors and for GGUF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.conversion.gguf.source import gguf_original
from bitline.conversion.original import Layer, Original, Plain
from bitline.formats.quant_config import quantization_config

_CONFIGS = ("quantization_config", "compression_config")


def original_of(checkpoint: Checkpoint) -> Original:
    """The layers, tensors and settings of a checkpoint; a GGUF file's through transformers, which knows what they are."""
    if checkpoint.is_gguf:
        return gguf_original(checkpoint)
    source = checkpoint.source
    folder: Path | None = checkpoint.path
    if not checkpoint.path.is_dir():  # a file alone does not own what lies beside it, unless a config says that it does
        folder = checkpoint.path.parent if source.config else None
    records, dense = checkpoint.layers(), checkpoint.dense_names()
    place = {name: i for i, name in enumerate(source.tensors)}
    items: list[Layer | Plain] = [Layer(r.name, r, r.weight) for r in records]
    items += [Plain(n, source.tensors[n].shape, source.tensors[n].nbytes, _reader(checkpoint, n)) for n in dense]
    items.sort(key=lambda item: place[item.record.tensors[0] if isinstance(item, Layer) else item.name])
    config = {key: _without(value) for key, value in source.config.items() if key not in _CONFIGS}
    return Original(checkpoint, items, config, quantization_config(source), folder)


def _reader(checkpoint: Checkpoint, name: str) -> Callable[[], Tensor]:
    return lambda: checkpoint.read(name)


def _without(value: Any) -> Any:
    """A part of the config without a quantization config of its own (multimodal models nest it)."""
    if isinstance(value, Mapping):
        return {k: v for k, v in value.items() if k not in _CONFIGS}
    return value
