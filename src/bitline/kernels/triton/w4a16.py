"""TritonW4A16LinearKernel: weight-only GEMM of integers of 1 to 8 bits and 16-entry LUT types, with 16- or 32-bit inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bitline.expert_gate import ExpertGate
from bitline.kernels.base import Kernel, Packed, matmul_rate
from bitline.kernels.providers.common import triton_available
from bitline.kernels.triton import experts, layout
from bitline.kernels.triton.heuristics import max_fused_m
from bitline.kernels.triton.launch import run
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight


class TritonWeightOnlyKernel(Kernel):
    """Base of the weight-only Triton kernels; subclasses say which weights they take.

    Codes enter the MMA as exact 16-bit numbers. Up to `max_fused_m` one fused kernel runs; above, panels of the weight are
    dequantized to scratch and multiplied by torch's matmul.
    """

    platforms = ("cuda", "rocm", "xpu", "cpu")
    backend = "triton"
    priority = 10

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Triton, and a device for it: NVIDIA from sm75, AMD, Intel, or its interpreter on a CPU."""
        if platform.vendor == "cuda" and platform.capability < 75:
            return no(f"{platform.arch} is older than Triton supports", "sm75 or newer")
        return triton_available(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Weight-only schemes."""
        if spec.act is not None:
            return no(f"the scheme quantizes activations ({spec.act}); this kernel is weight-only",
                      "a weight-only scheme, such as W4A16")  # fmt: skip
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """See `layout.pack`."""
        return layout.pack(weight)

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        return run(x, packed, bias, spec)

    @classmethod
    def apply_experts(
        cls, x: Tensor, index: Tensor, weights: Tensor, up: Sequence[Tensor], up_bias: Tensor | None, down: Sequence[Tensor],
        down_bias: Tensor | None, up_spec: LinearSpec, down_spec: LinearSpec, gate: ExpertGate,
    ) -> Tensor:  # fmt: skip
        """See Kernel.apply_experts: one fused kernel per projection at every number of tokens."""
        return experts.run_experts(x, index, weights, up, up_bias, down, down_bias, up_spec, down_spec, gate)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline with the fractions of bandwidth and of the MMA rate measured for 4-bit integers on an H200."""
        if platform.vendor == "cpu":
            return 1.0  # the interpreter is for tests
        rates, no_mma = platform.rates, platform.vendor == "cuda" and platform.capability < 80
        size = cls.packed_bytes(spec) + m * (spec.n + spec.k) * spec.act_dtype.itemsize
        flops, rate = 2.0 * m * spec.n * spec.k, matmul_rate(spec, platform)
        if m > max_fused_m(spec.act_dtype, layout.layout_of(spec), no_mma):
            scratch = spec.act_dtype.itemsize * spec.n * spec.k
            matmul = max(flops / (0.87 * rate), scratch / (0.85 * rates.bandwidth))
            return cls._panel_factor(spec) * (size + scratch) / (0.8 * rates.bandwidth) + matmul + 2 * rates.launch
        padded_flops = 2.0 * (1 << (m - 1).bit_length()) * spec.n * spec.k  # tile_m is a power of two
        gemm = max(size / (0.7 * rates.bandwidth), padded_flops / (0.43 * (rates.fp32 if no_mma else rate)))
        return cls._fused_factor(spec) * gemm + 1.5 * rates.launch

    @classmethod
    def _fused_factor(cls, spec: LinearSpec) -> float:
        """The fused kernel's time relative to 4-bit integers."""
        return 1.0

    @classmethod
    def _panel_factor(cls, spec: LinearSpec) -> float:
        """The time to dequantize panels relative to 4-bit integers."""
        return 1.0

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed tensors; a lower bound for groups that are not a multiple of 32 columns."""
        return layout.packed_bytes(spec)


class TritonW4A16LinearKernel(TritonWeightOnlyKernel):
    """Integer codes enter the MMA as integers, LUT values rounded to the input's dtype; scales multiply float32 accumulators.

    So no integer weight is rounded. Codes of 3, 5 and 6 bits are packed as their low 2 or 4 bits and a plane of high bits; codes
    of 1 and 7 bits, and of 8-entry LUTs, in fields of 2, 8 and 4 bits.
    """

    families = ("mp",)
    measured = ("sm90",)

    @classmethod
    def _fused_factor(cls, spec: LinearSpec) -> float:
        """As measured on an H200, at 4096x4096 and 28672x4096."""
        return 2.6 if spec.weight.kind == "table" else 2.0 if spec.weight.bits == 3 else 1.0

    @classmethod
    def _panel_factor(cls, spec: LinearSpec) -> float:
        """As measured on an H200, at 4096x4096 and 28672x4096."""
        return 2.4 if spec.weight.kind == "table" else 1.25 if spec.weight.bits == 3 else 1.0

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Weight-only integers and LUT types: every shape, group size, zero point, offset, act-order and shard."""
        if not (verdict := super().can_implement(spec)):
            return verdict
        kind = spec.weight
        if kind.kind == "float" or (kind.kind == "table" and kind.bits > 4):
            return no(f"weight type {kind} is neither an integer nor a table of 16", "integers, or NF4 and the like")
        if spec.zero == "int" and (kind.signed or kind.kind == "table"):
            return no(f"{kind} codes with zero points", f"uint{kind.bits} with zero points")
        return YES
