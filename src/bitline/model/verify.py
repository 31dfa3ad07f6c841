"""Verification of a loaded model: layers against the float64 reference, and the first layer whose output overflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bitline.linear import QuantLinear
from bitline.model.plan import plan, quant_linears
from bitline.testing.tolerance import compare
from bitline.weight import QuantizedWeight

_MAX_N = 1024  # output features compared; a vocabulary of 150,000 in float64 would take gigabytes


@dataclass(frozen=True)
class LayerCheck:
    """The largest absolute error of one layer's output against float64, and what is allowed: twice torch's own error in the
    same dtype, plus epsilon.
    """

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
    """The first layer whose output is not finite. bad: NaN or infinite values; values: all values."""

    layer: str
    bad: int
    values: int


def find_overflow(model: Any, ids: torch.Tensor) -> Overflow | None:
    """Run a model on token ids [1, T]: the first quantized layer whose output has NaN or infinity, None where all are finite."""
    found: list[Overflow] = []

    def record(name: str, y: torch.Tensor) -> None:
        bad = int((~torch.isfinite(y)).sum())
        if bad and not found:
            found.append(Overflow(name, bad, y.numel()))

    hooks = [
        layer.register_forward_hook(lambda _module, _args, y, name=name: record(name, y)) for name, layer in quant_linears(model)
    ]
    try:
        with torch.inference_mode():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def check_layers(model: Any, batch_sizes: tuple[int, ...] = (1, 17)) -> list[LayerCheck]:
    """Compare one layer of each spec with the reference, on random input at each of these M."""
    checks = []
    for row in plan(model):
        name = row.names[0]
        checks += list(_check_layer(model.get_submodule(name), model.bitline_weights[name], name, batch_sizes))
    return checks


def _check_layer(
    layer: QuantLinear, read: Callable[[], QuantizedWeight], name: str, batch_sizes: tuple[int, ...]
) -> Iterator[LayerCheck]:
    weight = read()
    n = min(_MAX_N, weight.spec.n)
    bias = layer._buffers["bias"]
    first_n = weight.narrow(0, 0, n).with_bias(None if bias is None else bias[:n].cpu())
    first_n = first_n.with_act_dtype(layer.spec.act_dtype)
    device = layer._packed[0].device
    for m in batch_sizes:
        x = torch.randn(m, weight.spec.k).to(layer.spec.act_dtype)
        with torch.inference_mode():
            y = layer(x.to(device))[:, :n].cpu()
        found = compare(y, x, first_n)
        yield LayerCheck(name, layer.choice.best.name, m, found.error, found.allowed)
