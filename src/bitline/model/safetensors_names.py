"""Tensor names of a safetensors checkpoint mapped to the model's, by transformers' own conversion rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bitline.errors import CheckpointError
from bitline.weight import QuantizedWeight


class NameMap(Protocol):
    """Maps a checkpoint's names to a transformers model's, and its tensors to the model's row order."""

    def parameter_name(self, name: str) -> str | None:
        """The model's name of a tensor, None where the model has no such parameter."""
        ...

    def module_name(self, name: str) -> str:
        """The model's name of a quantized layer's module."""
        ...

    def convert_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """An unquantized tensor as the model stores it."""
        ...

    def permute_rows(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """A quantized weight with its rows in the model's order."""
        ...


class SafetensorsNameMap:
    """NameMap of a safetensors checkpoint. Names may differ from the model's; tensors do not."""

    def __init__(self, model: Any, path: Path) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self._renamings = [r for r in rules if isinstance(r, WeightRenaming)]
        self._converters = [r for r in rules if isinstance(r, WeightConverter)]
        self._prefix, self._state_dict, self._path = model.base_model_prefix, model.state_dict(), path

    def parameter_name(self, name: str) -> str | None:
        """The model's name of a tensor; one that transformers would fuse with others is a CheckpointError."""
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state_dict)
        if pattern is not None and target != name:
            raise CheckpointError(
                "transformers fuses this tensor with others for this architecture", file=self._path, tensor=name,
                found=f"becomes {target}", expected="a tensor that keeps its shape",
                fix="models with fused experts are not supported yet",
            )  # fmt: skip
        return target

    def module_name(self, name: str) -> str:
        """The model's name of a quantized layer's module."""
        return str(self.parameter_name(f"{name}.weight")).removesuffix(".weight")

    def convert_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def permute_rows(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """The weight itself."""
        return weight
