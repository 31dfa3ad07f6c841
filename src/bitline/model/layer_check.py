"""The result of comparing one layer, or one fused call, with the float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCheck:
    """One layer's output against float64, or what else is wrong with the layer.

    Attributes:
        layer: Its name, with the number of the expert in a stack.
        kernel: The kernel's class name.
        m: M; 0 for a fault that no call shows.
        error: The largest absolute error; infinite for a NaN and a fault.
        allowed: Twice torch's own error in the same dtype, plus epsilon.
        nmse: Sum of squared errors over sum of squared exact outputs.
        cosine: Of the angle between the output and the exact one.
        fault: What is wrong: packed tensors that differ from the checkpoint, a tensor of the file, an exception. "" for none.
        rank: Of a tensor-parallel layer's slice; None for a whole layer.
    """

    layer: str
    kernel: str
    m: int
    error: float
    allowed: float
    nmse: float = 0.0
    cosine: float = 1.0
    fault: str = ""
    rank: int | None = None

    @property
    def ok(self) -> bool:
        """Within the tolerance, no NaN, and no fault."""
        return self.error <= self.allowed and not self.fault

    @property
    def badness(self) -> float:
        """The error in units of what is allowed, by which layers are sorted; infinite for a fault."""
        if self.fault or not self.ok:
            return math.inf if self.fault or self.allowed == 0 else self.error / self.allowed
        return 0.0 if self.error == 0 else self.error / self.allowed


def fault_of(layer: str, kernel: str, fault: str, rank: int | None = None) -> LayerCheck:
    """The check of a layer that is wrong whatever its outputs are."""
    return LayerCheck(layer, kernel, 0, math.inf, 0.0, math.inf, 0.0, fault, rank)
