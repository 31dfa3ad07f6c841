"""Measured costs of torch's CPU operators, for the estimates of kernels that are made of them.

Figures are seconds on two cores (docs/performance.md says how they were measured), scaled to a platform's core count.
Those of an AMX machine that were not measured there are the other machine's times 1.3.
"""

from __future__ import annotations

import torch

from bitline.platform import Platform
from bitline.types import LinearSpec, ScalarType

CALL = 6e-6  # a kernel's `apply` that does next to nothing


def share(platform: Platform) -> float:
    """What work that was measured on two cores takes on the platform's, as a factor."""
    return 2 / platform.cores


def slower(platform: Platform) -> float:
    """The factor for byte and float passes on a machine where they were not measured."""
    return 1.3 if "amx" in platform.features else 1.0


def product(weights: int, m: int, dtype: torch.dtype, platform: Platform) -> float:
    """m rows times a dense weight that a cache holds."""
    if dtype == torch.float16 and m < 8:
        return weights * (3e-11 + m * 3e-11) * share(platform)
    rate = platform.rates.bf16 if dtype == torch.bfloat16 else platform.rates.fp32
    start = 3e-11 if dtype == torch.bfloat16 else 6e-11
    return weights * start * share(platform) + 2.0 * m * weights / rate


def quantized_input(spec: LinearSpec, platform: Platform, m: int) -> float:
    """Quantizing the layer's input and reading it back; nothing for a weight-only scheme."""
    return 0.0 if spec.act is None else 25e-6 + m * spec.k * 9e-10 * share(platform)


def decode_seconds(scalar: ScalarType) -> float:
    """Seconds a weight, on two cores, to unpack codes and turn them into float32."""
    if scalar.bits == 8 and scalar.kind != "table":
        return 0.5e-10 if scalar.kind == "int" else 1.4e-10
    if scalar.bits == 4:
        return 0.9e-10 if scalar.kind == "int" else 1.5e-10
    if scalar.kind == "int":
        return 2.2e-10 if 8 % scalar.bits == 0 else 5e-10
    return 8e-10


def dequantize(spec: LinearSpec, platform: Platform, chunk: int) -> float:
    """The canonical weight to the input's dtype, `chunk` weights at a time."""
    weights = spec.n * spec.k
    each = (
        decode_seconds(spec.weight) + 0.8e-10 + (0.3e-10 if spec.zero != "none" else 0.0) + (8.5e-10 if spec.act_order else 0.0)
    )
    return (100e-6 * -(-weights // chunk) + weights * each * share(platform)) * slower(platform)
