"""vLLM's CPU kernels by name, where the code is vLLM's own: Bitline's native kernel runs the layers."""

from __future__ import annotations

from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel
from bitline.types import LinearSpec, Verdict, no


class CPUInt8ScaledMMLinearKernel(CPUWNA16LinearKernel):
    """W8A8 int8, static or dynamic, with or without zero points: runs CPUWNA16LinearKernel."""

    families = ("int8",)
    priority = -10
    quantizes_input = True

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Int8 weights and activations."""
        if spec.act is None or spec.act.dtype.name != "int8" or spec.weight.bits != 8 or spec.weight.kind != "int":
            return no(f"{spec.scheme}", "int8 weights and int8 activations")
        return super().can_implement(spec)
