"""The execution plan of a loaded model: its quantized linear layers, grouped by spec, with the kernel chosen for each group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from bitline.linear import QuantLinear
from bitline.select import Choice
from bitline.types import LinearSpec


@dataclass(frozen=True)
class PlanRow:
    """Layers that share one spec. format: of the checkpoint. choice: the kernel. packed_bytes: of all these layers."""

    spec: LinearSpec
    format: str
    choice: Choice
    names: tuple[str, ...]
    packed_bytes: int


def plan(model: nn.Module) -> list[PlanRow]:
    """One row for each distinct spec among a loaded model's quantized linear layers, the most weights first."""
    groups: dict[LinearSpec, list[tuple[str, QuantLinear]]] = defaultdict(list)
    for name, module in quant_linears(model):
        groups[module.spec].append((name, module))
    rows = []
    for spec, members in groups.items():
        names, layers = zip(*members, strict=True)
        rows.append(PlanRow(spec, layers[0].source[1], layers[0].choice, names, sum(m.packed_bytes() for m in layers)))
    return sorted(rows, key=lambda row: -row.spec.n * row.spec.k * len(row.names))


def quant_linears(model: nn.Module) -> Iterator[tuple[str, QuantLinear]]:
    """Every QuantLinear of a model with its module name."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            yield name, module
