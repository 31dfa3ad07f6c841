"""Block-scaled FP8 on Hopper by `torch._scaled_mm` (cuBLASLt): 128x128 weight blocks, activations in groups of 128."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.triton.act_quant import quantize_groups_padded
from bitline.platform import Platform
from bitline.quantized_input import pad_codes
from bitline.types import YES, ActSpec, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_BLOCK = 128


class BlockWiseTorchFP8ScaledMMLinearKernel(Kernel):
    """cuBLASLt's 1x128 by 128x128 scaled GEMM. N and K may end inside a block; they are padded."""

    platforms = ("cuda",)
    backend = "torch"
    families = ("fp8_block",)
    quantizes_input = True
    takes_quantized_input = True
    measured: ClassVar[tuple[str, ...]] = ("sm90",)
    act_dtypes = (torch.bfloat16,)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Hopper, the only architecture on which cuBLASLt takes these scales."""
        if platform.capability != 90:
            return no(f"cuBLASLt takes 1x128 and 128x128 scales only on Hopper, this is {platform.arch}", "cuda:sm90")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """float8_e4m3fn in 128x128 blocks with activations in groups of 128, scales of any float dtype."""
        act = spec.act
        if spec.weight.name != "float8_e4m3fn":
            return no(f"weight type {spec.weight}", "float8_e4m3fn weights")
        if act is None or act.dtype.name != "float8_e4m3fn" or act.group_size != _BLOCK or act.scale != "float":
            return no(f"activation scheme {act or 'none'}", "float8_e4m3fn activations in groups of 128")
        rows, columns = spec.block
        blocks = rows in (_BLOCK, spec.n) and columns in (_BLOCK, spec.k) and max(rows, columns) <= _BLOCK
        if not blocks or spec.ragged or spec.act_order or spec.zero != "none" or spec.scale2_block is not None:
            return no(f"scale block {rows}x{columns}", "scale block 128x128")
        if spec.block_offset[1]:
            return no("a shard along K that starts inside a block", f"shards along K of a multiple of {_BLOCK} columns")
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes float8_e4m3fn [N', K'] in whole blocks, starting with the first row's block; scale float32 [N' / 128, K' / 128].

        K' is a multiple of 512: torch 2.11 reads wrong scales where the number of blocks along K is not a multiple of 4.
        """
        s = weight.spec
        top = s.block_offset[0]
        n, k = -(-(s.n + top) // _BLOCK) * _BLOCK, -(-s.k // (4 * _BLOCK)) * 4 * _BLOCK
        codes = torch.zeros(n, k, dtype=torch.uint8, device=weight.device)
        codes[top : top + s.n, : s.k] = weight.codes
        scale = weight.scales()
        return {
            "codes": codes.view(torch.float8_e4m3fn),
            "scale": pad(scale, (0, k // _BLOCK - scale.shape[1]), value=1.0),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        m = x.shape[0]
        if m == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        return cls._multiply(*quantize_for_blocks(x, spec.act, packed[0].shape[1]), m, packed, bias, spec)

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See Kernel.apply_quantized."""
        m, k = codes.shape[0], packed[0].shape[1]
        rows, groups = m + -m % 4, k // _BLOCK
        a_scale = pad(scales, (0, groups - scales.shape[1], 0, rows - m), value=1.0)
        return cls._multiply(pad_codes(codes, rows, k), a_scale.t().contiguous().t(), m, packed, bias, spec)

    @classmethod
    def _multiply(
        cls, a: Tensor, a_scale: Tensor, m: int, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """Codes and scales as `quantize_for_blocks` gives them times the packed weight: [M, N]."""
        codes, scale = packed
        dtype = spec.act_dtype if bias is None else torch.float32  # a bias is added before the one rounding
        y = torch._scaled_mm(a, codes.t(), a_scale, scale.t(), out_dtype=dtype)
        y = y[:m, spec.block_offset[0] : spec.block_offset[0] + spec.n]
        return y.contiguous() if bias is None else (y + bias).to(spec.act_dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A pass over x, and a GEMM at 75 % of peak with two launches of overhead, as measured on an H200."""
        rates = platform.rates
        quantize = 3 * m * spec.k / rates.bandwidth + rates.launch
        gemm = roofline(spec, platform, max(m, 4), weight_bytes=spec.n * spec.k, rate=0.75 * rates.of("fp8"))
        return quantize + gemm + 2 * rates.launch


def quantize_for_blocks(x: Tensor, act: ActSpec, k_padded: int) -> tuple[Tensor, Tensor]:
    """x [M, K] to codes [M', k_padded], zero-padded, and M-major scales [M', k_padded / 128].

    M' is a multiple of 4: cuBLASLt requires it, and DeepGEMM's TMA needs scale columns aligned to 16 bytes.
    """
    return quantize_groups_padded(x, act, x.shape[0] + -x.shape[0] % 4, k_padded, m_major_scales=True)
