"""zentorch's ZenDNN operators for AMD Zen CPUs with AVX-512 (Zen 4 and later): W4A16 and W8A8."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline import env
from bitline.errors import InputError
from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.cpu import costs as cpu_costs
from bitline.kernels.integers import channel_scales, fits_int8, int8_codes, per_channel_only
from bitline.kernels.providers.common import installed
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight


@functools.cache
def _ops() -> Any:
    """The operators, with their weight cache off (`ZENDNNL_CACHE_OFF`).

    The cache is keyed by address alone, so a weight in memory that another one was freed from would give that one's outputs
    (zentorch 2.13.0.1). InputError where zentorch has been imported with it on, or the variable is set to something else than 1.
    """
    already_imported = "zentorch" in sys.modules
    before = env.set_default("ZENDNNL_CACHE_OFF", "1")
    if before != "1" and (already_imported or before is not None):
        raise InputError("zentorch keeps weights by address and may give the outputs of others", found="its cache is on",
                         fix="set ZENDNNL_CACHE_OFF=1 before zentorch is imported")  # fmt: skip
    importlib.import_module("zentorch")
    return torch.ops.zentorch


def _supported(platform: Platform) -> Verdict:
    found = installed(platform, "zentorch")
    if found and "zen" not in platform.features:
        return no("zentorch is for AMD Zen CPUs", "cpu:avx512,zen")
    if found and "avx512" not in platform.features:  # zentorch 2.13 dies with SIGILL on Zen 3 and older
        return no("zentorch has code for AVX-512 only, which this CPU lacks", "cpu:avx512,zen")
    return found


class ZentorchWNA16LinearKernel(Kernel):
    """W4A16 by `zentorch_woq_linear`: symmetric or asymmetric 4-bit weights, bfloat16 scales and inputs.

    CPUWNA16LinearKernel takes what it refuses: act-order, groups that do not divide K, other widths and dtypes.
    """

    platforms = ("cpu",)
    backend = "zentorch"
    families = ("mp",)
    act_dtypes = (torch.bfloat16,)
    measured = ("zen",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An AMD Zen CPU with AVX-512, and the package."""
        return _supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """uint4b8, or uint4 with zero points; aligned groups or per-channel scales; bfloat16 scales."""
        if spec.act is not None:
            return no(f"the scheme quantizes activations ({spec.act}); this kernel is weight-only", "a weight-only scheme")
        if (spec.weight.name, spec.zero) not in (("uint4b8", "none"), ("uint4", "int")):
            return no(f"{spec.weight} with zero {spec.zero!r}", "uint4b8, or uint4 with zero points")
        if spec.scale_dtype != torch.bfloat16:
            return no(f"scales are {spec.scale_dtype} and would be rounded", "bfloat16 scales")
        if spec.act_order or spec.ragged:
            return no("act-order: columns are in another order than the input's", "CPUWNA16LinearKernel, which takes any order")
        if spec.block[0] != 1 or spec.k % spec.block[1] or spec.block_offset[1] or spec.scale2_block is not None:
            return no("groups that are unaligned, or share scales between rows", "a group size that divides K")
        if spec.k % 8 or spec.block[1] % 8:
            return no("K or the group size is not a multiple of 8", "K and a group size in multiples of 8")
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int32 [N, K / 8] as the package packs them, scale bfloat16 [groups, N], zero int8 [groups, N] or empty."""
        values = weight.unpacked().view(torch.int8)
        if weight.zero is None:
            values = values - 8  # signed codes; with zero points the package takes unsigned ones
        zero = torch.empty(0, dtype=torch.int8) if weight.zero is None else weight.zero.view(torch.int8).t().contiguous()
        return {
            "codes": _ops().zentorch_woq_repack_weight(values.contiguous()),
            "scale": weight.scale.t().contiguous(),
            "zero": zero,
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale, zero = packed
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        y: Tensor = _ops().zentorch_woq_linear(x, codes.t(), scale, zero if zero.numel() else None, bias)
        return y

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """2.2 times a roofline, as measured on two cores of a Zen 5 at 4096x4096: 645 us at M=1 (it repacks the weight in each
        call), 8.7 ms at M=256."""
        return 2.2 * roofline(spec, platform, m, weight_bytes=cls.packed_bytes(spec), rate=platform.rates.bf16) + cpu_costs.CALL


class ZentorchInt8ScaledMMLinearKernel(Kernel):
    """W8A8 by `zentorch_dynamic_qlinear`, which quantizes activations per token itself.

    Inexact, so it runs only where it is asked for by name: it divides a token's amax by 127, compressed-tensors by 127.5, so
    outputs differ by more than rounding.
    """

    platforms = ("cpu",)
    backend = "zentorch"
    families = ("int8",)
    quantizes_input = True
    exact = False
    act_dtypes = (torch.bfloat16, torch.float32)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An AMD Zen CPU with AVX-512, and the package."""
        return _supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """W8A8: per-channel scales, dynamic symmetric activations per token."""
        act = spec.act
        if act is None or act.dtype.name != "int8" or not act.dynamic or act.granularity != "token" or not act.symmetric:
            return no(f"activation scheme {act or 'none'}", "int8 activations, dynamic per token, symmetric")
        if act.limit:
            return no("the activation scale has an upper bound", "an unbounded dynamic scale")
        if not fits_int8(spec):
            return no(f"{spec.weight} codes are not integers of -128..127 times a step", "a signed or biased integer type")
        return per_channel_only(spec)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int8 [N, K], scale bfloat16 [N], the only dtype that the operator takes."""
        _ops()
        return {"codes": int8_codes(weight), "scale": channel_scales(weight).bfloat16()}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        y: Tensor = _ops().zentorch_dynamic_qlinear(x, packed[0], packed[1], bias)
        return y

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline at 80 % of peak."""
        return roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=platform.rates.int8) / 0.8 + cpu_costs.CALL
