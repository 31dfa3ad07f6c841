"""FP8 and MXFP8 on Intel GPUs by oneDNN, through `fp8_gemm` of vllm-xpu-kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.act_quant import quantize_groups, quantize_input
from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.microscaled import MXFP8, MicroscaledKernel, quantize_microscaled
from bitline.kernels.providers.common import installed
from bitline.kernels.providers.xpu import xpu_ops
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_BLOCK = 128


class XPUFP8ScaledMMLinearKernel(Kernel):
    """`fp8_gemm` with float32 scales: activations [M, 1], [1] or [M, K / 128]; weights [N, 1], [1] or [K / 128, N / 128].

    The operator recognizes block scales by an activation scale with several columns, so it would misread a block-scaled layer
    with K of one block; such layers are refused.
    """

    platforms = ("xpu",)
    backend = "xpu"
    families = ("fp8", "fp8_block")
    quantizes_input = True
    act_dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An Intel GPU and the package."""
        return installed(platform, "vllm_xpu_kernels")

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """E4M3 weights and activations: per-channel or per-tensor weight scales with activations per token or tensor; or whole
        128x128 blocks, at least two along K, with activations in groups of 128."""
        act, (rows, columns) = spec.act, spec.block
        if spec.weight.name != "float8_e4m3fn" or spec.zero != "none" or spec.scale2_block is not None:
            return no(f"weight type {spec.weight}", "float8_e4m3fn weights with one level of scales")
        if act is None or act.dtype.name != "float8_e4m3fn" or act.scale != "float" or not act.symmetric:
            return no(f"activation scheme {act or 'none'}", "float8_e4m3fn activations")
        if spec.ragged or spec.scale_dtype.itemsize < 2:
            return no(f"{spec.scale_dtype} scales, or groups of unequal size", "float scales per channel, block or whole weight")
        if act.granularity != "group":
            return YES if spec.grid[1] == 1 else no(f"a scale per {columns} columns", "one scale per channel or whole weight")
        if act.group_size != _BLOCK or (rows, columns) != (_BLOCK, _BLOCK) or not act.dynamic:
            return no(f"scale block {rows}x{columns}, activation scheme {act}", "128x128 blocks and activations in groups of 128")
        if spec.n % _BLOCK or spec.k % _BLOCK or spec.k == _BLOCK or any(spec.block_offset) or spec.act_order:
            return no("partial or unaligned blocks, or act-order", "N and K in multiples of 128, K of at least 256")
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes float8_e4m3fn [N, K], passed as its transposed view; scale float32 [N, 1] or [K / 128, N / 128]; input_scale [1]
        and perm int32 [K], or empty."""
        xpu_ops()
        s = weight.spec
        if s.act is not None and s.act.granularity == "group":
            scale = weight.scale.float().t()
        else:
            row = (torch.arange(s.n, device=weight.device) + s.block_offset[0]) // s.block[0]
            scale = weight.scale.float().index_select(0, row)
        static, device = weight.input_scale, weight.device
        return {
            "codes": weight.codes[:, : s.k].clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn),
            "scale": scale.clone(memory_format=torch.contiguous_format),
            "input_scale": torch.empty(0, device=device) if static is None else static.reshape(1).float(),
            "perm": torch.empty(0, dtype=torch.int32, device=device) if weight.perm is None else weight.perm.clone(),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale, static, perm = packed
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        x = x.index_select(1, perm) if perm.numel() else x
        if spec.act.granularity == "group":
            a, a_scale, _none = quantize_groups(x, spec.act)
        else:
            a, a_scale, _none = quantize_input(x, spec.act, static if static.numel() else None)
        y: Tensor = xpu_ops().fp8_gemm(a, codes.t(), x.dtype, a_scale.contiguous(), scale, bias)
        return y

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline at 70 % of peak, and six passes over x."""
        quantize = 6 * (3 * m * spec.k / platform.rates.bandwidth + platform.rates.launch)
        return quantize + roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=platform.rates.of("fp8")) / 0.7


class XPUMxFp8LinearKernel(MicroscaledKernel):
    """MXFP8 by `fp8_gemm`: the weight [K, N] as a transposed view, E8M0 scales [K / 32, N]."""

    platforms = ("xpu",)
    backend = "xpu"
    families = ("mxfp8",)
    takes_quantized_input = False
    fmt = MXFP8
    pad_n, pad_k = 1, 32

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An Intel GPU and the package."""
        return installed(platform, "vllm_xpu_kernels")

    @classmethod
    def _pack_operand(cls, codes: Tensor, scale: Tensor) -> Packed:
        xpu_ops()
        return {
            "codes": codes.contiguous().view(torch.float8_e4m3fn),
            "scale": scale.t().contiguous().view(torch.float8_e8m0fnu),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale, _alpha, _global_scale = packed
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        a, a_scale = quantize_microscaled(pad(x, (0, codes.shape[1] - spec.k)), MXFP8)
        y: Tensor = xpu_ops().fp8_gemm(a, codes.t(), x.dtype, a_scale.view(torch.float8_e8m0fnu), scale, bias)
        return y
