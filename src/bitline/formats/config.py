"""Where a checkpoint says how it was quantized: config.json, or a side file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats._json import read_config
from bitline.formats.base import TensorSource

_KEYS = ("quantization_config", "compression_config")
_NESTED = ("text_config", "llm_config", "language_config")  # where multimodal models keep their language model
SIDE_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json")


def quantization_config(source: TensorSource) -> dict[str, Any]:
    """What the checkpoint says of its quantization, with "quant_method" in it; {} where it says nothing.

    config.json comes first ("quantization_config", the older "compression_config", the same inside "text_config"), then
    quantize_config.json, quant_config.json, hf_quant_config.json and quantization_config.json. Side files that predate
    "quant_method" get the one that wrote files of that name and these keys. What is not an object is a CheckpointError.
    """
    return find_quantization(source)[0]


def find_quantization(source: TensorSource) -> tuple[dict[str, Any], Path]:
    """`quantization_config` and the file that it comes from, for error messages."""
    folder = source.path if source.path.is_dir() else source.path.parent
    main = folder / "config.json"
    nested = [source.config.get(name) for name in _NESTED]
    for config in [source.config, *(c for c in nested if isinstance(c, Mapping))]:
        for key in _KEYS:
            found = config.get(key)
            if found is None or found == {}:
                continue
            if not isinstance(found, Mapping):
                raise CheckpointError(f"{key} is not an object", file=main, field=key, found=type(found).__name__)
            return _named(dict(found), main, None), main
    for name in SIDE_FILES:
        file = folder / name
        if file.is_file():
            return _named(read_config(file), file, name), file
    return {}, main


def _named(config: dict[str, Any], file: Path, side: str | None) -> dict[str, Any]:
    """The config with its quant_method, in the lower case that everyone compares with."""
    if side == "hf_quant_config.json" and isinstance(config.get("quantization"), Mapping):
        config = {"quant_method": "modelopt", **config, **config["quantization"]}
    method = config.get("quant_method") or config.get("quantization_method")
    if method is None:
        method = _guess(config, side)
    if not isinstance(method, str):
        raise CheckpointError(
            "the quantization config names no method", file=file, field="quant_method", found=f"quant_method {method!r}",
            expected='a string such as "gptq", "awq" or "compressed-tensors"',
        )  # fmt: skip
    return {**config, "quant_method": method.strip().lower()}


def _guess(config: Mapping[str, Any], side: str | None) -> str | None:
    """The method that a config without quant_method comes from, by keys that only one family writes."""
    signs = {
        "compressed-tensors": ("config_groups",), "auto-round": ("autoround_version", "packing_format"),
        "awq": ("w_bit", "q_group_size", "zero_point"), "gptq": ("desc_act", "damp_percent"),
        "bitsandbytes": ("load_in_4bit", "load_in_8bit"),
    }  # fmt: skip
    for method, keys in signs.items():
        if any(key in config for key in keys):
            return method
    by_file = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
    return by_file.get(side or "")
