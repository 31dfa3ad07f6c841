"""Products of micro-scaled codes, as Blackwell's tensor cores and the packages over them take both of their factors.

NVFP4 (E2M1, E4M3 scales of 16 columns under a global one), MXFP4 and MXFP8 (E8M0 scales of 32). The input is quantized here,
by the definition of `bitline.act_quant`; a kernel supplies the product alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.act_quant import exact_div, mx_exponent, round_to
from bitline.kernels.base import Kernel, Packed, roofline
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

E2M1_MAX, E4M3_MAX = 6.0, 448.0


@dataclass(frozen=True)
class Micro:
    """One of the formats: its family, weight type, columns of a scale and the scales' dtype."""

    family: str
    weight: str
    columns: int
    scale: torch.dtype

    @property
    def rule(self) -> str:
        """The name of the scales' kind in an ActSpec."""
        return "e4m3" if self.scale == torch.float8_e4m3fn else "e8m0"

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 2 if self.weight == "float4_e2m1" else 1


NVFP4 = Micro("nvfp4", "float4_e2m1", 16, torch.float8_e4m3fn)
MXFP4 = Micro("mxfp4", "float4_e2m1", 32, torch.float8_e8m0fnu)
MXFP8 = Micro("mxfp8", "float8_e4m3fn", 32, torch.float8_e8m0fnu)


def is_micro(spec: LinearSpec, micro: Micro) -> Verdict:
    """Weights and inputs of the format, whole scales from column 0."""
    act = spec.act
    if spec.weight.name != micro.weight or spec.scale_dtype != micro.scale or spec.zero != "none":
        return no(f"{spec.weight} with {spec.scale_dtype} scales", f"{micro.weight} with {micro.scale} scales")
    if act is None:
        return no("the input keeps 16 bits; this kernel multiplies codes", f"a scheme with {micro.family} inputs")
    same = (act.dtype.name, act.granularity, act.group_size, act.scale) == (micro.weight, "group", micro.columns, micro.rule)
    if not same or not act.dynamic or not act.symmetric or act.limit:
        return no(f"input scheme {act}", f"dynamic {micro.weight} inputs in groups of {micro.columns}, {micro.rule} scales")
    if spec.block != (1, min(micro.columns, spec.k)) or spec.block_offset[1] or spec.ragged or spec.act_order:
        return no(f"a scale for {spec.block[0]}x{spec.block[1]} weights, or groups out of order",
                  f"a scale for {micro.columns} columns of a row")  # fmt: skip
    if spec.scale2_block not in (None, (spec.n, spec.k)):
        return no("several global scales", "one global scale")
    return YES


def swizzle(scales: Tensor) -> Tensor:
    """One-byte scales [R, C] in the order of the tensor cores' 128x4 tiles, padded with zeros to [R', C'], R' a multiple of
    128 and C' of 4: a tile's rows r, r + 32, r + 64 and r + 96 lie behind each other, four columns each.

    Source: CUDA's documentation of cuBLASLt, 1D block scaling factors layout.
    """
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    padded = pad(scales.view(torch.uint8), (0, columns - scales.shape[1], 0, rows - scales.shape[0]))
    tiles = padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)


def encode_e2m1(values: Tensor) -> Tensor:
    """Float32 values that E2M1 has, [..., K], K even, to its codes, two a byte, the first in the low bits: uint8 [..., K/2]."""
    table = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8, device=values.device)
    codes = table[(values.abs() * 2).long()] | (values.signbit().to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def quantize_micro(x: Tensor, micro: Micro, top: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K], K in whole groups, to (codes [M, K / per_byte], scales uint8 [M, K / columns]).

    A code's value times its scale, over `top` for NVFP4, is what `activations.fake_quantize` gives, except that a group whose
    NVFP4 scale underflows is zero here.
    """
    groups = x.float().view(x.shape[0], -1, micro.columns)
    peak = groups.abs().amax(-1, keepdim=True)
    if micro.rule == "e8m0":
        largest = E2M1_MAX if micro.per_byte == 2 else E4M3_MAX
        exponent = mx_exponent(peak, largest).clamp(-127, 127)
        exponent = torch.where(peak > 0, exponent, torch.zeros_like(exponent))
        scale, scales = torch.ldexp(torch.ones_like(peak), exponent), (exponent + 127).to(torch.uint8)
    else:
        top = peak.new_ones(()) if top is None else top
        local = exact_div(peak * top, E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        scales = local.view(torch.uint8)
        scale = local.float() / top
        groups, scale = torch.where(scale > 0, groups, 0.0), torch.where(scale > 0, scale, 1.0)
    values = round_to(groups / scale, micro.weight)
    codes = encode_e2m1(values) if micro.per_byte == 2 else values.to(torch.float8_e4m3fn)
    return codes.view(x.shape[0], -1), scales.squeeze(-1)


class MicroscaledKernel(Kernel):
    """A kernel whose product takes codes and swizzled scales of both factors. A base: subclasses give `_product`.

    rows_to, columns_to: multiples that N and K are padded to with zeros at load. batch_to: what M is at each call.
    """

    quantizes_input = True
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    micro: ClassVar[Micro]
    rows_to: ClassVar[int] = 32
    columns_to: ClassVar[int] = 128
    batch_to: ClassVar[int] = 1
    share: ClassVar[float] = 0.7  # of both rates

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The format's weights and inputs; any N, K and M, which are padded."""
        return is_micro(spec, cls.micro)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes uint8 [N', K' / per_byte], scale uint8 swizzled, alpha float32 [1], what the sums are multiplied by, and
        top float32 [1], what the input's scales are multiplied by (empty for MX)."""
        s, micro = weight.spec, cls.micro
        n, k = -(-s.n // cls.rows_to) * cls.rows_to, -(-s.k // cls.columns_to) * cls.columns_to
        codes = pad(weight.codes, (0, k // micro.per_byte - weight.codes.shape[1], 0, n - s.n))
        scale = pad(weight.scale.view(torch.uint8), (0, k // micro.columns - weight.scale.shape[1], 0, n - s.n))
        alpha = torch.ones(1, dtype=torch.float64, device=weight.device) if weight.scale2 is None else weight.scale2.double()
        top = torch.empty(0, device=weight.device)
        if micro.rule == "e4m3" and weight.input_scale is not None:
            top = weight.input_scale.reshape(1).float()
            alpha = alpha / top.double()
        return {**cls._layout(codes, scale), "alpha": alpha.reshape(1).float(), "top": top}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale, alpha, top = packed
        m, k = x.shape[0], codes.shape[1] * cls.micro.per_byte
        if m == 0:
            return x.new_empty(0, spec.n)
        rows = -(-m // cls.batch_to) * cls.batch_to
        a, a_scale = quantize_micro(pad(x, (0, k - spec.k, 0, rows - m)), cls.micro, top if top.numel() else None)
        y = cls._product(a, swizzle(a_scale), codes, scale, alpha, x.dtype)[:m, : spec.n]
        return y.contiguous().to(x.dtype) if bias is None else (y + bias).to(x.dtype)

    @classmethod
    def _layout(cls, codes: Tensor, scale: Tensor) -> Packed:
        """Padded codes and scales as the product takes them."""
        return {"codes": codes.contiguous(), "scale": swizzle(scale)}

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        """a [M', K' / per_byte] times the weight as `_layout` gave it, in `dtype` or float32: [M', N']."""
        raise NotImplementedError

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Thirty passes over x and as many launches; the product at a share of its rates, FP4 at twice that of FP8."""
        rate = platform.rates.of("fp8") * (2 if cls.micro.per_byte == 2 else 1)
        quantize = 30 * (3 * m * spec.k / platform.rates.bandwidth + platform.rates.launch)
        return quantize + roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=rate) / cls.share
