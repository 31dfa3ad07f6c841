"""The execution plan of a loaded model: its quantized linear layers and experts, grouped by spec, with each group's kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from bitline.experts import ExpertStack
from bitline.linear import QuantLinear
from bitline.select import Choice
from bitline.types import LinearSpec


@dataclass(frozen=True)
class PlanRow:
    """Layers that share one spec. format: of the checkpoint. choice: the kernel. packed_bytes: of all these layers. experts: of
    which each name is a stack, and the spec is one expert's; 0 for plain layers.
    """

    spec: LinearSpec
    format: str
    choice: Choice
    names: tuple[str, ...]
    packed_bytes: int
    experts: int = 0


def plan(model: nn.Module) -> list[PlanRow]:
    """One row for each distinct spec among a loaded model's quantized linear layers, the most weights first."""
    groups: dict[tuple[LinearSpec, int], list[tuple[str, QuantLinear | ExpertStack]]] = defaultdict(list)
    for name, module in quant_linears(model):
        groups[module.spec, 0].append((name, module))
    for name, stack in expert_stacks(model):
        groups[stack.spec, stack.num_experts].append((name, stack))
    rows = []
    for (spec, experts), members in groups.items():
        names, layers = zip(*members, strict=True)
        size = sum(m.packed_bytes() for m in layers)
        rows.append(PlanRow(spec, layers[0].source[1], layers[0].choice, names, size, experts))
    return sorted(rows, key=lambda row: -row.spec.n * row.spec.k * len(row.names) * max(1, row.experts))


def expert_stacks(model: nn.Module) -> Iterator[tuple[str, ExpertStack]]:
    """Every ExpertStack of a model with its module name."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertStack):
            yield name, module


def quant_linears(model: nn.Module) -> Iterator[tuple[str, QuantLinear]]:
    """Every QuantLinear of a model with its module name."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            yield name, module
