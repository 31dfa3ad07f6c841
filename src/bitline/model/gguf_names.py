"""Between a GGUF file and transformers: its configuration and tokenizer out of our header, its tensor names into ours."""

from __future__ import annotations

import array
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.errors import CheckpointError
from bitline.weight import QuantizedWeight

_PATCH = threading.Lock()


@contextmanager
def header(checkpoint: Checkpoint) -> Iterator[None]:
    """Let transformers read this file's metadata from the header that is parsed already.

    transformers parses a GGUF header with gguf's reader, anew for the configuration and for the tokenizer, which takes
    three seconds each for a vocabulary of 50,000. Within this context its reader is a view of ours, which has also
    been checked against a hostile file.
    """
    import gguf

    fields = {key: _field(value) for key, value in checkpoint.metadata.items()}
    view = SimpleNamespace(fields=fields, tensors=[SimpleNamespace(name=n) for n in checkpoint.source.tensors])
    with _PATCH:
        original = gguf.GGUFReader
        gguf.GGUFReader = lambda *_args, **_kwargs: view
        try:
            yield
        finally:
            gguf.GGUFReader = original


def _field(value: Any) -> SimpleNamespace:
    """A metadata value in the shape of gguf's ReaderField: parts, the indices of those that hold data, GGUF types."""
    if isinstance(value, list | array.array):
        kinds = {_kind(v)[0] for v in value[:1]} or {_INT}
        return SimpleNamespace(parts=_Parts(value), data=range(len(value)), types=[_ARRAY, kinds.pop()])
    kind, part = _kind(value)
    return SimpleNamespace(parts=[part], data=[0], types=[kind])


class _Parts:
    """The parts of an array, each made when it is asked for: all at once take a hundred times what they hold."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: int) -> Any:
        return _kind(self._values[at])[1]


_INT, _FLOAT, _BOOL, _STRING, _ARRAY = 10, 12, 7, 8, 9  # GGUF's numbers of its value types


def _kind(value: Any) -> tuple[int, Any]:
    if isinstance(value, str):
        return _STRING, value.encode("utf-8", "surrogateescape")
    return (_BOOL if isinstance(value, bool) else _FLOAT if isinstance(value, float) else _INT), [value]


class GGUFNames:
    """Maps each tensor of a GGUF file to the model's name for it, and undoes what llama.cpp's converter did to its rows."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self.checkpoint = checkpoint
        architecture = str(checkpoint.metadata.get("general.architecture", ""))
        self.processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        self.names = _names(model, architecture, checkpoint)

    def tensor(self, name: str) -> str | None:
        """The model's name of a tensor, None where it has none."""
        return self.names.get(name)

    def module(self, name: str) -> str:
        """The model's module of a quantized layer; one of stacked experts, which transformers has none for, is a
        CheckpointError.
        """
        stack = f"{name.rpartition('.')[0]}.weight"
        if len(self.checkpoint.source.ggml.get(stack, ("", ()))[1]) == 3:  # type: ignore[attr-defined]
            raise CheckpointError(
                "quantized experts have no place in the model", file=self.checkpoint.source.tensors[stack].file, tensor=stack,
                found=f"{name}, one of a stack", expected="linear layers of transformers",
                fix="models with stacked experts are not run yet; inspect, explain and dequantize work",
            )  # fmt: skip
        return self.names.get(f"{name}.weight", name).removesuffix(".weight")

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        """A plain tensor with the converter's changes undone (Gemma's norms are stored plus one, Llama's q rows permuted)."""
        return torch.from_numpy(np.ascontiguousarray(self._process(name, tensor.float().numpy())))

    def _process(self, name: str, weights: Any) -> Any:
        """What transformers makes of a tensor of this name. A shape that it cannot take is the file's mistake."""
        try:
            return self.processor.process(
                weights=weights, name=name, tensor_key_mapping=dict(self.names), parsed_parameters={"tensors": {}}
            ).weights
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                "a tensor does not fit the model's configuration", file=self.checkpoint.path, tensor=name,
                found=f"{list(weights.shape)}: {error}", fix="the metadata does not belong to these tensors",
            ) from error  # fmt: skip

    def reorder(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """A quantized weight with its rows in the model's order. Rows move whole, nothing is dequantized."""
        n = weight.spec.n
        # What transformers does to a column of row numbers is what it would do to the weight, if it only moves rows.
        probe = np.arange(n, dtype=np.int64).reshape(n, 1)
        moved = self._process(f"{name}.weight", probe)
        if moved is None or moved.shape != probe.shape or not np.array_equal(np.sort(moved[:, 0]), probe[:, 0]):
            raise CheckpointError(
                "the converter changed more of this layer than the order of its rows", file=self.checkpoint.path, tensor=name,
                found=type(self.processor).__name__, expected="rows that are only permuted",
                fix="quantized GGUF files of this architecture are not supported yet",
            )  # fmt: skip
        index = torch.from_numpy(moved[:, 0].copy())
        return weight if torch.equal(index, torch.arange(n)) else weight.take_rows(index)


def _names(model: Any, architecture: str, checkpoint: Checkpoint) -> Mapping[str, str]:
    """GGUF name -> the model's name, for every parameter and buffer that gguf's table of names knows."""
    import gguf

    known = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise CheckpointError(
            "no tensor names are known for this GGUF architecture", file=checkpoint.path, found=repr(architecture),
            fix="a newer gguf package may know it",
        )  # fmt: skip
    table = gguf.get_tensor_name_map(known[architecture], model.config.get_text_config().num_hidden_layers)
    names: dict[str, str] = {}
    for full in model.state_dict():
        stem, dot, suffix = full.rpartition(".")
        # Some converters started from the inner model, whose names lack the first parts.
        while stem:
            found = table.get_name(stem)
            if found is not None:
                names.setdefault(f"{found}{dot}{suffix}", full)
                break
            stem = stem.partition(".")[2]
    return names
