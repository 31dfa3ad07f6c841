"""What transformers offers registries for: the quantization method and the experts implementation."""

from __future__ import annotations

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from bitline.hf.config import METHOD, BitlineConfig
from bitline.hf.experts import experts_forward
from bitline.hf.quantizer import BitlineQuantizer


def register() -> None:
    """Register with transformers, once."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(BitlineConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(BitlineQuantizer)
    ALL_EXPERTS_FUNCTIONS.register(METHOD, experts_forward)
