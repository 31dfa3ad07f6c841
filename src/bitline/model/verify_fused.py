"""Verification of what a model runs as one call: all experts of a layer, and one token through a decoder layer on a CPU.

The layers inside are verified on their own (`model/verify.py`); here the call around them is compared with float64, and may be
off by twice as much as the same layers called one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from bitline.errors import summary_of
from bitline.experts import ExpertStack, QuantExperts, loop_over_experts
from bitline.linear import QuantLinear
from bitline.model.decoder_layer import decode_token
from bitline.model.kv_cache import kv_cache_layer_class
from bitline.model.layer_check import LayerCheck, fault_of
from bitline.model.module_snapshot import snapshot
from bitline.parallel import RowParallel
from bitline.testing.tolerance import compare_outputs, in_order_linear, reference64, torch_linear
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

DECODE_STEP = "native decode step"  # in the place of a kernel's name
MAX_EXPERTS = 16  # of a layer that tokens are sent to: each is dequantized
_TOKENS = 4  # decoded one by one, each after the same positions
_POSITIONS = 33  # in the KV cache before them: more than one of the native attention's blocks
_INPUT_SCALE = 2.0**-5  # norms undo it, so that the residual does not hide what is added to it

Read = Callable[..., QuantizedWeight]


# ---- all experts of a layer ----------------------------------------------------------------------------------------------


def check_experts(
    experts: QuantExperts, read_up: Read, read_down: Read, name: str, top_k: int, batch_sizes: tuple[int, ...] = (1, 17)
) -> Iterator[LayerCheck]:
    """Compare the one call of experts with the loop over experts in float64, at each M.

    read_up, read_down: read the canonical weight of an expert's projections, `read(expert=e)`. Random tokens are sent to at most
    MAX_EXPERTS of the experts, the first and the last among them. Nothing where the experts are not one call.
    """
    up = experts.up[0]
    if not experts.is_one_call or not isinstance(up, ExpertStack):
        return
    kernel, count = up.choice.best.name, experts.num_experts
    g = torch.Generator().manual_seed(count)
    others = torch.randperm(max(0, count - 2), generator=g)[: MAX_EXPERTS - 2] + 1
    used = torch.tensor(sorted({0, count - 1, *others.tolist()}))
    layers = {e: (read_up(expert=e), read_down(expert=e)) for e in used.tolist()}
    for m in batch_sizes:
        x = torch.randn(m, up.spec.k, generator=g).to(up.spec.act_dtype)
        index = used[torch.rand(m, len(used), generator=g).topk(min(top_k, len(used)), 1).indices]
        weights = torch.rand(index.shape, generator=g)
        on_device = x.to(up.device), index.to(up.device), weights.to(up.device)
        try:
            with torch.inference_mode():
                y = QuantExperts.forward(experts, *on_device).cpu()  # without hooks: on a rank they add up all ranks' results
                apart = loop_over_experts(*on_device, count, experts._expert).cpu()
        except Exception as error:  # of a kernel: of torch, Triton or another package
            yield fault_of(name, kernel, summary_of(error))
            return
        exact = _exact_experts(experts, layers, x, index, weights)
        found = compare_outputs(y, exact, apart, *_loops(experts, layers, x, index, weights))
        yield LayerCheck(name, kernel, m, found.error, found.allowed, found.nmse, found.cosine)


def _loops(experts: Any, layers: Mapping[int, tuple[QuantizedWeight, QuantizedWeight]], *inputs: Tensor) -> Iterator[Tensor]:
    """The loop over experts with torch's linear in x's dtype; in float32 also with one accumulator (`baseline_error`)."""
    x, index, weights = inputs
    nudges = _nudges(down.spec for _, down in layers.values())
    for linear in (torch_linear, in_order_linear)[: 2 if x.dtype == torch.float32 else 1]:
        for nudge in nudges if linear is torch_linear else nudges[:1]:
            between = lambda h, nudge=nudge: _nudged(experts.gate(h), nudge)
            run = lambda e, rows, f=linear, between=between: f(between(f(rows, layers[e][0])), layers[e][1])
            yield loop_over_experts(x, index, weights, experts.num_experts, run)


def _nudges(specs: Iterable[LinearSpec]) -> tuple[int, ...]:
    """Units in the last place by which what is quantized inside of a fused call is moved for a baseline.

    Where activations are quantized, the last bit of a value decides on its code. One computation alone says little about how far
    such a jump moves the output.
    """
    return (0, 1, -1, 2) if any(spec.act is not None for spec in specs) else (0,)


def _exact_experts(
    experts: Any, layers: Mapping[int, tuple[QuantizedWeight, QuantizedWeight]], x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:  # fmt: skip
    """float64 [T, N]."""
    out = torch.zeros(x.shape[0], next(iter(layers.values()))[1].spec.n, dtype=torch.float64)
    for e, (up, down) in layers.items():
        rows, slots = (index == e).nonzero(as_tuple=True)
        y = reference64(experts.gate(reference64(x[rows], up)), down)
        out.index_add_(0, rows, weights[rows, slots].double().unsqueeze(1) * y)
    return out


# ---- one token through a decoder layer -----------------------------------------------------------------------------------


def check_decode_step(layer: Any, reads: Mapping[str, Read], name: str) -> Iterator[LayerCheck]:
    """Compare one token through a decoder layer's native step with the layer's own modules in float64.

    The output, on a tensor-parallel rank its own part of it, and the key and value that are appended to the KV cache, after 33
    random positions. reads: the canonical weights
    of its linear layers, by their names in it. Nothing where the native step would hand over to the modules.
    """
    inputs, cache = _Inputs(layer), _Caches(layer)
    fast: list[tuple[Tensor, ...]] = []
    for x in inputs.tokens:
        held = cache.filled(inputs.keys, inputs.values)
        with torch.inference_mode():
            y = decode_token(layer, x, inputs.rotation, held, alone=True)
        if y is None:
            return
        fast.append((y, *cache.last(held)))
    restore = snapshot(layer)
    try:
        _remove_native_forwards(layer)
        nudges = _nudges(part.spec for part in layer.modules() if isinstance(part, QuantLinear))
        own = [[_by_modules(layer, cache, inputs, _nudged(x, nudge), torch.bfloat16) for x in inputs.tokens] for nudge in nudges]
        _make_exact(layer, reads)
        exact = _by_modules(layer, cache, inputs, torch.cat(inputs.tokens), torch.float64)
    finally:
        restore()
    checks = []
    for i in range(3):  # output, key, value
        mine, *modules = (torch.cat([token[i] for token in tokens]).flatten(1) for tokens in (fast, *own))
        found = compare_outputs(mine, exact[i].flatten(1), *modules)
        checks.append(LayerCheck(name, DECODE_STEP, 1, found.error, found.allowed, found.nmse, found.cosine))
    yield max(checks, key=lambda check: check.badness)


def _nudged(x: Tensor, units: int) -> Tensor:
    return x * (1 + units * torch.finfo(x.dtype).eps)


class _Inputs:
    """Random tokens, keys and values for a decoder layer, and the rotation of one position."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        g, dim = torch.Generator().manual_seed(0), attention.head_dim
        make = lambda *shape: torch.randn(*shape, generator=g)
        hidden, kv_heads = attention.q_proj.in_features, attention.k_proj.out_features // dim
        self.tokens = [(make(1, 1, hidden) * _INPUT_SCALE).to(torch.bfloat16) for _ in range(_TOKENS)]
        self.keys, self.values = (make(1, kv_heads, _POSITIONS, dim).to(torch.bfloat16) for _ in range(2))
        angle = (make(dim // 2) * math.pi).repeat(2).view(1, 1, dim)
        self.rotation = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)


class _Caches:
    """KV caches that a decoder layer finds its part of."""

    def __init__(self, layer: Any) -> None:
        self.index = layer.self_attn.layer_idx

    def filled(self, keys: Tensor, values: Tensor) -> Any:
        """A cache with these positions."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        cache.layers = [kv_cache_layer_class()() for _ in range(self.index + 1)]
        cache.layers[self.index].update(keys, values)
        return cache

    def last(self, cache: Any) -> tuple[Tensor, Tensor]:
        """Key and value of the last position."""
        held = cache.layers[self.index]
        return held.keys[:, :, -1], held.values[:, :, -1]


def _remove_native_forwards(layer: Any) -> None:
    """Let the layer and its norms run their classes' own code, without sums over tensor-parallel ranks."""
    for part in layer.modules():
        part.__dict__.pop("forward", None)
        if isinstance(part, RowParallel):
            part.forward = MethodType(_own_part, part)  # type: ignore[method-assign]


def _own_part(layer: RowParallel, x: Tensor) -> Tensor:
    """What a rank adds to the sum."""
    y: Tensor = layer.linear(x)
    return y


def _by_modules(layer: Any, cache: _Caches, inputs: _Inputs, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Output, key and value of each of a batch of tokens by the layer's modules, in a dtype."""
    keys, values, x, *rotation = (t.to(dtype) for t in (inputs.keys, inputs.values, x, *inputs.rotation))
    held = cache.filled(*(t.expand(x.shape[0], -1, -1, -1) for t in (keys, values)))
    with torch.inference_mode():
        y = layer(x, attention_mask=None, past_key_values=held, use_cache=True, position_embeddings=tuple(rotation))
    return (y[0] if isinstance(y, tuple) else y, *cache.last(held))


class _ExactLinear(nn.Module):
    """x [..., K] -> [..., N] in float64."""

    def __init__(self, weight: QuantizedWeight, layer: QuantLinear) -> None:
        super().__init__()
        bias = layer._buffers["bias"]
        self.weight = weight.with_bias(None if bias is None else bias.cpu())

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return reference64(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def _make_exact(layer: Any, reads: Mapping[str, Read]) -> None:
    """Give the layer dequantized weights and norms in float64."""
    for name, part in [*layer.named_modules()]:
        if isinstance(part, QuantLinear):
            owner, _, leaf = name.rpartition(".")
            weight = reads[name]().with_act_dtype(part.spec.act_dtype)
            setattr(layer.get_submodule(owner), leaf, _ExactLinear(weight, part))
        for leaf, tensor in part._parameters.items():
            part._parameters[leaf] = None if tensor is None else nn.Parameter(tensor.double(), requires_grad=False)
