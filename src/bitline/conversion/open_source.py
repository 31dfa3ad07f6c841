"""An open checkpoint, safetensors or GGUF, as a SourceModel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.conversion.gguf.source import gguf_source_model
from bitline.conversion.source_model import QuantizedLayer, SourceModel, UnquantizedTensor
from bitline.formats.quant_config import quantization_config

_QUANT_CONFIGS = ("quantization_config", "compression_config")


def source_model(checkpoint: Checkpoint) -> SourceModel:
    """The layers, tensors and settings of a checkpoint. Those of a GGUF file get transformers' names and row order."""
    if checkpoint.is_gguf:
        return gguf_source_model(checkpoint)
    source = checkpoint.source
    folder: Path | None = checkpoint.path
    if not checkpoint.path.is_dir():  # files beside a single file belong to it only if a config.json is among them
        folder = checkpoint.path.parent if source.config else None
    records, unquantized = checkpoint.layers(), checkpoint.dense_names()
    position = {name: i for i, name in enumerate(source.tensors)}
    entries: list[QuantizedLayer | UnquantizedTensor] = [QuantizedLayer(r.name, r, r.weight) for r in records]
    entries += [
        UnquantizedTensor(n, source.tensors[n].shape, source.tensors[n].nbytes, _reader(checkpoint, n)) for n in unquantized
    ]
    entries.sort(key=lambda e: position[e.record.tensors[0] if isinstance(e, QuantizedLayer) else e.name])
    config = {key: _without_quant_config(value) for key, value in source.config.items() if key not in _QUANT_CONFIGS}
    return SourceModel(checkpoint, entries, config, quantization_config(source), folder)


def _reader(checkpoint: Checkpoint, name: str) -> Callable[[], Tensor]:
    return lambda: checkpoint.read(name)


def _without_quant_config(value: Any) -> Any:
    """A value of the config without a nested quantization config, as multimodal models have."""
    if isinstance(value, Mapping):
        return {k: v for k, v in value.items() if k not in _QUANT_CONFIGS}
    return value
