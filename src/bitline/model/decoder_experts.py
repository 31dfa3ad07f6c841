"""The MLP of a decoder layer with experts as native code computes it for one token (csrc/routed_mlp.cpp): router, experts and
shared expert, of Qwen2-MoE, Qwen3-MoE, Mixtral and all with the same code.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitline.experts import QuantExperts
from bitline.kernels.cpu.native_experts import ExpertsCall, fields_of_experts
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel
from bitline.model.known_modules import is_known_mlp, module_kind
from bitline.model.native_parts import is_modified, packed_linear, readable_weight


class _LinearLayer(ctypes.Structure):
    """csrc/routed_mlp.h: LinearLayer."""

    _fields_ = (("weight", ctypes.c_int64), ("bias", ctypes.c_int64), ("plain", ctypes.c_int64))


class RoutedMlp(ctypes.Structure):
    """csrc/routed_mlp.h: RoutedMlp."""

    _fields_ = (
        ("router", ctypes.c_int64), ("renormalize", ctypes.c_int64), ("round_weights", ctypes.c_int64), ("experts", ExpertsCall),
        ("alpha", ctypes.c_double), ("limit", ctypes.c_double), ("shared_router", ctypes.c_int64), ("shared", _LinearLayer * 3),
        ("shared_intermediate", ctypes.c_int64),
    )  # fmt: skip


class DescribedExperts(NamedTuple):
    """What native code needs of an MLP with experts. tensors: weights and biases behind the addresses in `fields`."""

    fields: RoutedMlp
    tensors: list[Tensor]


class _Shared(NamedTuple):
    """A shared expert: its gate's weight, its layers and their N."""

    router: Tensor
    layers: list[_LinearLayer]
    intermediate: int
    tensors: list[Tensor]


def described_experts(mlp: Any, hidden: int) -> DescribedExperts | None:
    """The MLP of a decoder layer for one token; None where it, or a part of it, is not what native code computes."""
    kind = module_kind(mlp)
    if kind not in ("routed_mlp", "routed_mlp_shared") or is_modified(mlp) or mlp.training:
        return None
    router, experts = mlp._modules["gate"], mlp._modules["experts"]
    if type(experts) is not QuantExperts or is_modified(experts):
        return None
    one_call, weight = experts.one_call, _router_weight(router, experts.num_experts, hidden)
    if one_call is None or weight is None or one_call.kernel is not CPUWNA16LinearKernel:
        return None
    up, down, gate = one_call.up, one_call.down, one_call.gate
    biases = [bias for bias in (up.bias, down.bias) if bias is not None]
    if up.device.type != "cpu" or not all(bias.is_contiguous() for bias in biases):
        return None
    tensors = [weight, up.packed[0], down.packed[0], *biases]
    if (up.spec.act_dtype, up.spec.k, down.spec.n) != (torch.bfloat16, hidden, hidden):
        return None
    fields = RoutedMlp(router=weight.data_ptr(), alpha=gate.alpha, limit=gate.limit)
    # transformers' Mixtral keeps weights in float32 and always divides them by their sum.
    is_mixtral = module_kind(router) == "router_float32"
    fields.renormalize, fields.round_weights = int(is_mixtral or bool(router.norm_topk_prob)), int(not is_mixtral)
    of_experts = fields_of_experts(up.packed[0], up.bias, down.packed[0], down.bias, 1, router.top_k, torch.bfloat16, gate)
    fields.experts = ExpertsCall(0, 0, 0, 0, 0, *of_experts)
    if kind == "routed_mlp_shared":
        shared = _described_shared(mlp._modules, hidden)
        if shared is None:
            return None
        fields.shared_router, fields.shared_intermediate = shared.router.data_ptr(), shared.intermediate
        fields.shared = (_LinearLayer * 3)(*shared.layers)
        tensors += shared.tensors
    return DescribedExperts(fields, tensors)


def _router_weight(router: Any, num_experts: int, hidden: int) -> Tensor | None:
    """A known router's matrix [E, hidden]."""
    if module_kind(router) not in ("router", "router_float32") or is_modified(router):
        return None
    weight, top_k = readable_weight(router), router.top_k
    if weight is None or weight.shape != (num_experts, hidden) or router.hidden_dim != hidden:
        return None
    return weight if isinstance(top_k, int) and 1 <= top_k <= num_experts else None


def _described_shared(modules: Any, hidden: int) -> _Shared | None:
    """The shared expert of an MLP's modules."""
    mlp, gate = modules["shared_expert"], modules["shared_expert_gate"]
    if not is_known_mlp(mlp) or is_modified(mlp) or is_modified(mlp._modules["act_fn"]):
        return None
    router = _plain_weight(gate)
    if router is None or router.shape != (1, hidden):
        return None
    layers, tensors, sizes = [], [router], []
    for name in ("gate_proj", "up_proj", "down_proj"):
        linear = mlp._modules[name]
        weight, bias, plain = _plain_weight(linear), None, 1
        if weight is None:
            packed = packed_linear(linear)
            if packed is None:
                return None
            weight, bias, plain = packed[0], packed[1], 0
        layers.append(_LinearLayer(weight.data_ptr(), 0 if bias is None else bias.data_ptr(), plain))
        tensors += [weight] if bias is None else [weight, bias]
        sizes.append((linear.out_features, linear.in_features))
    intermediate = sizes[0][0]
    if sizes != [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]:
        return None
    return _Shared(router, layers, intermediate, tensors)


def _plain_weight(linear: Any) -> Tensor | None:
    """The weight of an unquantized linear layer without a bias."""
    if type(linear) is not nn.Linear or linear.bias is not None or is_modified(linear):
        return None
    weight = readable_weight(linear)
    return weight if weight is not None and weight.shape == (linear.out_features, linear.in_features) else None
