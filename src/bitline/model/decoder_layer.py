"""One token through a decoder layer on a CPU as one native call (csrc/decode_step.cpp), and the checks that it is what the
layer's modules would compute.

Of tensor-parallel ranks on one machine each computes its heads and channels, and the native call sums the outputs of o_proj and
down_proj over the ranks.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as _module

from bitline import native
from bitline.linear import needs_dispatcher
from bitline.model.decoder_experts import DescribedExperts, described_experts
from bitline.model.known_modules import is_known_attention, is_known_mlp, module_kind
from bitline.model.kv_cache import kv_cache_layer_class
from bitline.model.native_parts import is_modified, packed_linear, readable_weight
from bitline.parallel import RowParallel
from bitline.parallel.shared_memory import SharedGather

MAX_NORM_ROWS = 8  # above that torch's own operators are as fast

_LINEARS = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))
_SUMMED = ("o_proj", "down_proj")  # over tensor-parallel ranks
LOST = -5  # csrc/ranks.h: kLost
LayerFields = ctypes.c_int64 * 33  # csrc/decode_step.h: DecoderLayer
X, Y, COS, SIN, KEYS, VALUES, CAPACITY, POSITION, RANKS, ROUTED = 0, 1, 6, 7, 8, 9, 28, 29, 31, 32  # of them


def _is_readable(x: Any) -> bool:
    """Whether native code may read it: a plain, contiguous bfloat16 CPU tensor."""
    return type(x) is Tensor and x.dtype is torch.bfloat16 and x.is_cpu and x.is_contiguous()


def is_plain_input(x: Tensor) -> bool:
    """Whether native code may read it and nothing observes torch's operators: no autograd, tracing, compiling or profiling."""
    return _is_readable(x) and not torch.is_grad_enabled() and not needs_dispatcher(x)


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm of up to MAX_NORM_ROWS rows: weight * x / sqrt(mean(x^2) + epsilon)."""
    weight, core = readable_weight(self), native.core()
    if weight is not None and core is not None and is_plain_input(hidden_states):
        n = weight.numel()
        rows = hidden_states.numel() // n
        if hidden_states.shape[-1:] == weight.shape and rows <= MAX_NORM_ROWS:
            y = torch.empty_like(hidden_states)
            core.rms_norm(hidden_states.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, n, self.variance_epsilon)
            return y
    y_torch: Tensor = type(self).forward(self, hidden_states)
    return y_torch


def decode_token(self: Any, x: Tensor, position_embeddings: Any, cache: Any, *, alone: bool = False) -> Tensor | None:
    """A decoder layer's output for one token; None where transformers has to compute it, and then nothing has changed.

    alone: of a tensor-parallel rank, without the sums over ranks.
    """
    core, (cos, sin) = native.core(), position_embeddings
    if core is None or not is_decode_input(self, x, cos, sin):
        return None
    layer = described(self, x.shape[-1], cos.numel()) if cos.numel() == sin.numel() else None
    kv_cache = None if layer is None else native_kv_cache(self._modules["self_attn"], cache)
    if layer is None or kv_cache is None or not kv_cache.reserve(layer.kv_heads, layer.head_dim, x.dtype, 1):
        return None
    keys, values = kv_cache.buffers
    y, fields = x.new_empty(1 if layer.has_mlp else 2, *x.shape), LayerFields(*layer.fields)
    fields[X], fields[Y], fields[COS], fields[SIN] = x.data_ptr(), y.data_ptr(), cos.data_ptr(), sin.data_ptr()
    fields[KEYS], fields[VALUES], fields[CAPACITY] = keys.data_ptr(), values.data_ptr(), keys.shape[2]
    fields[POSITION] = kv_cache.length
    if alone:
        fields[RANKS] = 0
    if failed := core.decode_layer(ctypes.addressof(fields), *layer.scalars):
        if failed == LOST and layer.shared is not None:
            layer.shared.check(failed)
        return None
    kv_cache.length += 1
    if layer.has_mlp:
        return y[0]
    residual, normed = y.unbind(0)
    out: Tensor = residual + self._modules["mlp"](normed)
    return out


class DescribedLayer(NamedTuple):
    """What native code needs of a decoder layer, without what changes from token to token.

    fields: of csrc/decode_step.h's DecoderLayer. scalars: of its LayerScalars. tensors: weights and biases behind the addresses
    in `fields`, and those of the norms. shared: what sums outputs over tensor-parallel ranks. has_mlp: whether native code
    computes the MLP too; else it is called as a module. experts: the MLP, where it is one with experts; `fields` points to it.
    """

    fields: list[int]
    scalars: tuple[float, float, float, float]
    kv_heads: int
    head_dim: int
    tensors: list[Tensor]
    shared: SharedGather | None
    has_mlp: bool
    experts: DescribedExperts | None


def described(layer: Any, hidden: int, rotated: int) -> DescribedLayer | None:
    """A decoder layer for one token; None where a part of it is not what native code computes.

    rotated: channels of a head that are rotated.
    """
    modules = layer._modules
    attention, mlp = modules["self_attn"], modules["mlp"]
    if not is_known_attention(attention) or is_modified(attention):
        return None
    is_dense = is_known_mlp(mlp)
    if is_dense and (is_modified(mlp) or is_modified(mlp._modules["act_fn"])):
        return None
    linears = _packed_linears(modules, is_dense)
    if linears is None:
        return None
    weights, (q_size, kv_size, _, _, *rest), shared = linears
    if not is_dense:
        weights += [None] * 6
    experts = None if is_dense or shared is not None else described_experts(mlp, hidden)
    head_dim = attention.head_dim
    kv_heads, q_per_kv = kv_size // head_dim, q_size // kv_size
    found = _norm_weights(modules, attention, hidden, head_dim)
    if found is None or rotated != head_dim or head_dim % 16 or head_dim > 256 or not 1 <= q_per_kv <= 32:
        return None
    norms, epsilons = found
    fields = [
        0, 0, *map(_address, norms), 0, 0, 0, 0, *map(_address, weights),
        hidden, kv_heads, q_per_kv, head_dim, 0, 0, rest[0] if is_dense else 0, 0 if shared is None else shared.address,
        0 if experts is None else ctypes.addressof(experts.fields),
    ]  # fmt: skip
    tensors = [t for t in (*norms, *weights, *(() if experts is None else experts.tensors)) if t is not None]
    scalars, has_mlp = (attention.scaling, *epsilons), is_dense or experts is not None
    return DescribedLayer(fields, scalars, kv_heads, head_dim, tensors, shared, has_mlp, experts)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def is_decode_input(layer: Any, x: Tensor, cos: Any, sin: Any) -> bool:
    """One row that native code may read, outside of training, with no global hooks that want to see the layer's modules."""
    if not is_plain_input(x) or x.numel() != x.shape[-1] or x.dim() != 3 or layer.training:
        return False
    return _is_readable(cos) and _is_readable(sin) and not _module._global_forward_hooks and not _module._global_forward_pre_hooks


def native_kv_cache(attention: Any, cache: Any) -> Any:
    """The layer's KVCacheLayer; None where the cache is of another kind, or the attention is."""
    layers, index = getattr(cache, "layers", ()), getattr(attention, "layer_idx", None)
    if index is None or index >= len(layers) or type(layers[index]) is not kv_cache_layer_class():
        return None
    return layers[index]


def _packed_linears(modules: Any, is_dense: bool) -> tuple[list[Tensor | None], list[int], SharedGather | None] | None:
    """Packed weight and bias of each linear layer, in _LINEARS' order, their N, and what sums outputs over ranks; None where one
    of them does not run the native kernel directly.
    """
    tensors: list[Tensor | None] = []
    sizes: list[int] = []
    sums: list[SharedGather | None] = []
    for owner, names in _LINEARS if is_dense else _LINEARS[:1]:
        owned = modules[owner]._modules
        for name in names:
            linear = owned[name]
            if name in _SUMMED:
                shared = None
                if type(linear) is RowParallel:
                    if (shared := _native_sum(linear)) is None:
                        return None
                    linear = linear._modules["linear"]
                sums.append(shared)
            found = packed_linear(linear)
            if found is None:
                return None
            weight, bias, n = found
            tensors += weight, bias
            sizes.append(n)
    return (tensors, sizes, sums[0]) if sums[0] is sums[-1] else None


def _native_sum(layer: RowParallel) -> SharedGather | None:
    """What sums a row-parallel layer's output in native code, where it is such a sum and no more."""
    return None if is_modified(layer) or layer.scales is not None or layer.bias is not None else layer.tp.shared


def _norm_weights(
    modules: Any, attention: Any, hidden: int, head_dim: int
) -> tuple[list[Tensor | None], tuple[float, float, float]] | None:
    """The weights of input, post-attention, query and key norm (None: there is none), and the epsilons of the first two and of
    the last two; None where one of them is not a known RMSNorm of its size.
    """
    norms = [modules["input_layernorm"], modules["post_attention_layernorm"]]
    sizes = [hidden, hidden]
    qk_epsilon = 0.0
    if module_kind(attention) == "attention_qk_norm":
        norms += attention._modules["q_norm"], attention._modules["k_norm"]
        sizes += head_dim, head_dim
        qk_epsilon = norms[2].variance_epsilon
        if norms[3].variance_epsilon != qk_epsilon:
            return None
    weights: list[Tensor | None] = [None] * 4
    for i, norm in enumerate(norms):
        weight = readable_weight(norm)
        if weight is None or weight.numel() != sizes[i] or module_kind(norm) != "rms_norm" or is_modified(norm, rms_norm_forward):
            return None
        weights[i] = weight
    return weights, (norms[0].variance_epsilon, norms[1].variance_epsilon, qk_epsilon)
