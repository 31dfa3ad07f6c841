"""TritonW4A16LinearKernel: integers of 1 to 8 bits and tables of up to 16 values, inputs of 16 or 32 bits, on Triton's GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bitline.kernels.base import Kernel, Packed, matmul_rate
from bitline.kernels.providers import common
from bitline.kernels.triton import layout
from bitline.kernels.triton.heuristics import fused_limit
from bitline.kernels.triton.launch import run
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight


class TritonWeightOnlyKernel(Kernel):
    """What the weight-only Triton kernels share: everything but which weights they take.

    Codes go into the matrix instruction as exact 16-bit numbers. Up to `fused_limit` rows one kernel does it all; above,
    panels of the weight are dequantized to scratch and torch multiplies.
    """

    platforms = ("cuda", "rocm", "xpu", "cpu")
    backend = "triton"
    priority = 10

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Triton, and a device for it: NVIDIA from sm75, AMD, Intel, or its interpreter on a CPU."""
        if platform.vendor == "cuda" and platform.capability < 75:
            return no(f"{platform.arch} is older than Triton supports", "sm75 or newer")
        return common.triton(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Inputs of 16 or 32 bits."""
        if spec.act is not None:
            return no(
                f"the input is to be quantized ({spec.act}); this kernel is weight-only", "a weight-only scheme, such as W4A16"
            )
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
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline with the shares of bandwidth and of matrix rate that 4-bit integers were measured to reach on an H200."""
        if platform.vendor == "cpu":
            return 1.0  # the interpreter is for tests
        rates, fma = platform.rates, platform.vendor == "cuda" and platform.capability < 80
        size = cls.packed_bytes(spec) + m * (spec.n + spec.k) * spec.act_dtype.itemsize
        flops, rate = 2.0 * m * spec.n * spec.k, matmul_rate(spec, platform)
        if m > fused_limit(spec.act_dtype, layout.layout_of(spec), fma):
            scratch = spec.act_dtype.itemsize * spec.n * spec.k
            product = max(flops / (0.87 * rate), scratch / (0.85 * rates.bandwidth))
            return cls._dequantizing(spec) * (size + scratch) / (0.8 * rates.bandwidth) + product + 2 * rates.launch
        tile = 2.0 * (1 << (m - 1).bit_length()) * spec.n * spec.k  # rows of a tile are a power of two
        once = max(size / (0.7 * rates.bandwidth), tile / (0.43 * (rates.fp32 if fma else rate)))
        return cls._decoding(spec) * once + 1.5 * rates.launch

    @classmethod
    def _decoding(cls, spec: LinearSpec) -> float:
        """How many times longer than 4-bit integers its codes take."""
        return 1.0

    @classmethod
    def _dequantizing(cls, spec: LinearSpec) -> float:
        """How many times longer than 4-bit integers its panels take to make."""
        return 1.0

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed tensors; of groups that are no multiple of 32 columns, the least that they can take."""
        return layout.packed_bytes(spec)


class TritonW4A16LinearKernel(TritonWeightOnlyKernel):
    """Integer codes go into the matrix instruction as they are, a table's values rounded to the input's dtype; scales are applied
    to float32 sums. So no integer weight is rounded.

    Codes of 3, 5 and 6 bits are packed as their low 2 or 4 bits and the rest; of 1 and 7 bits, and of tables of 8, in fields of
    2, 8 and 4.
    """

    families = ("mp",)
    measured = ("sm90",)

    @classmethod
    def _decoding(cls, spec: LinearSpec) -> float:
        """As measured on an H200, at 4096x4096 and 28672x4096."""
        return 2.6 if spec.weight.kind == "table" else 2.0 if spec.weight.bits == 3 else 1.0

    @classmethod
    def _dequantizing(cls, spec: LinearSpec) -> float:
        """As measured on an H200, at 4096x4096 and 28672x4096."""
        return 2.4 if spec.weight.kind == "table" else 1.25 if spec.weight.bits == 3 else 1.0

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Weight-only integers and tables: every shape, group size, zero point, offset, column order and cut."""
        if not (verdict := super().can_implement(spec)):
            return verdict
        kind = spec.weight
        if kind.kind == "float" or (kind.kind == "table" and kind.bits > 4):
            return no(f"weight type {kind} is neither an integer nor a table of 16", "integers, or NF4 and the like")
        if spec.zero == "int" and (kind.signed or kind.kind == "table"):
            return no(f"{kind} codes with zero points", f"uint{kind.bits} with zero points")
        return YES
