"""Block-scaled FP8 on torch's own scaled product: 128x128 weight blocks, inputs in groups of 128, on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.triton.act_quant import groups_of
from bitline.platform import Platform
from bitline.types import YES, ActSpec, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_BLOCK = 128


class BlockWiseTorchFP8ScaledMMLinearKernel(Kernel):
    """`torch._scaled_mm` with 1x128 and 128x128 scales (cuBLASLt). K and N may end inside a block: they are padded."""

    platforms = ("cuda",)
    backend = "torch"
    families = ("fp8_block",)
    quantizes_input = True
    measured: ClassVar[tuple[str, ...]] = ("sm90",)
    act_dtypes = (torch.bfloat16,)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """cuBLASLt has these scales on Hopper alone."""
        if platform.capability != 90:
            return no(f"cuBLASLt takes 1x128 and 128x128 scales on Hopper alone, this is {platform.arch}", "cuda:sm90")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """float8_e4m3fn in blocks of 128x128 and inputs in groups of 128, scales of any float dtype."""
        act = spec.act
        if spec.weight.name != "float8_e4m3fn":
            return no(f"weight type {spec.weight}", "float8_e4m3fn weights")
        if act is None or act.dtype.name != "float8_e4m3fn" or act.group_size != _BLOCK or act.scale != "float":
            return no(f"input scheme {act or 'of 16 bits'}", "float8_e4m3fn inputs in groups of 128")
        rows, columns = spec.block
        whole = rows in (_BLOCK, spec.n) and columns in (_BLOCK, spec.k) and max(rows, columns) <= _BLOCK
        if not whole or spec.ragged or spec.act_order or spec.zero != "none" or spec.scale2_block is not None:
            return no(f"a scale for {rows}x{columns} weights", "a scale for 128x128 weights")
        if spec.block_offset[1]:
            return no("a cut along K inside a block", f"a cut after a multiple of {_BLOCK} columns")
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes float8_e4m3fn [N', K'], in whole blocks that start with the first row's; scale float32 [N'/128, K'/128].

        K' is a multiple of 512: with torch 2.11 the product reads wrong scales where K has no multiple of four blocks.
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
        codes, scale = packed
        m, k = x.shape[0], codes.shape[1]
        if m == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        a, a_scale = quantize_rows(x, spec.act, k)
        dtype = x.dtype if bias is None else torch.float32  # a bias is added before the one rounding
        y = torch._scaled_mm(a, codes.t(), a_scale, scale.t(), out_dtype=dtype)
        y = y[:m, spec.block_offset[0] : spec.block_offset[0] + spec.n]
        return y.contiguous() if bias is None else (y + bias).to(x.dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A pass over x, and a product at 75 % of its rate that takes two launches more to begin, as measured on an H200."""
        rates = platform.rates
        quantize = 3 * m * spec.k / rates.bandwidth + rates.launch
        product = roofline(spec, platform, max(m, 4), weight_bytes=spec.n * spec.k, rate=0.75 * rates.of("fp8"))
        return quantize + product + 2 * rates.launch


def quantize_rows(x: Tensor, act: ActSpec, columns: int) -> tuple[Tensor, Tensor]:
    """x [M, K] to codes [M', columns] with zeros beyond M and K, and scales [M', columns / 128], one column after another.

    M' is a multiple of 4: cuBLASLt wants such M, DeepGEMM columns of scales that start at multiples of 16 bytes.
    """
    return groups_of(x, act, x.shape[0] + -x.shape[0] % 4, columns, scales_by_group=True)
