"""config.json values that a GGUF header needs, checked before anything is sized by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitline.conversion.source_model import SourceModel
from bitline.errors import ConversionError

# transformers' model_type to llama.cpp's architecture. Others need more than a renaming and a row permutation.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_ROPE_TYPES = ("default", "linear", "llama3")
_MAX_HEAD_DIM = 1 << 16


class ModelConfig:
    """Typed access to a source model's config.json. A value that is missing or unusable is a ConversionError."""

    def __init__(self, source: SourceModel) -> None:
        self._values, self._path = source.config, source.checkpoint.path
        model_type = str(self._values.get("model_type"))
        if model_type not in ARCHITECTURES:
            raise self.error("gguf files are not written for this architecture", f"model_type {model_type!r}",
                             ", ".join(ARCHITECTURES), "llama.cpp's converter takes more, from unquantized weights")  # fmt: skip
        self.architecture = ARCHITECTURES[model_type]
        window = self._values.get("sliding_window")
        if window and self._values.get("use_sliding_window", model_type == "mistral"):
            raise self.error("gguf files of this architecture have no sliding window", window, "none")
        self.rope = self._rope_parameters()

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer below 2**31."""
        value = self._values.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.error(f"config.json has no usable {key}", repr(value), "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        return self._number(self._values, key, default)

    def rope_number(self, key: str) -> float:
        """A positive number of the rotary embedding's parameters."""
        return self._number(self.rope, key)

    def text(self, key: str) -> str | None:
        """A value as text; None if it is missing or empty."""
        value = self._values.get(key)
        return str(value) if value else None

    def head_dim(self) -> int:
        """The size of an attention head, an even number."""
        size = self._values.get("head_dim") or self.integer("hidden_size") // self.integer("num_attention_heads")
        if type(size) is not int or not 2 <= size <= _MAX_HEAD_DIM or size % 2:
            raise self.error("config.json has no usable head_dim", repr(size), f"an even number up to {_MAX_HEAD_DIM}")
        return size

    def heads(self) -> int:
        """Query heads."""
        return self.integer("num_attention_heads")

    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.integer("num_key_value_heads", self.heads())

    def error(self, what: str, found: object, expected: object, fix: str | None = None) -> ConversionError:
        """A ConversionError about this model."""
        return ConversionError(what, file=self._path, found=found, expected=expected, fix=fix)

    def _rope_parameters(self) -> dict[str, Any]:
        """The rotary embedding's parameters under their current names, rope_type and rope_theta among them."""
        found = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(found, Mapping):
            raise self.error("rope_parameters of config.json are not an object", type(found).__name__, None)
        rope = dict(found)
        rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        rope.setdefault("rope_theta", self._values.get("rope_theta", 10000.0))
        if rope["rope_type"] not in _ROPE_TYPES:
            raise self.error("gguf files are not written for these rotary embeddings", rope["rope_type"], ", ".join(_ROPE_TYPES))
        return rope

    def _number(self, values: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(f"config.json has no usable {key}", repr(value), "a positive number")
        return float(value)
