"""Measured costs of torch's CPU operators, for the cost models of kernels that are made of them.

Times are seconds on two cores of an AMD Zen 5 server CPU (docs/performance.md), scaled to a platform's core count. Where an AMX
machine was not measured, its time is the other machine's times 1.3.
"""

from __future__ import annotations

import torch

from bitline.platform import Platform
from bitline.types import LinearSpec, ScalarType

AVX512, AMX, AVX2 = 0, 1, 2  # classes of x86 CPUs whose operators were measured
CALL = 6e-6  # a kernel's `apply` that does next to nothing


def core_scale(platform: Platform) -> float:
    """The factor from a time on two cores to the platform's."""
    return 2 / platform.cores


def cpu_class(features: frozenset[str]) -> int:
    """AMX, AVX512 or AVX2: the index into a tuple of measured costs. AVX-512 without bfloat16 counts as AVX2, ARM as AVX-512."""
    return AMX if "amx" in features else AVX2 if "avx2" in features and "avx512_bf16" not in features else AVX512


def unmeasured_scale(platform: Platform) -> float:
    """The factor for elementwise passes on a machine where they were not measured."""
    return 1.3 if "amx" in platform.features else 1.0


def dense_gemm(weights: int, m: int, dtype: torch.dtype, platform: Platform) -> float:
    """A GEMM with M = m and a dense weight of `weights` = N * K elements, which is in cache."""
    if dtype == torch.float16 and m < 8:
        return weights * (3e-11 + m * 3e-11) * core_scale(platform)
    rate = platform.rates.bf16 if dtype == torch.bfloat16 else platform.rates.fp32
    per_weight = 3e-11 if dtype == torch.bfloat16 else 6e-11
    return weights * per_weight * core_scale(platform) + 2.0 * m * weights / rate


def fake_quant(spec: LinearSpec, platform: Platform, m: int) -> float:
    """Fake quantization of the activations by torch's operators; 0 for a weight-only scheme."""
    return 0.0 if spec.act is None else 25e-6 + m * spec.k * 9e-10 * core_scale(platform)


def unpack_per_weight(scalar: ScalarType) -> float:
    """Seconds per weight, on two cores, to unpack codes and convert them to float32."""
    if scalar.bits == 8 and scalar.kind != "table":
        return 0.5e-10 if scalar.kind == "int" else 1.4e-10
    if scalar.bits == 4:
        return 0.9e-10 if scalar.kind == "int" else 1.5e-10
    if scalar.kind == "int":
        return 2.2e-10 if 8 % scalar.bits == 0 else 5e-10
    return 8e-10


def dequantize(spec: LinearSpec, platform: Platform, chunk: int) -> float:
    """Dequantizing the canonical weight to the activations' dtype, `chunk` weights at a time."""
    weights = spec.n * spec.k
    per_weight = unpack_per_weight(spec.weight) + 0.8e-10
    per_weight += (0.3e-10 if spec.zero != "none" else 0.0) + (8.5e-10 if spec.act_order else 0.0)
    return (100e-6 * -(-weights // chunk) + weights * per_weight * core_scale(platform)) * unmeasured_scale(platform)
