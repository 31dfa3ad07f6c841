"""install and uninstall: the one function of transformers that is replaced, so that a BitlineConfig is taken everywhere."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers
from transformers import modeling_utils

from bitline.errors import BitlineError
from bitline.hf.config import METHOD, BitlineConfig
from bitline.hf.quantizer import BitlineQuantizer

_ARGUMENTS = ["config", "quantization_config", "device_map", "weights_only", "user_agent", "gguf_file"]


def install() -> None:
    """Let `from_pretrained` take a BitlineConfig for a checkpoint with a quantization config of its own, and for a GGUF file.

    transformers' `get_hf_quantizer` merges the checkpoint's config with the given one, which have to be of one class, and takes
    a GgufConfig alone for a `gguf_file`. Installed, a BitlineConfig goes past both; any other config gets transformers' own
    function. Calling it again changes nothing.

    Raises:
        BitlineError: For a version of transformers whose function has other arguments.
    """
    if is_installed():
        return
    original = modeling_utils.get_hf_quantizer
    found = list(inspect.signature(original).parameters)
    if found != _ARGUMENTS:
        raise BitlineError(
            "bitline.hf does not know this version of transformers", found=f"{transformers.__version__}: {', '.join(found)}",
            expected=", ".join(_ARGUMENTS), fix="install transformers 5.23, or load with bitline.load_model",
        )  # fmt: skip

    @functools.wraps(original)
    def get_hf_quantizer(
        config: Any, quantization_config: Any, device_map: Any, weights_only: Any, user_agent: Any, gguf_file: Any = None
    ) -> Any:  # fmt: skip
        if isinstance(quantization_config, dict) and quantization_config.get("quant_method") == METHOD:
            quantization_config = BitlineConfig.from_dict(quantization_config)
        if not isinstance(quantization_config, BitlineConfig):
            return original(config, quantization_config, device_map, weights_only, user_agent, gguf_file=gguf_file)
        return _bitline_quantizer(config, quantization_config, device_map, weights_only, user_agent)

    get_hf_quantizer.bitline_original = original  # type: ignore[attr-defined]
    modeling_utils.get_hf_quantizer = get_hf_quantizer


def uninstall() -> None:
    """Put transformers' own function back. Models that are loaded stay as they are."""
    if is_installed():
        modeling_utils.get_hf_quantizer = modeling_utils.get_hf_quantizer.bitline_original


def is_installed() -> bool:
    """Whether `install` is in effect."""
    return hasattr(modeling_utils.get_hf_quantizer, "bitline_original")


def _bitline_quantizer(config: Any, asked: BitlineConfig, device_map: Any, weights_only: Any, user_agent: Any) -> Any:
    """(quantizer, config, device_map), as transformers' function returns them."""
    quantizer = BitlineQuantizer(asked)
    quantizer.keep_own_config(config)
    config.quantization_config = asked
    quantizer.validate_environment(device_map=device_map, weights_only=weights_only)
    user_agent["quant"] = METHOD
    return quantizer, quantizer.update_attn_implementation(config), quantizer.update_device_map(device_map)
