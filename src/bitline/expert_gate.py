"""What a mixture-of-experts layer computes between its two projections: a gate or an activation, as a value with a text form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from bitline.errors import InputError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda v: relu(v).square(),
}


class ExpertGate(NamedTuple):
    """h [.., N] of the first projection to the input [.., I] of the second.

    activation: a name of ACTIVATIONS. gated: N = 2 I, the first half is the gate and the second "up": activation(gate) * up;
    else N = I and it is activation(h). alpha, limit: with limit > 0 it is the clamped SwiGLU of gpt-oss, (up + 1) * gate *
    sigmoid(alpha * gate) with gate <= limit and |up| <= limit.
    """

    activation: str
    gated: bool = True
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def key(self) -> str:
        """The text form, for operators."""
        return f"{self.activation} {int(self.gated)} {self.alpha!r} {self.limit!r}"

    @staticmethod
    def parse(key: str) -> ExpertGate:
        """A gate from its text form. InputError for any other text."""
        try:
            activation, gated, alpha, limit = key.split(" ")
            gate = ExpertGate(activation, bool(int(gated)), float(alpha), float(limit))
        except ValueError:
            raise InputError("not a gate of experts", found=key, expected="the key of an ExpertGate") from None
        if activation not in ACTIVATIONS:
            raise InputError("unknown activation of experts", found=activation, expected=", ".join(ACTIVATIONS))
        return gate

    def __call__(self, h: Tensor) -> Tensor:
        """The second projection's input, in h's dtype, computed as transformers does."""
        if not self.gated:
            return ACTIVATIONS[self.activation](h)
        gate, up = h.chunk(2, -1)
        if self.limit > 0:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        return ACTIVATIONS[self.activation](gate) * up


def recognize(experts: Any) -> tuple[ExpertGate, bool] | None:
    """The gate of transformers' experts module, and whether gate and up rows are interleaved in its weight.

    Recognized by what its functions compute, not by names; None where no ExpertGate computes the same.
    """
    gated = bool(getattr(experts, "has_gate", True))
    function = getattr(experts, "_apply_gate", None) if gated else getattr(experts, "act_fn", None)
    if function is None:
        return None
    h = torch.linspace(-12.0, 12.0, 64).roll(5).view(2, 32)
    try:
        want = function(h)
    except Exception:  # a module's own code, which may need what a probe does not have
        return None
    candidates = [ExpertGate(name, gated) for name in ACTIVATIONS]
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    if gated and isinstance(alpha, int | float) and isinstance(limit, int | float) and limit > 0:
        candidates.append(ExpertGate("silu", True, float(alpha), float(limit)))
    for interleaved in (False, True) if gated else (False,):
        given = torch.cat((h[:, ::2], h[:, 1::2]), 1) if interleaved else h
        for gate in candidates:
            if isinstance(want, Tensor) and want.shape == gate(given).shape and torch.allclose(want, gate(given), 1e-5, 1e-6):
                return gate, interleaved
    return None
