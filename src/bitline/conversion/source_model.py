"""What a conversion reads: layers and unquantized tensors under transformers' names, the config and the other files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.formats.base import LayerRecord
from bitline.formats.quant_config import SIDE_FILES
from bitline.weight import QuantizedWeight

# The last component of module names.
EMBEDDINGS = {"embed_tokens", "tok_embeddings", "word_embeddings", "wte", "wpe", "position_embeddings"}
HEADS = {"lm_head", "embed_out"}

# Files of a model folder that are copied: they hold no weights. All others are left out, and the report names them.
_COPIED_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".md", ".py", ".tiktoken", ".spm", ".vocab", ".bpe", ".yaml", ".yml"}
_COPIED_PREFIXES = ("license", "notice", "readme", "usage", "tokenizer.model")  # tokenizer.model.v3 is Mistral's


@dataclass(frozen=True)
class QuantizedLayer:
    """A quantized layer. name: its module's. read: its weight, rows in the model's order."""

    name: str
    record: LayerRecord
    read: Callable[[], QuantizedWeight]

    @property
    def is_embedding_or_head(self) -> bool:
        """True for embeddings and output heads, which many formats keep unquantized."""
        return self.name.rpartition(".")[2] in EMBEDDINGS | HEADS


@dataclass(frozen=True)
class UnquantizedTensor:
    """A tensor that belongs to no quantized layer. nbytes: in its file."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class SourceModel:
    """A checkpoint to convert.

    entries: layers and unquantized tensors, in file order. config: config.json without its quantization config.
    quantization: that quantization config. folder: where the other files are; None for GGUF. save_tokenizer: writes a
    tokenizer that is stored inside the checkpoint into a folder.
    """

    checkpoint: Checkpoint
    entries: list[QuantizedLayer | UnquantizedTensor]
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    folder: Path | None
    save_tokenizer: Callable[[Path], None] | None = None

    @property
    def layers(self) -> list[QuantizedLayer]:
        """The quantized layers."""
        return [entry for entry in self.entries if isinstance(entry, QuantizedLayer)]

    @property
    def unquantized(self) -> list[UnquantizedTensor]:
        """The other tensors."""
        return [entry for entry in self.entries if isinstance(entry, UnquantizedTensor)]

    def unquantized_linears(self) -> list[str]:
        """Modules with an unquantized 2-D weight, embeddings and norms aside: ignored linear layers, and routers."""
        found = (t.name.removesuffix(".weight") for t in self.unquantized if t.name.endswith(".weight") and len(t.shape) == 2)
        return [name for name in found if name.rpartition(".")[2] not in EMBEDDINGS and "norm" not in name.rpartition(".")[2]]

    def other_files(self) -> tuple[list[Path], list[str]]:
        """Files of the folder to copy (tokenizer, generation config, …), and names of those that are not copied.

        Neither contains hidden files, or files that a conversion rewrites: configs, weights and their indices.
        """
        if self.folder is None:
            return [], []
        copied, skipped = [], []
        for path in sorted(self.folder.iterdir()):
            rewritten = path.name == "config.json" or path.name in SIDE_FILES or path.name.endswith(".safetensors.index.json")
            if rewritten or path.suffix.lower() == ".safetensors" or path.name.startswith("."):
                continue
            known = path.suffix.lower() in _COPIED_SUFFIXES or path.name.lower().startswith(_COPIED_PREFIXES)
            if known and path.is_file() and not path.name.endswith(".index.json"):  # an index of weights that are not copied
                copied.append(path)
            else:
                skipped.append(path.name)
        return copied, skipped
