"""What is converted: a checkpoint's layers and plain tensors under transformers' names, its config and the files beside it."""

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

EMBEDDINGS = {"embed_tokens", "tok_embeddings", "word_embeddings", "wte", "wpe", "position_embeddings"}
HEADS = {"lm_head", "embed_out"}
# Files that belong to a model and hold no weights. Anything else is left where it is, and the report says so.
_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".md", ".py", ".tiktoken", ".spm", ".vocab", ".bpe", ".yaml", ".yml"}
_NAMES = ("license", "notice", "readme", "usage", "tokenizer.model")  # and tokenizer.model.v3 of Mistral


@dataclass(frozen=True)
class Layer:
    """A quantized layer. name: its module's. read: its weight, rows in the model's order."""

    name: str
    record: LayerRecord
    read: Callable[[], QuantizedWeight]

    @property
    def may_be_plain(self) -> bool:
        """True for embeddings and output heads, which many formats keep as plain weights."""
        return self.name.rpartition(".")[2] in EMBEDDINGS | HEADS


@dataclass(frozen=True)
class Plain:
    """A tensor that belongs to no quantized layer. nbytes: in its file."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Original:
    """A checkpoint to convert.

    items: layers and plain tensors in the order of the files. config: config.json without its quantization.
    quantization: what it said of that. folder: where other files are, None for GGUF. save_tokenizer: writes a tokenizer
    into a folder where it is inside the checkpoint.
    """

    checkpoint: Checkpoint
    items: list[Layer | Plain]
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    folder: Path | None
    save_tokenizer: Callable[[Path], None] | None = None

    @property
    def layers(self) -> list[Layer]:
        """The quantized layers."""
        return [item for item in self.items if isinstance(item, Layer)]

    @property
    def plain(self) -> list[Plain]:
        """The other tensors."""
        return [item for item in self.items if isinstance(item, Plain)]

    def plain_linears(self) -> list[str]:
        """Modules with a plain matrix as their weight, embeddings aside: the linear layers that were left alone, and routers."""
        found = (p.name.removesuffix(".weight") for p in self.plain if p.name.endswith(".weight") and len(p.shape) == 2)
        return [name for name in found if name.rpartition(".")[2] not in EMBEDDINGS and "norm" not in name.rpartition(".")[2]]

    def other_files(self) -> tuple[list[Path], list[str]]:
        """Files of the folder to copy (tokenizer, generation config, …), and the names of those that are left.

        Neither has hidden files, nor those whose content is written anew: configs, weights and their indices.
        """
        if self.folder is None:
            return [], []
        taken, left = [], []
        for path in sorted(self.folder.iterdir()):
            written = path.name == "config.json" or path.name in SIDE_FILES or path.name.endswith(".safetensors.index.json")
            if written or path.suffix.lower() == ".safetensors" or path.name.startswith("."):
                continue
            fits = path.suffix.lower() in _SUFFIXES or path.name.lower().startswith(_NAMES)
            if fits and path.is_file() and not path.name.endswith(".index.json"):  # an index of weights that are left
                taken.append(path)
            else:
                left.append(path.name)
        return taken, left
