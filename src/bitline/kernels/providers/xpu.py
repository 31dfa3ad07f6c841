"""W4A16 and W4A8 on Intel GPUs by oneDNN, through the operators of vllm-xpu-kernels.

Layouts are those of the package's C++ (csrc/xpu/onednn/onednn_matmul.cpp) and of its tests: int4 packed into int32 along K, the
first code in the low bits, passed as a transposed view; scales and zero points [K / group, N], contiguous.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline import bitstream
from bitline.act_quant import quantize_input
from bitline.errors import InputError
from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.providers.common import installed
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

log = logging.getLogger("bitline")
_CODES_PER_INT32 = 8


@functools.cache
def xpu_ops() -> Any:
    """The package's operators."""
    importlib.import_module("vllm_xpu_kernels._xpu_C")
    return torch.ops._xpu_C


def _takes_groups(spec: LinearSpec, multiple: int) -> Verdict:
    """Aligned groups of a multiple of 32 columns, or per-channel scales; K a multiple of `multiple`."""
    size = spec.block[1]
    if spec.block[0] != 1 or spec.ragged or spec.block_offset[1] or spec.scale2_block is not None or spec.k % size:
        return no("groups that are unaligned, or share scales between rows", "a group size that divides K")
    if spec.k % multiple or (size % 32 and size != spec.k):
        return no(f"K of {spec.k} in groups of {size}",
                  f"K in multiples of {multiple}, groups of 32, or one scale per channel")  # fmt: skip
    return YES


def _packed_int32(weight: QuantizedWeight, rows: int) -> Tensor:
    """int32 [rows, K / 8] of unsigned codes, the first in the low bits; padding rows hold zeros."""
    codes = weight.codes[:, : weight.spec.k // 2]
    if weight.spec.weight.signed:
        codes = codes ^ 0x88  # two's complement to value + 8
    return pad(codes, (0, 0, 0, rows - weight.spec.n)).contiguous().view(torch.int32)


class _XpuInt4Kernel(Kernel):
    platforms = ("xpu",)
    backend = "xpu"
    families = ("mp",)
    act_dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An Intel GPU and the package."""
        return installed(platform, "vllm_xpu_kernels")

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int32 [N', K / 8], passed as its transposed view; scale [groups, N']; zero int8 [1] for symmetric types, else
        int32 [groups, N' / 8] packed along N; perm int32 [K] or empty. N' is a multiple of 8."""
        xpu_ops()
        s = weight.spec
        rows = -(-s.n // _CODES_PER_INT32) * _CODES_PER_INT32
        extra = (0, rows - s.n)
        if weight.zero is None:
            zero = torch.tensor([8], dtype=torch.int8, device=weight.device)
        else:
            zero = bitstream.pack(pad(weight.zero.t(), extra).contiguous(), 4).view(torch.int32)
        return {
            "codes": _packed_int32(weight, rows),
            "scale": pad(weight.scale.t(), extra).contiguous(),
            "zero": zero,
            "perm": torch.empty(0, dtype=torch.int32, device=weight.device) if weight.perm is None else weight.perm.clone(),
        }


class XPUwNa16LinearKernel(_XpuInt4Kernel):
    """W4A16 by `int4_gemm_w4a16`, symmetric or with zero points; act-order permutes x."""

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """uint4b8 or int4, or uint4 with zero points; scales in the input's dtype."""
        if spec.act is not None:
            return no(f"the scheme quantizes activations ({spec.act}); this kernel is weight-only", "a weight-only scheme")
        if (spec.weight.name, spec.zero) not in (("uint4b8", "none"), ("int4", "none"), ("uint4", "int")):
            return no(f"{spec.weight} with zero {spec.zero!r}", "uint4b8 or int4, or uint4 with zero points")
        if spec.scale_dtype != spec.act_dtype:
            return no(f"scales are {spec.scale_dtype} and would be rounded", f"scales in the input's dtype, {spec.act_dtype}")
        return _takes_groups(spec, 32)

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale, zero, perm = packed
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        x = x.index_select(1, perm) if perm.numel() else x
        bias = None if bias is None else pad(bias, (0, codes.shape[0] - spec.n))
        y: Tensor = xpu_ops().int4_gemm_w4a16(x, codes.t(), bias, scale, zero, spec.block[1], None)
        return y[:, : spec.n].contiguous()

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline at 70 % of peak."""
        return roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=platform.rates.bf16) / 0.7


class XPUW4A8IntLinearKernel(_XpuInt4Kernel):
    """W4A8 by `int4_gemm_w4a8`: symmetric weights, activations quantized per token to int8.

    Inexact, so it runs only where it is asked for by name: the operator takes activation and weight scales in float16 and returns
    float16, so tokens of small magnitude lose precision and outputs beyond 65504 overflow. bfloat16 scales are not passed, since
    its oneDNN primitive cache is keyed by shape and not by scale dtype and would misread them.
    """

    exact = False
    quantizes_input = True

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """uint4b8 or int4, 16-bit scales, dynamic symmetric int8 activations per token."""
        act = spec.act
        if act is None or act.dtype.name != "int8" or not act.dynamic or act.granularity != "token" or not act.symmetric:
            return no(f"activation scheme {act or 'none'}", "int8 activations, dynamic per token, symmetric")
        if spec.weight.name not in ("uint4b8", "int4") or spec.zero != "none":
            return no(f"{spec.weight} with zero {spec.zero!r}", "uint4b8 or int4")
        if spec.scale_dtype not in (torch.float16, torch.bfloat16):
            return no(f"scales are {spec.scale_dtype}", "16-bit scales")
        if spec.act_order or spec.n % _CODES_PER_INT32:
            return no("act-order, or N is not a multiple of 8", "natural column order and N in multiples of 8")
        return _takes_groups(spec, _CODES_PER_INT32)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """See `_XpuInt4Kernel.pack`; scales in float16. An InputError where one of them overflows it."""
        if weight.spec.act_dtype == torch.bfloat16:
            log.warning("XPUW4A8IntLinearKernel computes float16, cast to bfloat16: outputs beyond 65504 become infinite")
        packed = super().pack(weight)
        half = packed["scale"].half()
        if bool((half.isinf() & packed["scale"].isfinite()).any()):
            raise InputError("a scale is too large for this kernel's float16", tensor="scale",
                             found=float(packed["scale"].abs().max()), expected="at most 65504",
                             fix="another kernel, or bitline's own choice")  # fmt: skip
        return {**packed, "scale": half}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale, zero, _perm = packed
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        q, x_scale, _none = quantize_input(x, spec.act)
        x_zero = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
        y: Tensor = xpu_ops().int4_gemm_w4a8(
            q, x_scale.half(), x_zero, codes.t(), scale, zero, spec.block[1], None, None if bias is None else bias.half()
        )
        return y.to(x.dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline at 70 % of peak, and six passes over x."""
        quantize = 6 * (3 * m * spec.k / platform.rates.bandwidth + platform.rates.launch)
        return quantize + roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=platform.rates.int8) / 0.7
