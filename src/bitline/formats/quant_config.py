"""Where a checkpoint says how it was quantized: config.json, or a side file beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.base import TensorSource
from bitline.formats.io.json_object import read_config

_KEYS = ("quantization_config", "compression_config")
_NESTED = ("text_config", "llm_config", "language_config")  # where multimodal models keep their language model
_DEPTH = 3  # of configs within configs, as thinker_config.text_config
SIDE_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json", "params.json")


def quantization_config(source: TensorSource) -> dict[str, Any]:
    """What the checkpoint says of its quantization, with "quant_method" in it; {} where it says nothing.

    config.json comes first ("quantization_config", the older "compression_config", then the same inside "text_config" and
    other configs of parts), then quantize_config.json, quant_config.json, hf_quant_config.json, quantization_config.json and
    Mistral's params.json. Side files that predate "quant_method" get the one that wrote files of that name and these keys.
    What is not an object is a CheckpointError.
    """
    return find_quantization(source)[0]


def find_quantization(source: TensorSource) -> tuple[dict[str, Any], Path]:
    """`quantization_config` and the file that it comes from, for error messages."""
    folder = source.path if source.path.is_dir() else source.path.parent
    main = folder / "config.json"
    for config in _configs(source.config, _DEPTH):
        for key in _KEYS:
            found = config.get(key)
            if found is None or found == {}:
                continue
            if not isinstance(found, Mapping):
                raise CheckpointError(f"{key} is not an object", file=main, field=key, found=type(found).__name__)
            return _named(dict(found), main, None), main
    for name in SIDE_FILES:
        file = folder / name
        if file.is_file() and (config := read_config(file)) and (name != "params.json" or config.get("quantization")):
            return _named(config, file, name), file
    return {}, main


def _configs(config: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """A config, then those of its parts, the language model's first."""
    yield config
    names = dict.fromkeys([*_NESTED, *(key for key in config if key.endswith("_config") and key not in _KEYS)])
    for name in names if depth > 1 else ():
        if isinstance(part := config.get(name), Mapping):
            yield from _configs(part, depth - 1)


def _named(config: dict[str, Any], file: Path, side: str | None) -> dict[str, Any]:
    """The config with its quant_method, in the lower case that everyone compares with."""
    if side == "hf_quant_config.json" and isinstance(config.get("quantization"), Mapping):
        config = {"quant_method": "modelopt", **config, **config["quantization"]}
    if side == "params.json" and isinstance(config.get("quantization"), Mapping):
        config = _mistral(config["quantization"])
    method = next((config[key] for key in ("quant_method", "quantization_method") if config.get(key) is not None), None)
    if method is None:
        method = _guess(config, side)
    if not isinstance(method, str):
        raise CheckpointError(
            "the quantization config names no method", file=file, field="quant_method", found=f"quant_method {method!r}",
            expected='a string such as "gptq", "awq" or "compressed-tensors"',
        )  # fmt: skip
    return {**config, "quant_method": method.strip().lower()}


def _mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    """What params.json says in its own words: FP8 weights, and inputs with a scale of their own or with none."""
    if config.get("qformat_weight") != "fp8_e4m3":
        return dict(config)
    static = config.get("qscheme_act") != "NO_SCALES"
    return {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}


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
