"""oneDNN's products of 4-bit weights on Intel GPUs, as vllm-xpu-kernels offers them, with 16- and 8-bit inputs.

Layouts are those of the package's C++ (csrc/xpu/onednn/onednn_matmul.cpp) and of its tests: int4 words along K, the first code
in the low bits, as a transposed view; scales and zero points [K / g, N], contiguous.
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
_WORD = 8  # codes in an int32


@functools.cache
def _ops() -> Any:
    importlib.import_module("vllm_xpu_kernels._xpu_C")
    return torch.ops._xpu_C


def _grouped(spec: LinearSpec, columns: int) -> Verdict:
    """Whole groups of a multiple of 32 columns, or one per row; K in multiples of `columns`."""
    size = spec.block[1]
    if spec.block[0] != 1 or spec.ragged or spec.block_offset[1] or spec.scale2_block is not None or spec.k % size:
        return no("groups are not whole, or share scales between rows", "a group size that divides K")
    if spec.k % columns or (size % 32 and size != spec.k):
        return no(f"K of {spec.k} in groups of {size}", f"K in multiples of {columns}, groups of 32, or one group per row")
    return YES


def _words(weight: QuantizedWeight, rows: int) -> Tensor:
    """int32 [rows, K / 8]: eight unsigned codes a word, the first in the low bits; rows of padding stand for 0 or 8."""
    codes = weight.codes[:, : weight.spec.k // 2]
    if weight.spec.weight.signed:
        codes = codes ^ 0x88  # two's complement to code - 8
    return pad(codes, (0, 0, 0, rows - weight.spec.n)).contiguous().view(torch.int32)


class _Int4(Kernel):
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
        """words int32 [N', K / 8], of which the operator gets the transposed view; scale [G, N']; zero int8 [1], the one of a
        symmetric type, or int32 [G, N' / 8], packed along N; perm int32 [K] or empty. N' is a multiple of 8."""
        _ops()
        s = weight.spec
        rows = -(-s.n // _WORD) * _WORD
        extra = (0, rows - s.n)
        if weight.zero is None:
            zero = torch.tensor([8], dtype=torch.int8, device=weight.device)
        else:
            zero = bitstream.pack(pad(weight.zero.t(), extra).contiguous(), 4).view(torch.int32)
        return {
            "words": _words(weight, rows),
            "scale": pad(weight.scale.t(), extra).contiguous(),
            "zero": zero,
            "perm": torch.empty(0, dtype=torch.int32, device=weight.device) if weight.perm is None else weight.perm.clone(),
        }


class XPUwNa16LinearKernel(_Int4):
    """`int4_gemm_w4a16`: symmetric, or with zero points; a column order is applied to x."""

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """uint4b8 or int4, or uint4 with zero points; scales in the input's dtype."""
        if spec.act is not None:
            return no(f"the input is to be quantized ({spec.act}); this kernel is weight-only", "a weight-only scheme")
        if (spec.weight.name, spec.zero) not in (("uint4b8", "none"), ("int4", "none"), ("uint4", "int")):
            return no(f"{spec.weight} with zero {spec.zero!r}", "uint4b8 or int4, or uint4 with zero points")
        if spec.scale_dtype != spec.act_dtype:
            return no(f"scales are {spec.scale_dtype} and would be rounded", f"scales in the input's dtype, {spec.act_dtype}")
        return _grouped(spec, 32)

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        words, scale, zero, perm = packed
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        x = x.index_select(1, perm) if perm.numel() else x
        bias = None if bias is None else pad(bias, (0, words.shape[0] - spec.n))
        y: Tensor = _ops().int4_gemm_w4a16(x, words.t(), bias, scale, zero, spec.block[1], None)
        return y[:, : spec.n].contiguous()

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline at 70 % of both rates."""
        return roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=platform.rates.bf16) / 0.7


class XPUW4A8IntLinearKernel(_Int4):
    """`int4_gemm_w4a8`: symmetric weights, inputs quantized per token to int8.

    The operator takes scales in float16, a token's and the weight's, and gives float16, which is cast: tokens of small numbers
    lose digits and outputs beyond 65504 are infinite. So it is taken only where it is asked for by name. It would take bfloat16
    scales and read them wrongly, since its primitives are kept by shape and not by the scales' dtype.
    """

    exact = False
    quantizes_input = True

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """uint4b8 or int4, 16-bit scales, dynamic symmetric int8 inputs per token."""
        act = spec.act
        if act is None or act.dtype.name != "int8" or not act.dynamic or act.granularity != "token" or not act.symmetric:
            return no(f"input scheme {act or 'of 16 bits'}", "int8 inputs, dynamic per token, symmetric")
        if spec.weight.name not in ("uint4b8", "int4") or spec.zero != "none":
            return no(f"{spec.weight} with zero {spec.zero!r}", "uint4b8 or int4")
        if spec.scale_dtype not in (torch.float16, torch.bfloat16):
            return no(f"scales are {spec.scale_dtype}", "16-bit scales")
        if spec.act_order or spec.n % _WORD:
            return no("columns are in another order, or N is no multiple of 8", "natural order and N in multiples of 8")
        return _grouped(spec, _WORD)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """See `_Int4.pack`; scales in float16. An InputError where one of them is too large for that."""
        if weight.spec.act_dtype == torch.bfloat16:
            log.warning("XPUW4A8IntLinearKernel gives float16, cast to bfloat16: outputs beyond 65504 become infinite")
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
        words, scale, zero, _ = packed
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        codes, x_scale, _none = quantize_input(x, spec.act)
        origin = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
        y: Tensor = _ops().int4_gemm_w4a8(
            codes, x_scale.half(), origin, words.t(), scale, zero, spec.block[1], None, None if bias is None else bias.half()
        )
        return y.to(x.dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline at 70 % of both rates, and six passes over x."""
        quantize = 6 * (3 * m * spec.k / platform.rates.bandwidth + platform.rates.launch)
        return quantize + roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=platform.rates.int8) / 0.7
