"""Bitline inside transformers and PEFT: models of `from_pretrained` on Bitline's kernels, and LoRA on them.

    import bitline.hf

    bitline.hf.install()
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=bitline.hf.BitlineConfig())

Importing this module registers the quantization method "bitline" and the experts implementation "bitline" with transformers;
`install` replaces one function of transformers, `uninstall` puts it back.
"""

import importlib
from typing import Any

from bitline.errors import BitlineError
from bitline.hf.config import METHOD, BitlineConfig
from bitline.hf.doors import install, is_installed, uninstall
from bitline.hf.registration import register

register()

__all__ = ["METHOD", "BitlineConfig", "install", "is_installed", "load_adapter", "lora_config", "uninstall"]


def __getattr__(name: str) -> Any:
    """lora_config and load_adapter import PEFT, which models without adapters do not need."""
    if name not in ("lora_config", "load_adapter"):
        raise AttributeError(f"module 'bitline.hf' has no attribute {name!r}")
    try:
        lora = importlib.import_module("bitline.hf.lora")
    except ImportError as error:
        raise BitlineError("adapters need PEFT", found=str(error), fix="pip install 'bitline[peft]'") from error
    return getattr(lora, name)
