"""Tensor names of a GGUF file mapped to a transformers model's, and the row permutation of llama.cpp's converter undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.errors import CheckpointError
from bitline.model.expert_names import ExpertPlace, gguf_place, stacks_of
from bitline.weight import QuantizedWeight


class GGUFNameMap:
    """NameMap of a GGUF file. Undoes what llama.cpp's converter did to the tensors, by transformers' tensor processors."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self._checkpoint = checkpoint
        architecture = str(checkpoint.metadata.get("general.architecture", ""))
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        self._names = _model_names(model, architecture, checkpoint)
        self._stacks = stacks_of(model.state_dict())

    def expert_place(self, name: str, *, layer: bool) -> ExpertPlace | None:
        """By llama.cpp's names of stacked experts."""
        return gguf_place(name if layer else name.removesuffix(".weight"), self._stacks)

    def parameter_name(self, name: str) -> str | None:
        """The model's name of a tensor, None where the model has no such parameter."""
        return self._names.get(name)

    def module_name(self, name: str) -> str:
        """The model's name of a quantized layer's module."""
        return self._names.get(f"{name}.weight", name).removesuffix(".weight")

    def convert_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """An unquantized tensor with the converter's changes undone (Gemma stores norms plus one, Llama permutes q rows)."""
        return torch.from_numpy(np.ascontiguousarray(self._process(name, tensor.float().numpy())))

    def permute_rows(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """A quantized weight with its rows in the model's order. Whole rows are moved; nothing is dequantized."""
        order = self.row_order(name, weight.spec.n)
        return weight if order is None else weight.take_rows(order)

    def row_order(self, name: str, n: int) -> Tensor | None:
        """The row in the file of each of the model's n rows, int64 [n]; None where they are the same."""
        # Applied to a column of row indices, the processor yields the permutation that it would apply to the weight.
        probe = np.arange(n, dtype=np.int64).reshape(n, 1)
        permuted = self._process(f"{name}.weight", probe)
        if permuted is None or permuted.shape != probe.shape or not np.array_equal(np.sort(permuted[:, 0]), probe[:, 0]):
            raise CheckpointError(
                "the converter changed more than the row order of this layer", file=self._checkpoint.path, tensor=name,
                found=type(self._processor).__name__, expected="a permutation of rows",
                fix="quantized GGUF files of this architecture are not supported yet",
            )  # fmt: skip
        return None if np.array_equal(permuted, probe) else torch.from_numpy(permuted[:, 0].copy())

    def _process(self, name: str, weights: Any) -> Any:
        """A tensor after transformers' tensor processor. A shape that the processor cannot take is a CheckpointError."""
        try:
            return self._processor.process(
                weights=weights, name=name, tensor_key_mapping=dict(self._names), parsed_parameters={"tensors": {}}
            ).weights
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                "a tensor does not fit the model's configuration", file=self._checkpoint.path, tensor=name,
                found=f"{list(weights.shape)}: {error}", fix="the metadata does not belong to these tensors",
            ) from error  # fmt: skip


def _model_names(model: Any, architecture: str, checkpoint: Checkpoint) -> Mapping[str, str]:
    """GGUF name -> the model's name, for every parameter and buffer in gguf's name tables."""
    import gguf

    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in architectures:
        raise CheckpointError(
            "no tensor names are known for this GGUF architecture", file=checkpoint.path, found=repr(architecture),
            fix="a newer gguf package may know it",
        )  # fmt: skip
    table = gguf.get_tensor_name_map(architectures[architecture], model.config.get_text_config().num_hidden_layers)
    names: dict[str, str] = {}
    for full_name in model.state_dict():
        stem, dot, suffix = full_name.rpartition(".")
        # Some converters start from the inner model, whose names lack the leading components.
        while stem:
            gguf_name = table.get_name(stem)
            if gguf_name is not None:
                names.setdefault(f"{gguf_name}{dot}{suffix}", full_name)
                break
            stem = stem.partition(".")[2]
    return names
