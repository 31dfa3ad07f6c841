"""TritonMinifloatLinearKernel: weight-only GEMM of FP4, FP6 and FP8 weights with 16- or 32-bit inputs, on any GPU of Triton's."""

from __future__ import annotations

from bitline.kernels.triton.w4a16 import TritonWeightOnlyKernel
from bitline.types import YES, LinearSpec, Verdict, no

_WEIGHTS = ("float4_e2m1", "float6_e2m3", "float6_e3m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")


class TritonMinifloatLinearKernel(TritonWeightOnlyKernel):
    """MXFP4, MXFP6, MXFP8, NVFP4 and FP8 per tensor, channel and block, weight-only.

    One-byte block scales of 16 and 32 columns stay bytes in memory and multiply the dequantized weights in registers: E2M1 times
    E4M3, or anything times a power of two, is exact in 16 bits. Other scales multiply float32 accumulators. 6-bit codes are
    stored as the E4M3 codes of the same values. A row with a code of NaN or infinity gives NaN.
    """

    measured = ("sm90",)
    families = ("nvfp4", "mxfp4", "mxfp8", "mxfp6", "fp8", "fp8_block")

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Weight-only floats of 4, 6 and 8 bits: every shape, scale block, scale dtype, act-order and shard."""
        if not (verdict := super().can_implement(spec)):
            return verdict
        if spec.weight.name not in _WEIGHTS:
            return no(f"weight type {spec.weight} is not a float with a sign", ", ".join(_WEIGHTS))
        if spec.zero != "none":
            return no(f"floats with {'zero points' if spec.zero == 'int' else 'offsets'}", "symmetric weights")
        return YES
