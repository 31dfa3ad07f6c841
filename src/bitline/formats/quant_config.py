"""Where a checkpoint says how it was quantized: config.json, or a side file in the same folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.base import TensorSource
from bitline.formats.io.json_object import read_config

# quant_method of AutoRound's own config, whose tensors may be laid out as GPTQ, AWQ, FP8 or compressed-tensors.
AUTO_ROUND_METHODS = ("auto-round", "intel/auto-round", "inc")
SIDE_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json", "params.json")
_KEYS = ("quantization_config", "compression_config")
_LANGUAGE_MODELS = ("text_config", "llm_config", "language_config")  # sub-configs of multimodal models
_DEPTH = 3  # of nested configs, as thinker_config.text_config


def quantization_config(source: TensorSource) -> dict[str, Any]:
    """The checkpoint's quantization config with "quant_method" in it; {} where there is none.

    config.json comes first ("quantization_config", the older "compression_config", then the same inside "text_config" and
    other sub-configs), then quantize_config.json, quant_config.json, hf_quant_config.json, quantization_config.json and
    Mistral's params.json. Side files that predate "quant_method" get the method that their name and keys imply. A config
    that is not an object is a CheckpointError.
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
            return _with_method(dict(found), main, None), main
    for name in SIDE_FILES:
        file = folder / name
        if file.is_file() and (config := read_config(file)) and (name != "params.json" or config.get("quantization")):
            return _with_method(config, file, name), file
    return {}, main


def is_allowed(value: object, allowed: Iterable[object]) -> bool:
    """Whether the value of a config option is one of these. 1 is not true, and 0 is not false."""
    return any(value is one or (isinstance(one, str) and value == one) for one in allowed)


def _configs(config: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """A config, then its sub-configs, the language model's first."""
    yield config
    names = dict.fromkeys([*_LANGUAGE_MODELS, *(key for key in config if key.endswith("_config") and key not in _KEYS)])
    for name in names if depth > 1 else ():
        if isinstance(nested := config.get(name), Mapping):
            yield from _configs(nested, depth - 1)


def _with_method(config: dict[str, Any], file: Path, side_file: str | None) -> dict[str, Any]:
    """The config with its quant_method in lower case."""
    if side_file == "hf_quant_config.json" and isinstance(config.get("quantization"), Mapping):
        config = {"quant_method": "modelopt", **config, **config["quantization"]}
    if side_file == "params.json" and isinstance(config.get("quantization"), Mapping):
        config = _mistral(config["quantization"])
    method = next((config[key] for key in ("quant_method", "quantization_method") if config.get(key) is not None), None)
    if method is None:
        method = _infer_method(config, side_file)
    if not isinstance(method, str):
        raise CheckpointError(
            "the quantization config names no method", file=file, field="quant_method", found=f"quant_method {method!r}",
            expected='a string such as "gptq", "awq" or "compressed-tensors"',
        )  # fmt: skip
    return {**config, "quant_method": method.strip().lower()}


def _mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    """Mistral's params.json in the keys of an fp8 config: FP8 weights, activations with a static scale or dynamic."""
    if config.get("qformat_weight") != "fp8_e4m3":
        return dict(config)
    static = config.get("qscheme_act") != "NO_SCALES"
    return {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}


def _infer_method(config: Mapping[str, Any], side_file: str | None) -> str | None:
    """The method of a config without quant_method, by keys that only one family writes, else by the side file's name."""
    keys_of = {
        "compressed-tensors": ("config_groups",), "auto-round": ("autoround_version", "packing_format"),
        "awq": ("w_bit", "q_group_size", "zero_point"), "gptq": ("desc_act", "damp_percent"),
        "bitsandbytes": ("load_in_4bit", "load_in_8bit"),
    }  # fmt: skip
    for method, keys in keys_of.items():
        if any(key in config for key in keys):
            return method
    by_file = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
    return by_file.get(side_file or "")
