"""Check a loaded model's layers against the reference: one layer of each kind, on fresh random input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bitline.linear import QuantLinear
from bitline.model.load import plan, quant_linears
from bitline.testing.tolerance import compare

ROWS = 1024  # of the output; a vocabulary of 150,000 in float64 would take gigabytes


@dataclass(frozen=True)
class LayerCheck:
    """The largest error of one layer's output against float64, and twice that of torch's own product plus epsilon."""

    layer: str
    kernel: str
    m: int
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Within the tolerance, and no NaN."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Overflow:
    """The first layer whose output is not finite: how many of its values are NaN or infinite."""

    layer: str
    bad: int
    values: int


def find_overflow(model: Any, ids: torch.Tensor) -> Overflow | None:
    """Run a model on token ids and say which quantized layer is the first to give NaN or infinity, None where none does."""
    found: list[Overflow] = []

    def look(name: str, y: torch.Tensor) -> None:
        bad = int((~torch.isfinite(y)).sum())
        if bad and not found:
            found.append(Overflow(name, bad, y.numel()))

    hooks = [
        layer.register_forward_hook(lambda _module, _args, y, name=name: look(name, y)) for name, layer in quant_linears(model)
    ]
    try:
        with torch.inference_mode():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def check_layers(model: Any, rows: tuple[int, ...] = (1, 17)) -> list[LayerCheck]:
    """One layer of each kind at each number of rows."""
    checks = []
    for row in plan(model):
        checks += list(_check(model.get_submodule(row.names[0]), model.bitline_weights[row.names[0]], row.names[0], rows))
    return checks


def _check(layer: QuantLinear, read: Any, name: str, rows: tuple[int, ...]) -> Iterator[LayerCheck]:
    weight = read()
    keep = min(ROWS, weight.spec.n)
    bias = layer._buffers["bias"]
    part = weight.narrow(0, 0, keep).with_bias(None if bias is None else bias[:keep].cpu())
    part = part.with_act_dtype(layer.spec.act_dtype)
    device = layer._packed[0].device
    for m in rows:
        x = torch.randn(m, weight.spec.k).to(layer.spec.act_dtype)
        with torch.inference_mode():
            y = layer(x.to(device))[:, :keep].cpu()
        found = compare(y, x, part)
        yield LayerCheck(name, layer.choice.best.name, m, found.error, found.allowed)
