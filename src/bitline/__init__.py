"""Bitline runs the linear layers of any quantized model, on any machine, and says why it runs them as it does."""

from bitline.errors import BitlineError, CheckpointError, InputError, NoKernelError, OutOfMemoryError, PlatformError, WeightError
from bitline.kernels.base import Kernel
from bitline.kernels.registry import register_kernel
from bitline.linear import QuantLinear
from bitline.platform import Platform
from bitline.select import Choice, Policy, choose
from bitline.types import ActSpec, LinearSpec, ScalarType, Verdict
from bitline.weight import QuantizedWeight

__version__ = "0.1.0"
__all__ = [
    "ActSpec", "BitlineError", "CheckpointError", "Choice", "InputError", "Kernel", "LinearSpec", "NoKernelError",
    "OutOfMemoryError", "Platform", "PlatformError", "Policy", "QuantLinear", "QuantizedWeight", "ScalarType", "Verdict",
    "WeightError", "__version__", "choose", "register_kernel",
]  # fmt: skip
