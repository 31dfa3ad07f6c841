"""torch's CPU int8 operator for few rows, and the weight dequantized a panel at a time for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bitline.act_quant import fake_quantize
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.cpu import cpu_costs
from bitline.kernels.integers import fits_bytes, row_scales, signed_bytes
from bitline.platform import Platform, cpu_features
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

# Measured seconds a weight on two cores (docs/performance.md), without and with AMX: the operator's first row, each
# further row, and a row of torch's matrix product.
ONE_ROW, EACH_ROW, PRODUCT_ROW = (11.5e-12, 31e-12), (5.9e-12, 30e-12), (2.1e-12, 1.1e-12)
PANEL = 1 << 21  # weights dequantized at a time: 4 MiB of bfloat16, which a last-level cache holds


class TorchInt8PackLinearKernel(Kernel):
    """`aten::_weight_int8pack_mm`: y = (x @ W8.T) * s with int8 W8 and a bfloat16 scale for each row, float32 sums.

    Codes narrower than a byte are widened. From some tens of rows on, panels of the weight are dequantized into bfloat16
    and multiplied by torch's matrix product.
    """

    platforms = ("cpu",)
    families = ("mp", "fp8")
    measured = ("zen", "amx")
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """x86-64 with AVX2 or AVX-512, or Arm with Neon."""
        if not platform.features & {"avx2", "avx512", "neon"}:
            return no("torch's int8 operator has vector code for AVX2, AVX-512 and Neon alone", "an x86-64 CPU with AVX2")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Integers of up to 8 bits without zero points, one scale for each row or one for all; bfloat16 input."""
        if spec.act_dtype != torch.bfloat16:
            return no("the operator computes float16 and float32 inputs one number at a time, 30 times slower",
                      "with input dtype bfloat16")  # fmt: skip
        if not fits_bytes(spec):
            return no(f"{spec.weight} codes are not integers of -128..127 times a step", "a signed or biased integer type")
        return one_scale_a_row(spec)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int8 [N, K'], K padded to 16 since the operator reads past the end of a shorter row; scale bfloat16 [N]."""
        codes = signed_bytes(weight)
        if weight.spec.k % 16:
            codes = torch.nn.functional.pad(codes, (0, -weight.spec.k % 16))
        absent = torch.empty(0, device=weight.device)
        named = {"input_scale": weight.input_scale, "input_zero": weight.input_zero}
        return {
            "codes": codes,
            "scale": row_scales(weight).bfloat16(),
            **{name: absent if t is None else t.clone() for name, t in named.items()},
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale, input_scale, input_zero = packed
        m = x.shape[0]
        if m == 0:
            return x.new_empty(0, spec.n)
        if spec.act is not None:
            x = fake_quantize(x, spec.act, *(t if t.numel() else None for t in (input_scale, input_zero))).to(x.dtype)
        if spec.k % 16:
            x = torch.nn.functional.pad(x, (0, -spec.k % 16))
        if m >= _switch(codes.numel(), "amx" in cpu_features()):
            return _by_panels(x, codes, scale, bias)
        y = torch.ops.aten._weight_int8pack_mm(x, codes, scale)
        return y if bias is None else y.add_(bias)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The operator below the switch, a dequantization and a matrix product above it."""
        weights, amx, share = spec.n * spec.k, "amx" in platform.features, cpu_costs.share(platform)
        extra = cpu_costs.CALL + cpu_costs.quantized_input(spec, platform, m)
        if m < _switch(weights, amx):
            read = max(cls.packed_bytes(spec) / (0.95 * platform.rates.bandwidth), weights * ONE_ROW[amx] * share)
            return read + weights * (m - 1) * EACH_ROW[amx] * share + extra
        return _panel_seconds(weights, amx) * share + cpu_costs.product(weights, m, torch.bfloat16, platform) + extra

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """A byte a weight and two a row."""
        return spec.n * (spec.k + -spec.k % 16 + 2)


def one_scale_a_row(spec: LinearSpec) -> Verdict:
    """Yes where the scale does not change along K and nothing is subtracted or added."""
    if spec.zero != "none":
        what = "zero points" if spec.zero == "int" else "offsets"
        return no(f"weights with {what}", "a symmetric weight")
    if spec.ragged or spec.grid[1] != 1:
        return no(f"the scale changes along K, in groups of {spec.block[1]}", "one scale for each row, or for the whole weight")
    return YES


def _switch(weights: int, amx: bool) -> float:
    """The number of rows from which panels are faster, by the measured costs of both."""
    return (_panel_seconds(weights, amx) + weights * 3e-11) / (weights * (EACH_ROW[amx] - PRODUCT_ROW[amx]))


def _panel_seconds(weights: int, amx: bool) -> float:
    """Seconds to dequantize on two cores."""
    return 45e-6 * -(-weights // PANEL) + weights * 1.2e-10 * (1.3 if amx else 1.0)


def _by_panels(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    n, k = codes.shape
    step = min(n, max(1, PANEL // k))
    panel = x.new_empty(step, k)
    y = x.new_empty(x.shape[0], n)
    for r in range(0, n, step):
        rows = slice(r, min(r + step, n))
        w = panel[: rows.stop - r]
        w.copy_(codes[rows]).mul_(scale[rows].unsqueeze(1))
        if bias is None:
            torch.mm(x, w.t(), out=y[:, rows])
        else:
            torch.addmm(bias[rows], x, w.t(), out=y[:, rows])
    return y
