"""GGUF tensor names and row orders to a transformers model's own, by transformers' tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.errors import CheckpointError
from bitline.weight import QuantizedWeight


class GGUFNames:
    """Maps each tensor of a GGUF file to the model's name for it, and undoes what llama.cpp's converter did to its rows."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        self.checkpoint = checkpoint
        architecture = str(checkpoint.metadata.get("general.architecture", ""))
        self.processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        try:
            self.names: dict[str, str] = get_gguf_hf_weights_map(model, self.processor, model_type=architecture)
        except NotImplementedError as error:
            raise CheckpointError(
                "no tensor names are known for this GGUF architecture", file=checkpoint.path, found=architecture,
                fix="a newer gguf or transformers package may know it",
            ) from error  # fmt: skip

    def tensor(self, name: str) -> str | None:
        """The model's name of a tensor, None where it has none."""
        return self.names.get(name)

    def module(self, name: str) -> str:
        """The model's module of a quantized layer."""
        return self.names.get(f"{name}.weight", name).removesuffix(".weight")

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        """A plain tensor with the converter's changes undone (Gemma's norms are stored plus one, Llama's q rows permuted)."""
        changed = self.processor.process(
            weights=tensor.float().numpy(), name=name, tensor_key_mapping=dict(self.names), parsed_parameters={"tensors": {}}
        ).weights
        return torch.from_numpy(np.ascontiguousarray(changed))

    def reorder(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """A quantized weight with its rows in the model's order. Rows move whole, nothing is dequantized."""
        n = weight.spec.n
        # What transformers does to a column of row numbers is what it would do to the weight, if it only moves rows.
        probe = np.arange(n, dtype=np.int64).reshape(n, 1)
        moved = self.processor.process(
            weights=probe, name=f"{name}.weight", tensor_key_mapping=dict(self.names), parsed_parameters={"tensors": {}}
        ).weights
        if moved is None or moved.shape != probe.shape or not np.array_equal(np.sort(moved[:, 0]), probe[:, 0]):
            raise CheckpointError(
                "the converter changed more of this layer than the order of its rows", file=self.checkpoint.path, tensor=name,
                found=type(self.processor).__name__, expected="rows that are only permuted",
                fix="quantized GGUF files of this architecture are not supported yet",
            )  # fmt: skip
        index = torch.from_numpy(moved[:, 0].copy())
        return weight if torch.equal(index, torch.arange(n)) else weight.take_rows(index)
