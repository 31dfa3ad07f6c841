"""GEMMs of microscaled codes (NVFP4, MXFP4, MXFP8), as Blackwell's block-scaled MMA and the packages built on it take them.

NVFP4: E2M1 codes, E4M3 scales per 16 columns under a global scale. MXFP4 and MXFP8: E8M0 scales per 32 columns (OCP MX
specification). Activations are quantized here, as `bitline.act_quant` defines it; a kernel supplies only the GEMM.
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
from bitline.quantized_input import pad_codes
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

E2M1_MAX, E4M3_MAX = 6.0, 448.0


@dataclass(frozen=True)
class MicroscaledFormat:
    """A microscaled format: kernel family, weight type, columns per block scale, and the block scales' dtype."""

    family: str
    weight: str
    sf_vec_size: int
    sf_dtype: torch.dtype

    @property
    def act_scale(self) -> str:
        """The kind of block scale, as `ActSpec.scale` names it."""
        return "e4m3" if self.sf_dtype == torch.float8_e4m3fn else "e8m0"

    @property
    def codes_per_byte(self) -> int:
        """2 for FP4, 1 for FP8."""
        return 2 if self.weight == "float4_e2m1" else 1


NVFP4 = MicroscaledFormat("nvfp4", "float4_e2m1", 16, torch.float8_e4m3fn)
MXFP4 = MicroscaledFormat("mxfp4", "float4_e2m1", 32, torch.float8_e8m0fnu)
MXFP8 = MicroscaledFormat("mxfp8", "float8_e4m3fn", 32, torch.float8_e8m0fnu)


def matches_format(spec: LinearSpec, fmt: MicroscaledFormat) -> Verdict:
    """Whether weights and activations are both in the format, with scale blocks that start at column 0."""
    act, size = spec.act, fmt.sf_vec_size
    if spec.weight.name != fmt.weight or spec.scale_dtype != fmt.sf_dtype or spec.zero != "none":
        return no(f"{spec.weight} with {spec.scale_dtype} scales", f"{fmt.weight} with {fmt.sf_dtype} scales")
    if act is None:
        return no("activations stay in 16 bits; this kernel multiplies codes", f"a scheme with {fmt.family} activations")
    same = (act.dtype.name, act.granularity, act.group_size, act.scale) == (fmt.weight, "group", size, fmt.act_scale)
    if not same or not act.dynamic or not act.symmetric or act.limit:
        return no(f"activation scheme {act}", f"dynamic {fmt.weight} activations in groups of {size}, {fmt.act_scale} scales")
    if spec.block != (1, min(size, spec.k)) or spec.block_offset[1] or spec.ragged or spec.act_order:
        return no(f"scale block {spec.block[0]}x{spec.block[1]}, or groups that are unaligned or reordered",
                  f"aligned 1x{size} scale blocks")  # fmt: skip
    if spec.scale2_block not in (None, (spec.n, spec.k)):
        return no("several global scales", "one global scale")
    return YES


def swizzle_scales(scales: Tensor) -> Tensor:
    """One-byte scales [R, C] in the tensor cores' 128x4 tile order, zero-padded to multiples of 128 and 4.

    In a tile, rows r, r + 32, r + 64 and r + 96 are adjacent, four columns each.
    Source: cuBLASLt documentation, 1D block scaling factors layout.
    """
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    padded = pad(scales.view(torch.uint8), (0, columns - scales.shape[1], 0, rows - scales.shape[0]))
    tiles = padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)


def pack_e2m1(values: Tensor) -> Tensor:
    """float32 values that E2M1 represents, [..., K] with K even, to packed codes uint8 [..., K / 2], even columns in low bits."""
    table = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8, device=values.device)
    codes = table[(values.abs() * 2).long()] | (values.signbit().to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def quantize_microscaled(x: Tensor, fmt: MicroscaledFormat, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K], K a multiple of sf_vec_size, to (codes [M, K / codes_per_byte], scales uint8 [M, K / sf_vec_size]).

    Code times scale, divided by `global_scale` for NVFP4, equals `act_quant.fake_quantize`, except that a group whose NVFP4 scale
    underflows becomes zero here.
    """
    groups = x.float().view(x.shape[0], -1, fmt.sf_vec_size)
    amax = groups.abs().amax(-1, keepdim=True)
    if fmt.act_scale == "e8m0":
        largest = E2M1_MAX if fmt.codes_per_byte == 2 else E4M3_MAX
        exponent = mx_exponent(amax, largest).clamp(-127, 127)
        exponent = torch.where(amax > 0, exponent, torch.zeros_like(exponent))
        scale, scales = torch.ldexp(torch.ones_like(amax), exponent), (exponent + 127).to(torch.uint8)
    else:
        global_scale = amax.new_ones(()) if global_scale is None else global_scale
        local = exact_div(amax * global_scale, E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        scales = local.view(torch.uint8)
        scale = local.float() / global_scale
        groups, scale = torch.where(scale > 0, groups, 0.0), torch.where(scale > 0, scale, 1.0)
    values = round_to(groups / scale, fmt.weight)
    codes = pack_e2m1(values) if fmt.codes_per_byte == 2 else values.to(torch.float8_e4m3fn)
    return codes.view(x.shape[0], -1), scales.squeeze(-1)


class MicroscaledKernel(Kernel):
    """Base of kernels whose GEMM takes codes and swizzled block scales of both operands. Subclasses implement `_gemm`.

    pad_n, pad_k: multiples that N and K are zero-padded to at load time. pad_m: the multiple that M is padded to at each call.
    efficiency: the fraction of peak bandwidth and FLOP/s that `cost` assumes.
    """

    quantizes_input = True
    takes_quantized_input = True  # MXFP8; a QuantizedInput holds no FP4
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    fmt: ClassVar[MicroscaledFormat]
    pad_n: ClassVar[int] = 32
    pad_k: ClassVar[int] = 128
    pad_m: ClassVar[int] = 1
    efficiency: ClassVar[float] = 0.7

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """The format's weights and activations; any M, N and K."""
        return matches_format(spec, cls.fmt)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes uint8 [N', K' / codes_per_byte]; scale uint8, swizzled; alpha float32 [1], the accumulators' factor; and
        global_scale float32 [1], the activation scales' factor (empty for MX)."""
        s, fmt = weight.spec, cls.fmt
        n, k = -(-s.n // cls.pad_n) * cls.pad_n, -(-s.k // cls.pad_k) * cls.pad_k
        codes = pad(weight.codes, (0, k // fmt.codes_per_byte - weight.codes.shape[1], 0, n - s.n))
        scale = pad(weight.scale.view(torch.uint8), (0, k // fmt.sf_vec_size - weight.scale.shape[1], 0, n - s.n))
        alpha = torch.ones(1, dtype=torch.float64, device=weight.device) if weight.scale2 is None else weight.scale2.double()
        global_scale = torch.empty(0, device=weight.device)
        if fmt.act_scale == "e4m3" and weight.input_scale is not None:
            global_scale = weight.input_scale.reshape(1).float()
            alpha = alpha / global_scale.double()
        return {**cls._pack_operand(codes, scale), "alpha": alpha.reshape(1).float(), "global_scale": global_scale}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, global_scale = packed[0], packed[3]
        m, k = x.shape[0], codes.shape[1] * cls.fmt.codes_per_byte
        if m == 0:
            return x.new_empty(0, spec.n)
        padded = pad(x, (0, k - spec.k, 0, -m % cls.pad_m))
        a, a_scale = quantize_microscaled(padded, cls.fmt, global_scale if global_scale.numel() else None)
        return cls._multiply(a, a_scale, m, packed, bias, spec)

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See Kernel.apply_quantized."""
        m, k = codes.shape[0], packed[0].shape[1]
        rows, groups = m + -m % cls.pad_m, k // cls.fmt.sf_vec_size
        a_scale = (scales.view(torch.int32) >> 23).to(torch.uint8)  # 2**-127 is subnormal in float32: E8M0's 0 too
        a_scale = pad(a_scale, (0, groups - a_scale.shape[1], 0, rows - m), value=127)
        return cls._multiply(pad_codes(codes, rows, k), a_scale, m, packed, bias, spec)

    @classmethod
    def _multiply(
        cls, a: Tensor, a_scale: Tensor, m: int, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """Codes and scales as `quantize_microscaled` gives them times the packed weight: [M, N]."""
        codes, scale, alpha, _global_scale = packed
        y = cls._gemm(a, swizzle_scales(a_scale), codes, scale, alpha, spec.act_dtype)[:m, : spec.n]
        return (y if bias is None else y + bias).to(spec.act_dtype).contiguous()

    @classmethod
    def _pack_operand(cls, codes: Tensor, scale: Tensor) -> Packed:
        """Padded weight codes and scales as `_gemm` takes them."""
        return {"codes": codes.contiguous(), "scale": swizzle_scales(scale)}

    @classmethod
    def _gemm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        """a [M', K' / codes_per_byte] times the operands of `_pack_operand`: [M', N'] in `dtype` or float32."""
        raise NotImplementedError

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Activation quantization as 30 passes over x and launches, then the GEMM, FP4 at twice the rate of FP8."""
        rate = platform.rates.of("fp8") * (2 if cls.fmt.codes_per_byte == 2 else 1)
        quantize = 30 * (3 * m * spec.k / platform.rates.bandwidth + platform.rates.launch)
        return quantize + roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=rate) / cls.efficiency
