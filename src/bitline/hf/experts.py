"""`experts_implementation="bitline"`: transformers' unquantized experts modules by the loop of QuantExperts."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from bitline.experts import loop_over_experts


def experts_forward(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Run an unquantized experts module of transformers as QuantExperts runs quantized ones: the active experts one by one,
    results weighted and summed in float32.

    Quantized experts are QuantExperts modules and run as such whatever the implementation is called; this is for layers that a
    checkpoint leaves unquantized.

    Args:
        module: With `gate_up_proj` or `up_proj` and `down_proj` [E, N, K], or [E, K, N] where it `is_transposed`.
        hidden: [T, K].
        index: [T, k], each token's experts; E stands for none.
        weights: [T, k].

    Returns:
        [T, N] in hidden's dtype.
    """
    up, gate = ("gate_up_proj", module._apply_gate) if module.has_gate else ("up_proj", module.act_fn)

    def project(name: str, expert: int, x: Tensor) -> Tensor:
        weight = getattr(module, name)[expert]
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        return linear(x, weight.t() if module.is_transposed else weight, bias)

    def run(expert: int, rows: Tensor) -> Tensor:
        y = project("down_proj", expert, gate(project(up, expert, rows)))
        return module.post_expert_norm(y) if module.has_post_expert_norm else y

    return loop_over_experts(hidden, index, weights, module.num_experts, run)
