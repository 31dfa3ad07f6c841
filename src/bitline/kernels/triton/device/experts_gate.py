# mypy: disable-error-code="no-untyped-def"
"""What lies between the projections of experts: gates and activations of `expert_gate`. Gluon kernels call these too."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _clamp_max(v, limit):
    """min(v, limit) that keeps NaN."""
    return tl.where(v > limit, limit, v)


@triton.jit
def activate(v, ACTIVATION: tl.constexpr):
    """An activation of `expert_gate.ACTIVATIONS`, float32; v itself where it is ""."""
    if ACTIVATION == "silu":
        v = v / (1.0 + tl.exp(-v))
    elif ACTIVATION == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        v = v / (1.0 + tl.exp(-1.5957691216057308 * (v + 0.044715 * v * v * v)))
    elif ACTIVATION == "relu" or ACTIVATION == "relu2":
        v = tl.where(v < 0.0, 0.0, v)
        if ACTIVATION == "relu2":
            v = v * v
    else:
        tl.static_assert(ACTIVATION == "")
    return v


@triton.jit
def gate_up(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """A gated ExpertGate of float32 gate and "up"."""
    if LIMIT > 0.0:
        gate = _clamp_max(gate, LIMIT)
        up = -_clamp_max(-_clamp_max(up, LIMIT), LIMIT)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        return activate(gate, ACTIVATION) * up
