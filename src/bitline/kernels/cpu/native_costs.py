"""Estimated time of the native CPU kernel, from measurements of each class of CPU."""

from __future__ import annotations

import torch

from bitline import types
from bitline.kernels.cpu import costs, packed_weight
from bitline.platform import Platform
from bitline.types import LinearSpec

# Measured on two Zen 5 cores (docs/performance.md). AVX-512: operations per second and core, by compute type.
BF16_RATE, F32_RATE, INT8_RATE, BF16_OF_8_BITS_RATE = 500e9, 260e9, 900e9, 460e9
# AVX2: measured on two virtual cores of an AMD EPYC (Zen 4) that hides AVX-512. Seconds per weight on two cores, once and per row
# of x: int8 slices of a weight-only layer, int8 activations with 4- and 8-bit codes, float32 in registers and by panels.
AVX2_SLICES, AVX2_INT8, AVX2_INT8_OF_8_BITS = (12e-12, 12e-12), (12e-12, 7.4e-12), (30e-12, 16.5e-12)
AVX2_GEMV, AVX2_PANEL = (20e-12, 11e-12), (40e-12, 15e-12)
# What dequantizing to float32 costs beyond integers: tables of 16 and E4M3 by arithmetic, other tables by gathers.
AVX2_TABLE, AVX2_GATHER = 30e-12, 150e-12
AVX2_MAX_GEMV_M, AVX2_MAX_INT8_M = 3, 16
AVX2_GROUP = 150e-12  # a group's scales, for each row of x and row of W
# AMX: measured on 2 and 16 virtual cores of an Emerald Rapids Xeon. Seconds per weight and core: dequantizing (8 bits or short
# groups cost more), and per row of x, by tiles of 16 rows, in bfloat16 and in int8; below the tiles' M, by vectors.
AMX_DEQUANT, AMX_DEQUANT_SLOW, AMX_PER_ROW, AMX_INT8_PER_ROW = 62e-12, 170e-12, 4.8e-12, 3.4e-12
AMX_VECTOR, AMX_VECTOR_PER_ROW, AMX_VECTOR_INT8_PER_ROW = 48e-12, 20e-12, 7e-12
AMX_TILE_M, AMX_MIN_INT8_M = 16, 12
# Weight-only layers of few rows there, by int8 digits of x: once, per row and digit, a group's scales per row, and splitting x.
AMX_DIGITS, AMX_DIGITS_PER_ROW, AMX_DIGITS_GROUP, AMX_SPLIT = 25e-12, 5.7e-12, 275e-12, 4e-10
# What does not run on tiles there: the share of the rates above at M = 256. One vdpbf16ps starts in two cycles.
AMX_CPU_VECTORS = {BF16_RATE: 0.11, BF16_OF_8_BITS_RATE: 0.11, F32_RATE: 0.28, INT8_RATE: 0.32}
# ARM: no machine was measured. Guesses from instruction counts at 2.6 GHz and 60 % of the peak: seconds per weight on two cores,
# once and per row of x, of usdot or sdot with int8 digits, of float32 FMA, and of bfmmla and usmmla.
ARM_DIGITS, ARM_F32, ARM_BF16, ARM_INT8 = (15e-12, 10e-12), (40e-12, 30e-12), (40e-12, 10e-12), (20e-12, 5e-12)
ARM_GATHER = 150e-12  # float32 values from tables of more than 16 entries
ARM_MIN_MATRIX_M, ARM_MAX_DIGITS_M = 4, 12
PACK_ACTIVATIONS = 1e-10  # seconds per element of x
# Quantizing x in groups: seconds per element and core, a group's own, and elements up to which one thread does it.
QUANTIZE_GROUPS, QUANTIZE_GROUP, SERIAL_GROUPS = 5.7e-10, 8e-9, 1 << 13
CALL = 3e-6
FAST_FEATURES = frozenset(("avx512_bf16", "avx512_vnni", "avx512_vbmi"))


def seconds(spec: LinearSpec, platform: Platform, m: int, packed_bytes: int, batch_invariant: bool) -> float:
    """Of a call: the roofline of reading the weight and of its multiply-adds; with AVX2 and AMX dequantization is a large part.

    Args:
        spec: The layer.
        platform: A CPU with its features, cores and memory bandwidth.
        m: Rows of x.
        packed_bytes: Of the packed weight.
        batch_invariant: Whether a row's result must not depend on M.
    """
    weights, extra = spec.n * spec.k, CALL + _quantize_input(spec, platform, m)
    read = packed_bytes / platform.rates.bandwidth
    if "avx2" not in platform.features:
        return max(read, weights * _arm_per_weight(spec, platform, m, batch_invariant) * costs.core_scale(platform)) + extra
    if not platform.features >= FAST_FEATURES:
        return max(read, weights * _avx2_per_weight(spec, m, batch_invariant) * costs.core_scale(platform)) + extra
    if "amx" in platform.features and not batch_invariant and m <= _amx_max_digits_m(spec):
        return max(read, weights * _amx_digits_per_weight(spec, m) / platform.cores) + m * spec.k * AMX_SPLIT + extra
    if "amx" in platform.features and not batch_invariant and _compute_rate(spec) != F32_RATE:
        return max(read, weights * _amx_per_weight(spec, m) / platform.cores) + m * spec.k * PACK_ACTIVATIONS + extra
    rate = _compute_rate(spec) * platform.cores
    if "amx" in platform.features:
        rate *= AMX_CPU_VECTORS[_compute_rate(spec)]
    return max(read, 2.0 * m * weights / rate) + m * spec.k * PACK_ACTIVATIONS * costs.core_scale(platform) + extra


def _quantize_input(spec: LinearSpec, platform: Platform, m: int) -> float:
    """Seconds in which x is replaced by the values of its codes; codes that are multiplied cost next to nothing."""
    if not packed_weight.quantizes_activations(spec.act):
        return costs.fake_quant(spec, platform, m)
    if spec.act is None or spec.act.granularity != "group":
        return 0.0
    threads = 1 if m * spec.k <= SERIAL_GROUPS else platform.cores
    return m * spec.k * (QUANTIZE_GROUPS + QUANTIZE_GROUP / spec.act.group_size) / threads


def _has_integer_codes(spec: LinearSpec) -> bool:
    """Whether codes are integers times a unit, which int8 slices multiply."""
    return spec.weight.kind == "int" or (spec.weight.bits == 4 and spec.weight.kind == "float")


def _avx2_per_weight(spec: LinearSpec, m: int, batch_invariant: bool) -> float:
    """Seconds per weight on two cores with AVX2; csrc/variants/gemm_plan_slices.h chooses the same way."""
    layout, dtype, integers = packed_weight.layout_of(spec), spec.act_dtype, _has_integer_codes(spec)
    int8 = _compute_rate(spec) == INT8_RATE
    most = 1 if layout.bits == 8 or dtype == torch.float32 else 5 if dtype == torch.bfloat16 else 3
    if batch_invariant or not integers:
        most, int8 = 0, False
    if int8 and (layout.bits == 4 or m <= AVX2_MAX_INT8_M):
        once, per_row = AVX2_INT8 if layout.bits == 4 else AVX2_INT8_OF_8_BITS
    elif m <= most:
        once, per_row = AVX2_SLICES
        per_row *= 2.0 if layout.bits == 8 else 1.5 if dtype != torch.bfloat16 or layout.bits in (5, 6) else 1.0
    else:
        once, per_row = AVX2_GEMV if m <= AVX2_MAX_GEMV_M else AVX2_PANEL
        if spec.weight.kind != "int":
            once += AVX2_TABLE if spec.weight.bits == 4 or spec.weight == types.float8_e4m3fn else AVX2_GATHER
    return once + m * (per_row + AVX2_GROUP / layout.group_k)


def _arm_per_weight(spec: LinearSpec, platform: Platform, m: int, batch_invariant: bool) -> float:
    """Seconds per weight on two cores with NEON; csrc/variants/gemm_neon.cpp chooses the same way."""
    kind, int8 = spec.weight, _compute_rate(spec) == INT8_RATE and not batch_invariant
    matrices = platform.features >= {"i8mm", "bf16"} and m >= ARM_MIN_MATRIX_M and not batch_invariant
    integers = _has_integer_codes(spec)
    if matrices and (int8 or _compute_rate(spec) != F32_RATE):
        once, per_row = ARM_INT8 if int8 else ARM_BF16
    elif integers and not batch_invariant and (int8 or m <= ARM_MAX_DIGITS_M):
        digits = 1 if int8 else _digits_of_x(spec)
        once, per_row = ARM_DIGITS[0], ARM_DIGITS[1] * digits
    else:
        once, per_row = ARM_F32
        once += ARM_GATHER if kind.kind != "int" and kind.bits != 4 and kind != types.float8_e4m3fn else 0.0
    return once + m * per_row


def _digits_of_x(spec: LinearSpec) -> int:
    """Int8 digits of x of a weight-only layer, where products of unsigned and signed bytes are summed in 32 bits."""
    return {torch.bfloat16: 2, torch.float16: 3}.get(spec.act_dtype, 4)


def _amx_max_digits_m(spec: LinearSpec) -> int:
    """Rows up to which digits of x are multiplied with AMX; csrc/variants/gemm_amx.cpp chooses the same way."""
    if packed_weight.multiplies_codes(spec.act) or not _has_integer_codes(spec):
        return 0
    layout = packed_weight.layout_of(spec)
    bits, long_groups = layout.bits, layout.group_k >= 64
    if spec.act_dtype == torch.bfloat16:
        if bits == 8:
            return 12 if long_groups else 8
        return 4 if bits in (3, 5) else 8 if bits != 6 and 32 <= layout.group_k < 64 else 6
    if bits in (3, 5, 6):
        return 4 if spec.act_dtype == torch.float16 else 2
    if spec.act_dtype == torch.float16 or bits == 8:
        return 32 if long_groups else 4
    return 3 if long_groups else 2


def _amx_digits_per_weight(spec: LinearSpec, m: int) -> float:
    """Seconds per weight and core of few rows with AMX's VNNI."""
    return AMX_DIGITS + m * (AMX_DIGITS_PER_ROW * _digits_of_x(spec) + AMX_DIGITS_GROUP / packed_weight.layout_of(spec).group_k)


def _amx_per_weight(spec: LinearSpec, m: int) -> float:
    """Seconds per weight and core with AMX, where digits of x are not multiplied."""
    int8 = _compute_rate(spec) == INT8_RATE
    if int8 and m < AMX_MIN_INT8_M:
        return AMX_VECTOR + m * AMX_VECTOR_INT8_PER_ROW
    slow = not int8 and (packed_weight.layout_of(spec).bits == 8 or packed_weight.layout_of(spec).group_k <= 32)
    tiles = (AMX_DEQUANT_SLOW if slow else AMX_DEQUANT) + max(m, AMX_TILE_M) * (AMX_INT8_PER_ROW if int8 else AMX_PER_ROW)
    return min(tiles, AMX_VECTOR + m * AMX_VECTOR_PER_ROW) if not int8 else tiles


def _compute_rate(spec: LinearSpec) -> float:
    """Operations per second of one core with AVX-512, by compute type."""
    bits = packed_weight.layout_of(spec).bits
    codes = packed_weight.multiplies_codes(spec.act)
    if codes and spec.act is not None and spec.act.dtype.kind == "int" and spec.weight.kind == "int" and bits in (4, 8):
        return INT8_RATE
    if spec.act_dtype != torch.bfloat16 and not codes:
        return F32_RATE
    return BF16_OF_8_BITS_RATE if bits == 8 else BF16_RATE
