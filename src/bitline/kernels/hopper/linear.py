"""GluonHopperLinearKernel: weight-only linear on an H100 or H200, one packed layout for all M."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.expert_gate import ExpertGate
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.hopper import experts, layout
from bitline.kernels.hopper.eager import EagerLinear
from bitline.kernels.hopper.launch import SMALL_M, run
from bitline.kernels.hopper.runtime import prepare
from bitline.kernels.hopper.scheme import DequantScheme, dequant_scheme
from bitline.kernels.providers.common import installed
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight


class GluonHopperLinearKernel(Kernel):
    """4- and 8-bit integers, E2M1 and E4M3 weights with 16-bit inputs: bandwidth-bound kernels up to M = 16, wgmma above.

    At M <= 16, scales of 64 columns and more multiply float32 accumulators. Finer ones, and all scales at M > 16, multiply the
    weight, which is rounded to the input's dtype as torch's dequantized weight is.
    """

    platforms = ("cuda",)
    backend = "gluon"
    priority = 20
    measured = ("sm90",)
    act_dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Hopper (sm90), and a Triton whose Gluon the device code has run with."""
        if platform.vendor != "cuda" or platform.capability != 90:
            return no(
                f"the device code is for sm90's wgmma and TMA; this is {platform.arch or platform.vendor}", "an H100 or H200"
            )
        if platform.interpreted:
            return no("Triton's interpreter cannot run Gluon")
        there = installed(platform, "triton")
        return _triton_version() if there else there

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Weight-only; scale blocks of any multiple of 16 columns, aligned or not, or per-channel, block and tensor scales."""
        found = dequant_scheme(spec)
        return found if isinstance(found, Verdict) else YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """weight: packed int32 (`layout`); scale, zero: tables [N/16, scale blocks, 8, 2]; alpha: float32 [1], or [3] (see
        `_fold_fragment_exponent`); perm: int32 [K]. What a layer lacks is empty."""
        spec, scheme = weight.spec, _scheme_of(weight.spec)
        if weight.device.type == "cuda":
            prepare()
        row = (torch.arange(spec.n, device=weight.device) + spec.block_offset[0]) // spec.block[0]
        absent = torch.empty(0, device=weight.device)
        has_global_scale = spec.scale2_block == (spec.n, spec.k)  # super-block scales are multiplied into the scales
        scale = weight.scale if has_global_scale or weight.scale2 is None else weight.scales()
        alpha = torch.ones(1, device=weight.device)
        if has_global_scale and weight.scale2 is not None:
            alpha = weight.scale2.reshape(1).double()
        if scheme.scale_exponent_bias:
            scale, alpha = _fold_scale_exponent(scale, alpha, scheme.scale_exponent_bias)
        scale = scale.to(torch.float32 if scheme.fp32_scales else spec.act_dtype)
        if scheme.code_format.startswith("e4m3"):
            scale, row = _nan_rows(scale, row, weight)
        if scheme.fragment_exponent_bias:
            alpha = _fold_fragment_exponent(scale, alpha, scheme.fragment_exponent_bias)
        elif not scheme.global_scale:
            alpha = absent
        per_scale = functools.partial(_per_packed_scale, spec=spec, scheme=scheme)
        return {
            "weight": _pack_weight(weight, scheme),
            "scale": layout.scale_table(per_scale(scale), row),
            "zero": absent if weight.zero is None else layout.scale_table(per_scale(weight.zero), row),
            "alpha": alpha.float(),
            "perm": absent.int() if weight.perm is None else weight.perm,
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        return run(x, packed, bias, spec)

    @classmethod
    def fuses_experts(cls, spec: LinearSpec, platform: Platform) -> bool:
        """See `experts.fuses_experts`."""
        return experts.fuses_experts(spec)

    @classmethod
    def apply_experts(
        cls, x: Tensor, index: Tensor, weights: Tensor, up: Sequence[Tensor], up_bias: Tensor | None, down: Sequence[Tensor],
        down_bias: Tensor | None, up_spec: LinearSpec, down_spec: LinearSpec, gate: ExpertGate,
    ) -> Tensor:  # fmt: skip
        """See Kernel.apply_experts: each expert's result is rounded to act_dtype."""
        return experts.run_experts(x, index, weights, up, up_bias, down, down_bias, up_spec, down_spec, gate)

    @classmethod
    def eager(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> EagerLinear | None:
        """See Kernel.eager."""
        eager = EagerLinear(packed, bias, spec) if packed[0].is_cuda else None
        return eager if eager and eager.empty else None

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline with efficiencies measured on an H200."""
        rates = platform.rates
        size = cls.packed_bytes(spec) + m * (spec.n + spec.k) * 2
        flops = 2.0 * m * spec.n * spec.k
        efficiency = 0.9 if m <= SMALL_M else 0.65 if m <= 128 else 0.9 if m <= 512 else 1.0
        return max(size / (0.9 * rates.bandwidth), flops / (efficiency * rates.bf16)) + rates.launch

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed tensors."""
        scheme = dequant_scheme(spec)
        if isinstance(scheme, Verdict):
            return spec.weight_bytes()
        n16_tiles, columns = layout.padded_shape(spec.n, spec.k)
        rows = n16_tiles * layout.BLOCK_N
        entry = (4 if scheme.fp32_scales else 2) + (1 if spec.zero == "int" else 0)
        alpha = 12 if scheme.fragment_exponent_bias else 4 if scheme.global_scale else 0
        perm = 4 * spec.k if spec.act_order else 0
        return rows * columns * scheme.bits // 8 + rows * scheme.scales_per_row * entry + alpha + perm


def _scheme_of(spec: LinearSpec) -> DequantScheme:
    found = dequant_scheme(spec)
    if isinstance(found, Verdict):
        raise ValueError(f"{spec}: {found.reason}")
    return found


TRITON_VERSIONS = ("3.6", "3.7")  # Gluon is experimental, so only versions that the device code has run with


@functools.cache
def _triton_version() -> Verdict:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return YES  # asked about a platform that is not this machine
    if ".".join(version.split(".")[:2]) not in TRITON_VERSIONS:
        reason = f"the device code has run with Triton {' and '.join(TRITON_VERSIONS)} alone; this is Triton {version}"
        return no(reason, f"pip install triton=={TRITON_VERSIONS[-1]}.*")
    return YES


def _pack_weight(weight: QuantizedWeight, scheme: DequantScheme) -> Tensor:
    """Codes in the packed layout, bits in the order that dequantization needs."""
    packed = layout.pack_codes(weight.codes, scheme.bits, weight.spec.k, scheme.xor_mask)
    if scheme.code_format.startswith("e4m3") and scheme.fp16:
        return layout.byte_pairs(packed)
    if scheme.code_format.startswith("e"):
        return layout.spread_float_bits(packed, scheme.bits, scheme.fp16)
    return packed


def _per_packed_scale(table: Tensor, spec: LinearSpec, scheme: DequantScheme) -> Tensor:
    """[rows, scale blocks] to [rows, packed scales], zero-padded: a scale block that is long or unaligned takes several."""
    columns, (block_k, offset) = scheme.columns_per_scale, (spec.block[1], spec.block_offset[1])
    if columns and (offset or columns != block_k):
        block = (torch.arange(0, spec.k, columns, device=table.device) + offset) // block_k
        raw = table.view(torch.uint8) if table.dtype.itemsize == 1 else table
        table = raw.index_select(1, block).view(table.dtype)
    return torch.nn.functional.pad(table, (0, scheme.scales_per_row - table.shape[1]))


def _max_finite(scale: Tensor) -> float:
    finite = scale[scale.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _fold_scale_exponent(scale: Tensor, alpha: Tensor, bias: int) -> tuple[Tensor, Tensor]:
    """Scales times 2**bias, divided by the power of two below the largest, which alpha takes: no scale leaves the range."""
    exact = scale.to(torch.float32).double()  # E8M0 converts to float32 only
    largest = _max_finite(exact)
    exponent = math.frexp(largest)[1] - 1 if largest else 0
    return (exact * 2.0 ** (bias - exponent)).float(), alpha.double() * 2.0**exponent


def _fold_fragment_exponent(scale: Tensor, alpha: Tensor, bias: int) -> Tensor:
    """[alpha, 2**F, alpha * 2**(bias - F)]: the wgmma kernel multiplies scales by 2**F and accumulators by the last.

    F is the largest for which every scale times 2**F is below 2**127, at most 127. bias: `ptx.fragment_exponent_bias`.
    """
    largest = _max_finite(scale)
    exponent = math.frexp(largest)[1]
    if exponent > 121:
        what = f"a scale of {largest:.3g}: GluonHopperLinearKernel takes scales below 2**121"
        raise InputError(f"{what}. Look at the checkpoint, or ask for another kernel, such as kernel='TritonW4A16LinearKernel'.")
    power = 127 - max(0, exponent)
    return torch.cat((alpha.double(), alpha.new_tensor([2.0**power]).double(), alpha.double() * 2.0 ** (bias - power))).float()


def _nan_rows(scale: Tensor, row: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """E4M3's NaN code is dequantized to 480: the scale of a row that has one becomes NaN, and with it the row's outputs."""
    codes: Any = weight.codes[:, : weight.spec.k]
    bad = torch.cat([((part & 0x7F) == 0x7F).any(1) for part in codes.split(4096)])
    if not bool(bad.any()):
        return scale, row
    scale = scale.index_select(0, row).clone()
    scale[bad] = float("nan")
    return scale, torch.arange(weight.spec.n, device=row.device)
