"""Compile-time parameters of the kernels of experts that those of a plain layer do not have."""

from __future__ import annotations

from typing import NamedTuple

from bitline.expert_gate import ExpertGate


class ExpertsTraits(NamedTuple):
    """gated, activation, alpha, limit: what follows the projection, see `ExpertGate`; "" for nothing.

    is_sorted: pairs are sorted by expert and cut into blocks, else each is a block. waits_first: the routing may be written by
    the kernel before, so that nothing is read before that has ended.
    """

    gated: bool
    activation: str
    alpha: float
    limit: float
    is_sorted: bool
    waits_first: bool

    @staticmethod
    def of(gate: ExpertGate | None, *, is_sorted: bool, waits_first: bool) -> ExpertsTraits:
        """gate: None for nothing."""
        gate = gate or ExpertGate("", False)
        return ExpertsTraits(gate.gated, gate.activation, gate.alpha, gate.limit, is_sorted, waits_first)
