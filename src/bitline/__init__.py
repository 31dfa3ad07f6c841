"""Bitline: quantized linear layers. Reads every checkpoint format, selects a kernel per layer, and explains the selection.

Public names are imported on first use, so that `bitline --help` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bitline.version import __version__

if TYPE_CHECKING:
    from bitline.checkpoint import Checkpoint, open_checkpoint
    from bitline.conversion import ConversionReport, convert
    from bitline.errors import (
        BitlineError,
        CheckpointError,
        ConversionError,
        InputError,
        NoKernelError,
        OutOfMemoryError,
        PlatformError,
        VerificationError,
        WeightError,
    )
    from bitline.expert_gate import ExpertGate
    from bitline.experts import QuantExperts
    from bitline.formats.discovery import register_format
    from bitline.kernels.base import Kernel
    from bitline.kernels.registry import register_kernel
    from bitline.linear import QuantLinear
    from bitline.model.load import load_model
    from bitline.model.replace import replace_linears
    from bitline.model.verify import verify
    from bitline.operators import register_operators
    from bitline.platform import Platform
    from bitline.quantized_input import QuantizedInput
    from bitline.rtn import quantize
    from bitline.select import Choice, Policy, choose
    from bitline.types import ActSpec, LinearSpec, ScalarType, Verdict
    from bitline.weight import QuantizedWeight

_EXPORTS = {
    "bitline.checkpoint": ("Checkpoint", "open_checkpoint"),
    "bitline.conversion": ("ConversionReport", "convert"),
    "bitline.errors": (
        "BitlineError", "CheckpointError", "ConversionError", "InputError", "NoKernelError", "OutOfMemoryError", "PlatformError",
        "VerificationError", "WeightError",
    ),
    "bitline.expert_gate": ("ExpertGate",),
    "bitline.experts": ("QuantExperts",),
    "bitline.formats.discovery": ("register_format",),
    "bitline.kernels.base": ("Kernel",),
    "bitline.kernels.registry": ("register_kernel",),
    "bitline.linear": ("QuantLinear",),
    "bitline.model.load": ("load_model",),
    "bitline.model.replace": ("replace_linears",),
    "bitline.model.verify": ("verify",),
    "bitline.operators": ("register_operators",),
    "bitline.platform": ("Platform",),
    "bitline.quantized_input": ("QuantizedInput",),
    "bitline.rtn": ("quantize",),
    "bitline.select": ("Choice", "Policy", "choose"),
    "bitline.types": ("ActSpec", "LinearSpec", "ScalarType", "Verdict"),
    "bitline.weight": ("QuantizedWeight",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "ActSpec", "BitlineError", "Checkpoint", "CheckpointError", "Choice", "ConversionError", "ConversionReport", "ExpertGate",
    "InputError", "Kernel", "LinearSpec", "NoKernelError", "OutOfMemoryError", "Platform", "PlatformError", "Policy",
    "QuantExperts", "QuantLinear", "QuantizedInput", "QuantizedWeight", "ScalarType", "Verdict", "VerificationError",
    "WeightError", "__version__", "choose", "convert", "load_model", "open_checkpoint", "quantize", "register_format",
    "register_kernel", "register_operators", "replace_linears", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'bitline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
