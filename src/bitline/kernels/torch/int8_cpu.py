"""Weight-only int8 on CPUs: torch's `_weight_int8pack_mm` at small M, dequantized panels and torch's matmul at large M."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.act_quant import fake_quantize
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.cpu import costs as cpu_costs
from bitline.kernels.integers import channel_scales, fits_int8, int8_codes, per_channel_only
from bitline.platform import Platform, cpu_features
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

# Measured seconds per weight on two cores (docs/performance.md), (without, with) AMX: the operator's first token, each further
# token, and a token of torch's matmul.
FIRST_TOKEN, EACH_TOKEN, MATMUL_TOKEN = (11.5e-12, 31e-12, 60e-12), (5.9e-12, 30e-12, 26e-12), (2.1e-12, 4.3e-12, 65e-12)
PANEL = 1 << 21  # weights dequantized at a time: 4 MiB of bfloat16, which a last-level cache holds


class TorchInt8PackLinearKernel(Kernel):
    """`aten::_weight_int8pack_mm`: y = (x @ W8.T) * s with int8 W8, a bfloat16 scale per channel and float32 accumulation.

    Narrower codes are widened to bytes. From some tens of tokens on, panels of the weight are dequantized to bfloat16 and
    multiplied by torch's matmul (oneDNN).
    """

    platforms = ("cpu",)
    families = ("mp", "fp8")
    measured = ("zen", "amx")
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """x86-64 with AVX2 or AVX-512, or Arm with Neon."""
        if not platform.features & {"avx2", "avx512", "neon"}:
            return no("torch's int8 operator has vector code only for AVX2, AVX-512 and Neon", "an x86-64 CPU with AVX2")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Symmetric integers of up to 8 bits, per-channel or per-tensor scales; bfloat16 input."""
        if spec.act_dtype != torch.bfloat16:
            return no("the operator has only scalar code for float16 and float32 inputs, 30 times slower",
                      "with input dtype bfloat16")  # fmt: skip
        if not fits_int8(spec):
            return no(f"{spec.weight} codes are not integers of -128..127 times a step", "a signed or biased integer type")
        return per_channel_only(spec)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int8 [N, K'], K padded to 16 since the operator reads past the end of shorter rows; scale bfloat16 [N]."""
        codes = int8_codes(weight)
        if weight.spec.k % 16:
            codes = pad(codes, (0, -weight.spec.k % 16))
        absent = torch.empty(0, device=weight.device)
        named = {"input_scale": weight.input_scale, "input_zero": weight.input_zero}
        return {
            "codes": codes,
            "scale": channel_scales(weight).bfloat16(),
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
            x = pad(x, (0, -spec.k % 16))
        if m >= _panel_crossover_m(codes.numel(), cpu_costs.cpu_class(cpu_features())):
            return _dequantize_then_matmul(x, codes, scale, bias)
        y = torch.ops.aten._weight_int8pack_mm(x, codes, scale)
        return y if bias is None else y.add_(bias)

    @classmethod
    def unpack(cls, packed: Sequence[Tensor], spec: LinearSpec) -> Tensor:
        """See Kernel.unpack."""
        return (packed[0][:, : spec.k] * packed[1].float().unsqueeze(1)).to(spec.act_dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The operator's time below the crossover, dequantization and a matmul above it."""
        cpu, core_scale = cpu_costs.cpu_class(platform.features), cpu_costs.core_scale(platform)
        weights = spec.n * spec.k
        extra = cpu_costs.CALL + cpu_costs.fake_quant(spec, platform, m)
        if m < _panel_crossover_m(weights, cpu):
            read = max(cls.packed_bytes(spec) / (0.95 * platform.rates.bandwidth), weights * FIRST_TOKEN[cpu] * core_scale)
            return read + weights * (m - 1) * EACH_TOKEN[cpu] * core_scale + extra
        return _panel_seconds(weights, cpu) * core_scale + cpu_costs.dense_gemm(weights, m, torch.bfloat16, platform) + extra

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """One byte per weight and two per channel."""
        return spec.n * (spec.k + -spec.k % 16 + 2)


def _panel_crossover_m(weights: int, cpu: int) -> float:
    """The M from which dequantized panels are faster, by the measured costs of both."""
    per_token = EACH_TOKEN[cpu] - MATMUL_TOKEN[cpu]
    return (_panel_seconds(weights, cpu) + weights * 3e-11) / (weights * per_token) if per_token > 0 else math.inf


def _panel_seconds(weights: int, cpu: int) -> float:
    """Seconds to dequantize all panels on two cores."""
    return 45e-6 * -(-weights // PANEL) + weights * 1.2e-10 * (1.3 if cpu == cpu_costs.AMX else 1.0)


def _dequantize_then_matmul(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K'] times the packed weight, one dequantized panel of output channels at a time."""
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
