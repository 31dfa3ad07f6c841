"""AITER's W8A8 GEMM (Composable Kernel) on AMD's Instinct GPUs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.integers import channel_scales, fits_int8, int8_codes, per_channel_only
from bitline.kernels.providers.common import installed
from bitline.kernels.triton.act_quant import quantize_padded
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")


@functools.cache
def _gemm_a8w8() -> Any:
    found = getattr(importlib.import_module("aiter"), "gemm_a8w8_CK", None)
    if found is None:
        raise InputError("the package aiter is not AMD's", found="no gemm_a8w8_CK in it", fix="pip install amd-aiter")
    return found


class AiterInt8ScaledMMLinearKernel(Kernel):
    """W8A8 by `aiter.gemm_a8w8_CK`: symmetric int8 activations per tensor or token.

    The operator gets a scale per token and per output channel; per-tensor scales are expanded.
    """

    platforms = ("rocm",)
    backend = "aiter"
    families = ("int8",)
    priority = 5
    quantizes_input = True
    act_dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """gfx90a, gfx942 and gfx950, and the package."""
        if platform.arch not in _ARCHITECTURES:
            return no(f"AITER's int8 kernels are for {', '.join(_ARCHITECTURES)}; this is {platform.arch or platform.vendor}",
                      "rocm:gfx942")  # fmt: skip
        return installed(platform, "aiter")

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Symmetric W8A8, a scale per channel or for the whole weight; N and K multiples of 16."""
        act = spec.act
        if act is None or act.dtype.name != "int8" or act.granularity == "group" or not act.symmetric:
            return no(f"activation scheme {act or 'none'}", "symmetric int8 activations per tensor or token")
        if not fits_int8(spec):
            return no(f"{spec.weight} codes are not integers of -128..127 times a step", "a signed or biased integer type")
        if spec.k % 16 or spec.n % 16:
            return no(f"N or K of [{spec.n}, {spec.k}] is not a multiple of 16", "N and K in multiples of 16")
        return per_channel_only(spec)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int8 [N, K], scale float32 [N, 1], input_scale [1, 1] or empty."""
        _gemm_a8w8()
        static = weight.input_scale
        return {
            "codes": int8_codes(weight),
            "scale": channel_scales(weight).view(-1, 1),
            "input_scale": torch.empty(0, device=weight.device) if static is None else static.float().view(1, 1),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale, input_scale = packed
        m = x.shape[0]
        if m == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        q, x_scale, _zero = quantize_padded(x, spec.act, m, x.shape[1], input_scale)
        y: Tensor = _gemm_a8w8()(q, codes, x_scale.view(-1, 1).expand(m, 1).contiguous(), scale, None, x.dtype)
        return y if bias is None else y + bias

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A pass over x, and a roofline at 70 % of peak."""
        quantize = 3 * m * spec.k / platform.rates.bandwidth + platform.rates.launch
        return quantize + roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=platform.rates.int8) / 0.7
