"""Tensor names of a safetensors checkpoint mapped to the model's, by transformers' own conversion rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bitline.errors import CheckpointError
from bitline.model.expert_names import ExpertPlace, place_in_stack, place_of_converted, stacks_of
from bitline.weight import QuantizedWeight


class NameMap(Protocol):
    """Maps a checkpoint's names to a model's, and its tensors to the model's row order."""

    def parameter_name(self, name: str) -> str | None:
        """The model's name of a tensor, None where the model has no such parameter."""
        ...

    def module_name(self, name: str) -> str | None:
        """The model's name of a quantized layer's module, None where the model leaves the layer out."""
        ...

    def expert_place(self, name: str, *, layer: bool) -> ExpertPlace | None:
        """Where an expert's matrix belongs, None for any other. layer: the name is a quantized layer's, not a tensor's."""
        ...

    def convert_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """An unquantized tensor as the model stores it."""
        ...

    def permute_rows(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """A quantized weight with its rows in the model's order."""
        ...

    def row_order(self, name: str, n: int) -> Tensor | None:
        """The row in the file of each of the model's n rows, int64 [n]; None where they are the same."""
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
        self._stacks = stacks_of(self._state_dict)

    def expert_place(self, name: str, *, layer: bool) -> ExpertPlace | None:
        """By the converter that fuses the tensor, or by the name of a stack that the reader took apart."""
        from transformers.core_model_loading import rename_source_key

        if not self._stacks:
            return None
        rules = (self._renamings, self._converters, self._prefix, self._state_dict)
        target, pattern = rename_source_key(f"{name}.weight" if layer else name, *rules)
        if pattern is not None:
            patterns = next(list(c.source_patterns) for c in self._converters if pattern in c.source_patterns)
            found = place_of_converted(target, f"{name}.weight" if layer else name, pattern, patterns, self._stacks)
            if found:
                return found
        stem, _, number = name.rpartition(".")
        if layer and number.isdecimal():
            return place_in_stack(rename_source_key(stem, *rules)[0], int(number), self._stacks)
        return None

    def parameter_name(self, name: str) -> str | None:
        """The model's name of a tensor; one that transformers would fuse with others is a CheckpointError."""
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state_dict)
        if pattern is not None and target != name:
            raise CheckpointError(
                "transformers fuses this tensor with others for this architecture", file=self._path, tensor=name,
                found=f"becomes {target}", expected="a tensor that keeps its shape, or an expert's matrix",
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

    def row_order(self, name: str, n: int) -> Tensor | None:
        """None: rows are in the model's order."""
        return None
