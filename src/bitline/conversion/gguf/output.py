"""A conversion's result as one GGUF file with llama.cpp's names, row order and metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bitline.conversion.gguf import blocks
from bitline.conversion.gguf.model import LlamaCppModel
from bitline.conversion.gguf.writer import GGUFWriter, float_type
from bitline.conversion.output import check_new_gguf_file, make_parents, partial_name, remove_folders
from bitline.conversion.source_model import QuantizedLayer, SourceModel
from bitline.conversion.target import Target
from bitline.conversion.tensor_bits import same_values
from bitline.errors import ConversionError
from bitline.types import LinearSpec, dtype_name
from bitline.weight import QuantizedWeight

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class GGUFOutput:
    """An `Output` that writes one .gguf file. stored: the planned stored specs of the quantized layers."""

    def __init__(self, source: SourceModel, target: Target, result: Path, stored: Mapping[str, LinearSpec]) -> None:
        check_new_gguf_file(result)
        self.target, self.result = target, result
        self.model = LlamaCppModel(source)
        self._computed = self.model.computed_tensors()
        block_types = Counter(blocks.block_type(spec).name for spec in stored.values())
        metadata = self.model.metadata(block_types)
        self.path = result.parent / f"{partial_name()}.gguf"
        self._made = make_parents(self.path)
        self._file = GGUFWriter(self.path, metadata, self._shapes(source))

    def _shapes(self, source: SourceModel) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of the file, in order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in source.entries:
            if entry.name not in self.model.names:
                continue
            name = self.model.names[entry.name]
            if isinstance(entry, QuantizedLayer):
                spec = entry.record.spec
                shapes[f"{name}.weight"] = (spec.n, spec.k)
                if spec.bias:
                    shapes[f"{name}.bias"] = (spec.n,)
            else:
                shapes[name] = entry.shape
        return shapes | {name: tuple(tensor.shape) for name, tensor in self._computed.items()}

    def write_other_files(self) -> tuple[list[str], list[str]]:
        """No files: the tokenizer is in the header. Left out are tensors that llama.cpp computes."""
        return [], self.model.left_out

    def write_layer(self, layer: QuantizedLayer, weight: QuantizedWeight) -> int:
        """Quantization blocks in llama.cpp's row order; bytes written."""
        order = self.model.row_order(layer.name)
        tensors = self.target.pack(weight if order is None else weight.take_rows(order))
        name = self.model.names[layer.name]
        self._file.add(f"{name}.weight", tensors["weight"], blocks.block_type(weight.spec).ggml_type)
        if "bias" in tensors:
            self._file.add(f"{name}.bias", tensors["bias"], float_type(tensors["bias"]))
        return sum(tensor.nbytes for tensor in tensors.values())

    def write_unquantized(self, name: str, tensor: Tensor) -> int:
        """Vectors as float32, which llama.cpp computes with; matrices in their own dtype. Bytes written."""
        gguf_name = self._unquantized_name(name)
        if gguf_name is None:
            return 0
        order = self.model.row_order(name)
        tensor = tensor if order is None else tensor.index_select(0, order)
        if tensor.dim() < 2 or tensor.dtype not in _FLOATS:
            source, tensor = tensor, tensor.float()
            if not same_values(source, tensor):
                raise ConversionError(
                    "an unquantized tensor is not exact in float32, as gguf files store it", tensor=name,
                    found=dtype_name(source.dtype), fix="--to another format keeps unquantized tensors as they are",
                )  # fmt: skip
        self._file.add(gguf_name, tensor, float_type(tensor))
        return tensor.nbytes

    def _unquantized_name(self, name: str) -> str | None:
        """llama.cpp's name of a tensor, also of a layer's weight or bias that is stored dequantized; None if it has none."""
        if name not in self.model.names and name.endswith((".weight", ".bias")):
            stem, _, suffix = name.rpartition(".")
            return f"{self.model.names[stem]}.{suffix}" if stem in self.model.names else None
        return self.model.names.get(name)

    def finish(self, layers: Mapping[str, LinearSpec]) -> None:
        """The tensors that transformers computes, then the header."""
        for name, tensor in self._computed.items():
            self._file.add(name, tensor, float_type(tensor))
        self._file.finish()

    def publish(self) -> None:
        """Rename the file, unless its name has been taken meanwhile."""
        check_new_gguf_file(self.result)
        self.path.rename(self.result)

    def discard(self) -> None:
        """Remove the unfinished file, and the parents that were made for it."""
        self._file.close()
        self.path.unlink(missing_ok=True)
        remove_folders(self._made)

    def output_name(self, name: str) -> str:
        """llama.cpp's name."""
        return self.model.names[name]

    def row_order(self, name: str) -> Tensor | None:
        """llama.cpp's order of the rows of queries and keys."""
        return self.model.row_order(name)
