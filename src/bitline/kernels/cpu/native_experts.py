"""The experts of a mixture-of-experts layer on the native core: all of them in one call (csrc/experts.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from bitline import native
from bitline.errors import BitlineError, InputError
from bitline.expert_gate import ExpertGate

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # csrc/gemm.h: enum Dtype
FAILURES = {-1: "it was packed by another version", -2: "no memory", -3: "no kernel for this level of CPU features"}
_ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}  # csrc/experts.h: enum Activation
ExpertsCall = ctypes.c_int64 * 17  # csrc/experts.h: ExpertsCall


def apply_experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    n: int, gate: ExpertGate,
) -> Tensor:  # fmt: skip
    """Run all experts.

    Args:
        x: [T, K], contiguous.
        index: [T, k], integers; E stands for no expert.
        weights: [T, k].
        up, down: Packed weights, uint8 [E, bytes].
        up_bias, down_bias: [E, N] in x's dtype, or None.
        n: N of the down projection.
        gate: What is computed between the projections.

    Returns:
        y [T, N] in x's dtype.

    Raises:
        InputError: Where an expert's number is out of range.
        BitlineError: Where the core is missing or refuses the weights.
    """
    core = native.core()
    if core is None:
        raise BitlineError("weights packed for the native core cannot run without it", found=native.why_not(),
                           expected="the native core")  # fmt: skip
    tokens, top_k = index.shape
    y, results = x.new_empty(tokens, n), x.new_empty(tokens * top_k, n)
    index, weights = index.to(torch.int64).contiguous(), weights.float().contiguous()
    biases = [None if b is None else b.contiguous() for b in (up_bias, down_bias)]
    fields = fields_of_experts(up, biases[0], down, biases[1], tokens, top_k, x.dtype, gate)
    pointers = [t.data_ptr() for t in (x, y, index, weights, results)]
    failed = core.experts(ExpertsCall(*pointers, *fields), gate.alpha, gate.limit)
    if failed:
        _raise(failed, index, up.shape[0])
    return y


def fields_of_experts(
    up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, tokens: int, top_k: int, dtype: torch.dtype,
    gate: ExpertGate,
) -> tuple[int, ...]:  # fmt: skip
    """The fields of ExpertsCall behind the first five, which point to x, y, index, weights and results. Biases are contiguous."""
    return (
        up.data_ptr(), _address(up_bias), down.data_ptr(), _address(down_bias), up.stride(0), down.stride(0),
        tokens, top_k, up.shape[0], DTYPE_CODES[dtype], _ACTIVATION_CODES[gate.activation], int(gate.gated),
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _raise(failed: int, index: Tensor, experts: int) -> None:
    if failed == -5:
        low, high = index.aminmax()
        raise InputError("an expert's number is out of range", found=f"{int(low)}..{int(high)}", expected=f"0..{experts - 1}")
    reason = {**FAILURES, -4: "their shapes do not fit"}[failed]
    raise BitlineError("the native core cannot run packed experts", found=reason)
