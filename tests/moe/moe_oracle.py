"""transformers' models as the reference: the dequantized weights, and inputs quantized as the checkpoint's scheme says."""

from __future__ import annotations

from collections import defaultdict
from types import MethodType
from typing import Any

import torch
from moe_models import Matrix
from torch import Tensor
from torch.nn.functional import linear

from bitline.act_quant import fake_quantize
from bitline.weight import QuantizedWeight


def quantize_inputs(weights: list[tuple[Matrix, QuantizedWeight]]) -> None:
    """Have modules quantize and dequantize the inputs of layers whose scheme quantizes activations."""
    experts: dict[Any, dict[tuple[int, int], QuantizedWeight]] = defaultdict(dict)
    for matrix, weight in weights:
        if weight.spec.act is None:
            continue
        if matrix.expert is None:
            matrix.owner.register_forward_pre_hook(lambda _module, args, w=weight: (_rounded(args[0], w),))
        else:
            experts[matrix.owner][matrix.expert, matrix.part] = weight
    for module, found in experts.items():
        module.forward = MethodType(_forward, module)
        module.weights_of_scheme = found


def _forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The experts' forward, expert by expert. Rounding of inputs jumps, so products have to have the same bits as Bitline's."""
    found, out = self.weights_of_scheme, torch.zeros_like(hidden)
    for e in index.unique().tolist():
        token, k = torch.where(index == e)
        halves = zip((found[e, 0], found.get((e, 1), found[e, 0])), self.gate_up_proj[e].chunk(2), strict=True)
        gate, up = (linear(_rounded(hidden[token], w), half) for w, half in halves)
        y = linear(_rounded(self.act_fn(gate) * up, found[e, 2]), self.down_proj[e])
        out.index_add_(0, token, y * weights[token, k, None])
    return out


def _rounded(x: Tensor, weight: QuantizedWeight) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return fake_quantize(flat, weight.spec.act, weight.input_scale, weight.input_zero).view(x.shape)
