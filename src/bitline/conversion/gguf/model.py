"""A transformers model as llama.cpp knows it: its metadata, its tensors' names, and the order of its rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitline.conversion.gguf.tokenizer import tokenizer_metadata
from bitline.conversion.gguf.writer import F32, STRING, U32, Array, Value
from bitline.conversion.original import EMBEDDINGS, HEADS, Layer, Original
from bitline.errors import BitlineError, ConversionError
from bitline.model.meta_model import check_config_sizes

# transformers' model_type to llama.cpp's architecture. Only these are known to need nothing but what is done here.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_MOST_HEAD = 1 << 16
_NUMBERED = re.compile(r"(.*\blayers\.)(0|[1-9][0-9]*)(\..*)")
_SKIPPED = ("rotary_emb.inv_freq", ".position_ids")
_FILE_TYPE = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}


@dataclass
class GGUFModel:
    """What a GGUF file says of a model. left: tensors that it has no use for."""

    original: Original
    architecture: str = ""
    names: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_config_sizes(self.original.checkpoint)
        config = self.original.config
        kind = str(config.get("model_type"))
        if kind not in ARCHITECTURES:
            raise self._error("gguf files are not written for this architecture", f"model_type {kind!r}",
                              ", ".join(ARCHITECTURES), "llama.cpp's converter knows more, from plain weights")  # fmt: skip
        self.architecture = ARCHITECTURES[kind]
        if config.get("sliding_window") and config.get("use_sliding_window", kind == "mistral"):
            raise self._error("gguf files of this architecture have no sliding window", config["sliding_window"], "none")
        self._rope()
        table = self._table()
        for item in self.original.items:
            layer = isinstance(item, Layer)
            stem, _, suffix = (item.name, "", "weight") if layer else item.name.rpartition(".")
            if suffix == "weight":
                self._check_rows(stem, item.record.spec.n if isinstance(item, Layer) else (*item.shape, 0)[0])
            if any(part in item.name for part in _SKIPPED):
                self.left.append(item.name)
                continue
            found = self._name(table, stem)
            if found is None or suffix not in ("weight", "bias"):
                raise self._error("a tensor has no name in llama.cpp", item.name, None)
            self.names[item.name] = found if layer else f"{found}.{suffix}"

    def _name(self, table: Any, stem: str) -> str | None:
        """llama.cpp's name of a module, from the table of one layer: tables grow with the number that a config says."""
        match = _NUMBERED.fullmatch(stem)
        if match is None:
            return table.get_name(stem)
        layers = self._number("num_hidden_layers")
        if len(match[2]) > 9 or int(match[2]) >= layers:
            raise self._error("a tensor belongs to a layer that config.json does not have", stem, f"{layers} layers")
        found = table.get_name(f"{match[1]}0{match[3]}")
        return None if found is None else found.replace("blk.0.", f"blk.{match[2]}.", 1)

    def order(self, name: str) -> Tensor | None:
        """The rows of a module in llama.cpp's order, int64 [N]; None where it is transformers' own.

        llama.cpp rotates pairs of neighbouring rows of the queries and keys of a `llama`, transformers rows half a head apart.
        """
        leaf = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if self.architecture != "llama" or leaf not in ("q_proj", "k_proj"):
            return None
        heads = self._heads(leaf)
        rows = heads * self._head()
        return torch.arange(rows).view(heads, 2, self._head() // 2).transpose(1, 2).reshape(-1)

    def _heads(self, leaf: str) -> int:
        heads = self._number("num_attention_heads")
        return heads if leaf == "q_proj" else self._number("num_key_value_heads", heads)

    def _check_rows(self, module: str, rows: int) -> None:
        """Refuse a config that is of another model than the weights: its sizes are what llama.cpp reads them by."""
        leaf = module.rpartition(".")[2]
        wanted = None
        if leaf in ("q_proj", "k_proj", "v_proj"):
            wanted = self._heads(leaf) * self._head()
        elif leaf in EMBEDDINGS | HEADS:
            wanted = self._number("vocab_size")
        if wanted is not None and rows != wanted:
            raise ConversionError(
                "a weight has other rows than config.json says", file=self.original.checkpoint.path, tensor=module, found=rows,
                expected=wanted, fix="the config does not belong to these tensors",
            )  # fmt: skip

    def metadata(self, kinds: Mapping[str, int]) -> dict[str, Value | Array]:
        """Every key. kinds: the block types of the layers and how many layers each has."""
        arch, config = self.architecture, self.original.config
        number = lambda *keys: Value(U32, self._number(*keys))
        heads = self._number("num_attention_heads")
        out: dict[str, Value | Array] = {
            "general.architecture": Value(STRING, arch), "general.type": Value(STRING, "model"),
            "general.name": Value(STRING, str(config.get("_name_or_path") or self.original.checkpoint.path.name)),
            "general.file_type": Value(U32, _FILE_TYPE.get(max(kinds, key=lambda kind: kinds[kind], default=""), 1)),
            "general.quantization_version": Value(U32, 2),
            f"{arch}.block_count": number("num_hidden_layers"), f"{arch}.context_length": number("max_position_embeddings"),
            f"{arch}.embedding_length": number("hidden_size"), f"{arch}.feed_forward_length": number("intermediate_size"),
            f"{arch}.attention.head_count": Value(U32, heads),
            f"{arch}.attention.head_count_kv": Value(U32, self._number("num_key_value_heads", heads)),
            f"{arch}.attention.key_length": Value(U32, self._head()), f"{arch}.attention.value_length": Value(U32, self._head()),
            f"{arch}.attention.layer_norm_rms_epsilon": Value(F32, self._float(config, "rms_norm_eps", 1e-6)),
            f"{arch}.rope.freq_base": Value(F32, self._float(self._rope(), "rope_theta")),
            f"{arch}.rope.dimension_count": Value(U32, self._head()),
            f"{arch}.vocab_size": number("vocab_size"),
        }  # fmt: skip
        if self._rope().get("rope_type") == "linear":
            out[f"{arch}.rope.scaling.type"] = Value(STRING, "linear")
            out[f"{arch}.rope.scaling.factor"] = Value(F32, self._float(self._rope(), "factor"))
        return out | tokenizer_metadata(self.original, self._number("vocab_size"))

    def extra(self) -> dict[str, Tensor]:
        """Tensors that llama.cpp has and transformers computes: the factors of Llama 3's rotary frequencies."""
        rope = self._rope()
        if rope.get("rope_type") != "llama3":
            return {}
        # transformers' _compute_llama3_parameters: long waves are stretched by `factor`, short ones are not.
        factor, low, high = (self._float(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        old = self._float(rope, "original_max_position_embeddings")
        wave = 2 * math.pi * self._float(rope, "rope_theta") ** (torch.arange(0, self._head(), 2).double() / self._head())
        smooth = (old / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        out = torch.where(wave > old / low, factor, torch.where(wave < old / high, 1.0, between))
        return {"rope_freqs.weight": out.float()}

    def _rope(self) -> dict[str, Any]:
        """Rotary settings under their current names: rope_type and rope_theta among them."""
        config = self.original.config
        found = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(found, Mapping):
            raise self._error("rope_parameters of config.json are not an object", type(found).__name__, None)
        rope = dict(found)
        rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        if rope["rope_type"] not in ("default", "linear", "llama3"):
            raise self._error(
                "gguf files are not written for these rotary embeddings", rope["rope_type"], "default, linear, llama3"
            )
        return rope

    def _head(self) -> int:
        config = self.original.config
        size = config.get("head_dim") or self._number("hidden_size") // self._number("num_attention_heads")
        if type(size) is not int or not 2 <= size <= _MOST_HEAD or size % 2:
            raise self._error("config.json has no usable head_dim", repr(size), f"an even number up to {_MOST_HEAD}")
        return size

    def _float(self, values: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self._error(f"config.json has no usable {key}", repr(value), "a positive number")
        return float(value)

    def _number(self, key: str, default: int | None = None) -> int:
        value = self.original.config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self._error(f"config.json has no usable {key}", repr(value), "a whole number")
        return value

    def _table(self) -> Any:
        try:
            import gguf
        except ImportError as error:
            raise BitlineError(
                "gguf files need the gguf package's tables of names", fix="pip install 'bitline[models]'"
            ) from error
        numbers = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
        return gguf.get_tensor_name_map(numbers[self.architecture], 1)

    def _error(self, what: str, found: object, expected: object, fix: str | None = None) -> ConversionError:
        return ConversionError(what, file=self.original.checkpoint.path, found=found, expected=expected, fix=fix)
