"""An engine's layer that runs on Bitline: its packed parts, the bias, the check after loading, and reloading in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitline import env
from bitline.engines.engine import Engine
from bitline.errors import BitlineError
from bitline.experts import ExpertStack
from bitline.linear import QuantLinear
from bitline.model.verify import check_layer
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

_logged: set[LinearSpec] = set()


class DensePart(nn.Module):
    """The unquantized rows of a layer whose other rows are quantized."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> y [..., N]."""
        return nn.functional.linear(x, self.weight, self.bias)


def pack(
    layer: Any, weights: Sequence[QuantizedWeight | Tensor], bias: Tensor | None, *, dtype: torch.dtype, device: torch.device,
    name: str, engine: Engine,
) -> None:  # fmt: skip
    """Pack a layer's weights, one above the other, with a bias; in place where the layer was packed before.

    layer: the engine's. It keeps the parts in a tuple, not as submodules, so that the engine neither moves nor reloads them.
    weights: this rank's rows, without biases; a plain [N, K] tensor is unquantized. bias: [N] of this rank, what `run` adds.
    dtype: of x and y. name: in messages.
    """
    old: tuple[Any, ...] = getattr(layer, "bitline_parts", ())
    parts, row = [], 0
    for i, weight in enumerate(weights):
        n = weight.shape[0]
        rows = None if bias is None else bias[row : row + n]
        row += n
        if isinstance(weight, Tensor):
            parts.append(DensePart(weight.to(device, dtype), rows))
            continue
        weight = weight.with_bias(rows).with_act_dtype(dtype)
        if i < len(old) and isinstance(old[i], QuantLinear):
            part = old[i]
            reload_in_place(part, weight)
        else:
            part = QuantLinear(weight, device=device)
            log_choice(part, name, engine)
        if env.verify():
            check_packed(part, weight, name, engine)
        parts.append(part)
    layer.bitline_parts, layer.bitline_has_bias = tuple(parts), bias is not None


def run(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> y [..., N] of a packed layer. bias: what the engine passes; not added again where the packed layer has it."""
    parts = layer.bitline_parts
    y = parts[0](x) if len(parts) == 1 else torch.cat([part(x) for part in parts], -1)
    return y if bias is None or layer.bitline_has_bias else y + bias


def reload_in_place(part: QuantLinear, weight: QuantizedWeight) -> None:
    """Give a layer another weight without moving its packed tensors, whose addresses captured graphs hold."""
    names = part._buffer_names
    old = {name: part.get_buffer(name) for name in (*names, "bias", "input_multiplier") if part._buffers[name] is not None}
    part.reload(weight)
    for name, tensor in old.items():
        tensor.copy_(part.get_buffer(name))
        part._buffers[name] = tensor
    part._cache_call()


def log_choice(part: QuantLinear | ExpertStack, name: str, engine: Engine) -> None:
    """Say once per distinct layer which kernel runs it and why."""
    choice = part.choice
    if choice.spec in _logged:
        return
    _logged.add(choice.spec)
    engine.log.info("%s (%s) runs on %s; runner-up %s", name, choice.spec, choice.best.name, choice.lost_because)
    if choice.degraded and choice.nearest_fast is not None:
        engine.log.warning("%s (%s) is emulated: %s refused it, %s", name, choice.spec, choice.nearest_fast.name,
                           choice.nearest_fast.verdict.reason)  # fmt: skip


def check_packed(part: QuantLinear | ExpertStack, weight: QuantizedWeight, name: str, engine: Engine) -> None:
    """Compare a packed layer with the reference on random input. A BitlineError names the layer that is off."""
    for check in check_layer(part, weight, name):
        if not check.ok:
            raise BitlineError(
                f"BITLINE_VERIFY: {name} differs from the reference", found=f"{check.error:.3g} at M={check.m} on {check.kernel}",
                expected=f"at most {check.allowed:.3g}", fix=f"BITLINE_DISABLED_KERNELS={check.kernel} takes another kernel",
            )  # fmt: skip
    engine.log.debug("%s agrees with the reference", name)
