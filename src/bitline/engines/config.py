"""What the plug-ins' quantization configs answer alike in every engine."""

from __future__ import annotations

from typing import Any

import torch


class AnyCheckpoint:
    """Methods of an engine's QuantizationConfig: a base class to stand before it. Bitline takes every checkpoint and device."""

    tied = False  # whether the model's table is also its output layer

    @classmethod
    def get_name(cls) -> Any:
        """ "bitline"."""
        return "bitline"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """16 and 32 bits."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """None: Bitline has a kernel for every device."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: Bitline finds a checkpoint's configuration itself."""
        return []

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        """Take a checkpoint of another method where the user asks for "bitline"."""
        return "bitline" if user_quant == "bitline" else None

    def read_ties(self, hf_config: Any) -> None:
        """Set `tied` from the model's configuration, None where there is none."""
        text = getattr(hf_config, "text_config", None) or hf_config
        self.tied = bool(getattr(text, "tie_word_embeddings", False))
