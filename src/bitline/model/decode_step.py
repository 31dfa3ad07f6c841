"""A decoder's forward for one token on a CPU, in native code.

For one token transformers makes some twenty calls from Python to torch in each layer, which take longer than the linear layers
of a small model. Here a decoder layer is one native call (csrc/decode_step.cpp), and so are the last norm and an unquantized LM
head, in bfloat16. The model keeps its modules and their code: an instance gets a native `forward`, which hands over to the
class's own one whenever a call is not exactly such a step.

A class is recognized by the hash of its forward's source, so a version of transformers that computes something else runs its own
code. `load_model(..., native_step=False)` leaves a model without native forwards, for users who need every torch operation.

Of tensor-parallel ranks on one machine each computes its heads and channels, and the native call sums the outputs of o_proj and
down_proj over the ranks.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import inspect
import sys
import textwrap
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from bitline import native
from bitline.kernels.cpu.native_linear import OP
from bitline.linear import QuantLinear, needs_dispatcher
from bitline.model.kv_cache import kv_cache_layer_class
from bitline.parallel import GatherOutput, RowParallel
from bitline.parallel.shared_memory import SharedGather

MAX_NORM_ROWS = 8  # above that torch's own operators are as fast
MIN_LM_HEAD = 1 << 20  # weights of an unquantized LM head that is worth a native call

# SHA-256 of known function bodies, unparsed from their syntax trees: without comments, docstrings and annotations.
_KNOWN_BODIES = {
    "50b8139e32eaccc8": "rms_norm", "5b8abf7af12a4b42": "mlp", "b139d1b607c01194": "decoder_layer",
    "edb09e4cdb72174c": "attention", "ea92a9846ca1ecb5": "attention", "992c57d97163d600": "attention",  # Llama, Mistral, Qwen2
    "457e3a53f1f0cfb6": "attention_qk_norm",  # Qwen3
    "257620718ecff20c": "apply_rotary_pos_emb", "b92c1a98279c25d0": "rotate_half",
    "673f5d551ea25302": "causal_lm",  # its logits are the head's output
}  # fmt: skip
_LINEARS = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))
_SUMMED = ("o_proj", "down_proj")  # over tensor-parallel ranks
_LOST = -5  # csrc/ranks.h: kLost
_DecoderLayer = ctypes.c_int64 * 32  # csrc/decode_step.h: DecoderLayer


def install(model: Any) -> int:
    """Give known modules of a model a native forward; returns how many got one, 0 without the native core."""
    if native.core() is None:
        return 0
    installed = 0
    lm_head = getattr(model, "get_output_embeddings", lambda: None)()
    lm_head = lm_head.linear if isinstance(lm_head, GatherOutput) else lm_head
    for module in model.modules():
        kind = _module_kind(module)
        if module is lm_head and type(module) is nn.Linear:
            forward: Any = _lm_head_forward
        elif kind == "rms_norm":
            forward = _rms_norm_forward
        elif is_known_layer(module):
            forward = _decoder_layer_forward
        else:
            continue
        if "forward" not in module.__dict__:
            module.forward = MethodType(forward, module)
            installed += 1
    return installed


def has_native_step(module: Any) -> bool:
    """Whether `install` gave a decoder layer its native forward."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is _decoder_layer_forward


def _replace_empty_cache_layer(layer: Any, x: Tensor, cache: Any) -> None:
    """Give the layer of a DynamicCache that nothing is in yet, for one sequence, the buffers that native steps append to."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if type(cache) is not DynamicCache or x.shape[0] != 1 or layer.training or not _is_plain_input(x):
        return
    layers, index = cache.layers, getattr(layer._modules.get("self_attn"), "layer_idx", None)
    if index is None or index >= len(layers) or getattr(cache, "offloading", False):
        return
    if type(layers[index]) is DynamicLayer and not layers[index].is_initialized:
        layers[index] = kv_cache_layer_class()()


# ---- which modules are known ---------------------------------------------------------------------------------------------


def _module_kind(module: Any) -> str:
    """What a module of transformers computes, a value of _KNOWN_BODIES; "" where its source is not known."""
    cls: Any = type(module)
    return _class_kind(cls)


@functools.cache
def _class_kind(cls: Any) -> str:
    if cls.__module__.partition(".")[0] != "transformers":
        return ""
    kind = _KNOWN_BODIES.get(_body_hash(cls.forward), "")
    if kind.startswith("attention"):  # its forward calls these two
        names = sys.modules[cls.forward.__module__].__dict__
        if any(_KNOWN_BODIES.get(_body_hash(names.get(name))) != name for name in ("apply_rotary_pos_emb", "rotate_half")):
            return ""
    return kind


def returns_output_of_head(model: Any) -> bool:
    """Whether a model's logits are known to be what its head returns."""
    cls: Any = type(model)
    known = cls.__module__.partition(".")[0] == "transformers" and "forward" not in model.__dict__
    return known and _KNOWN_BODIES.get(_body_hash(inspect.unwrap(cls.forward))) == "causal_lm"


def _body_hash(function: Any) -> str:
    """The hash of a function's body; "" where it has no source, or where another function wraps it."""
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:  # transformers' gradient checkpointing, which acts in training only
        code = getattr(function, "__code__", None)
        if code is None or code.co_name != "forward_with_checkpointing":
            return ""
        function = inner
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return ""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, TypeError):
        return ""
    assert isinstance(node, ast.FunctionDef)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return hashlib.sha256("\n".join(map(ast.unparse, body)).encode()).hexdigest()[:16]


def is_known_layer(layer: Any) -> bool:
    """Whether a module is a decoder layer that native code can compute, and its parts are known too."""
    if _module_kind(layer) != "decoder_layer":
        return False
    parts = [layer._modules.get(name) for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")]
    if any(part is None for part in parts):
        return False
    attention, mlp, *norms = parts
    return _are_known(attention, mlp) and all(_module_kind(norm) == "rms_norm" for norm in norms)


def _are_known(attention: Any, mlp: Any) -> bool:
    return (
        _module_kind(attention).startswith("attention")
        and _module_kind(mlp) == "mlp"
        and type(mlp._modules.get("act_fn")) in _silu_classes()
    )


@functools.cache
def _silu_classes() -> tuple[type, ...]:
    from transformers.activations import SiLUActivation

    return nn.SiLU, SiLUActivation


# ---- checks of each call -------------------------------------------------------------------------------------------------


def _is_readable(x: Any) -> bool:
    """Whether native code may read it: a plain, contiguous bfloat16 CPU tensor."""
    return type(x) is Tensor and x.dtype is torch.bfloat16 and x.is_cpu and x.is_contiguous()


def _is_plain_input(x: Tensor) -> bool:
    """Whether native code may read it and nothing observes torch's operators: no autograd, tracing, compiling or profiling."""
    return _is_readable(x) and not torch.is_grad_enabled() and not needs_dispatcher(x)


def _readable_weight(module: nn.Module) -> Tensor | None:
    """A module's weight where native code may read it."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype is not torch.bfloat16 or not weight.is_cpu or not weight.is_contiguous():
        return None
    return weight


def _is_modified(module: Any, own_forward: Any = None) -> bool:
    """Whether a module has hooks, or a forward on the instance that is not `own_forward`."""
    attributes = module.__dict__
    if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
        return True
    return "forward" in attributes and (
        own_forward is None or getattr(attributes["forward"], "__func__", None) is not own_forward
    )


# ---- the native forwards -------------------------------------------------------------------------------------------------


def _rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm of up to MAX_NORM_ROWS rows: weight * x / sqrt(mean(x^2) + epsilon)."""
    weight, core = _readable_weight(self), native.core()
    if weight is not None and core is not None and _is_plain_input(hidden_states):
        n = weight.numel()
        rows = hidden_states.numel() // n
        if hidden_states.shape[-1:] == weight.shape and rows <= MAX_NORM_ROWS:
            y = torch.empty_like(hidden_states)
            core.rms_norm(hidden_states.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, n, self.variance_epsilon)
            return y
    y_torch: Tensor = type(self).forward(self, hidden_states)
    return y_torch


def _lm_head_forward(self: Any, input: Tensor) -> Tensor:
    """x @ W.T of a large unquantized LM head, for one row."""
    weight, core = _readable_weight(self), native.core()
    if (
        weight is not None and core is not None and self.bias is None and weight.numel() >= MIN_LM_HEAD and _is_plain_input(input)
        and input.numel() == input.shape[-1] == weight.shape[1]
    ):  # fmt: skip
        n, k = weight.shape
        y = input.new_empty(*input.shape[:-1], n)
        if core.gemv_bf16(input.data_ptr(), weight.data_ptr(), y.data_ptr(), n, k) == 0:
            return y
    return nn.Linear.forward(self, input)


def _decoder_layer_forward(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
    use_cache: Any = False, position_embeddings: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """One token through a decoder layer; its key and value are appended to a KV cache of `KVCacheLayer`s.

    An empty DynamicCache, as transformers' `generate` and Bitline's make it, gets such layers with the prompt.
    """
    if past_key_values is not None:
        _replace_empty_cache_layer(self, hidden_states, past_key_values)
    if attention_mask is None and past_key_values is not None and position_embeddings is not None and not kwargs:
        y = decode_token(self, hidden_states, position_embeddings, past_key_values)
        if y is not None:
            return y
    y_torch: Tensor = type(self).forward(
        self, hidden_states, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
        use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
    )  # fmt: skip
    return y_torch


def decode_token(self: Any, x: Tensor, position_embeddings: Any, cache: Any, *, alone: bool = False) -> Tensor | None:
    """A decoder layer's output for one token; None where transformers has to compute it, and then nothing has changed.

    alone: of a tensor-parallel rank, without the sums over ranks.
    """
    core, (cos, sin) = native.core(), position_embeddings
    if core is None or not _is_decode_input(self, x, cos, sin):
        return None
    modules = self._modules
    attention, mlp = modules["self_attn"], modules["mlp"]
    if not _are_known(attention, mlp):
        return None
    kv_cache = _native_kv_cache(attention, cache)
    if kv_cache is None or _is_modified(attention) or _is_modified(mlp) or _is_modified(mlp._modules["act_fn"]):
        return None
    linears = _packed_linears(modules)
    if linears is None:
        return None
    pointers, (q_size, kv_size, _, _, intermediate, *_), shared = linears
    head_dim, hidden = attention.head_dim, x.shape[-1]
    kv_heads, q_per_kv = kv_size // head_dim, q_size // kv_size
    norms = _norm_weights(modules, attention, hidden, head_dim)
    if norms is None:
        return None
    norm_pointers, epsilons = norms
    if cos.numel() != head_dim or sin.numel() != head_dim or head_dim % 16 or head_dim > 256 or not 1 <= q_per_kv <= 32:
        return None
    if not kv_cache.reserve(kv_heads, head_dim, x.dtype, 1):
        return None
    keys, values = kv_cache.buffers
    y = torch.empty_like(x)
    layer = _DecoderLayer(
        x.data_ptr(), y.data_ptr(), *norm_pointers, cos.data_ptr(), sin.data_ptr(), keys.data_ptr(), values.data_ptr(), *pointers,
        hidden, kv_heads, q_per_kv, head_dim, keys.shape[2], kv_cache.length, intermediate,
        0 if shared is None or alone else shared.address,
    )  # fmt: skip
    if failed := core.decode_layer(ctypes.addressof(layer), attention.scaling, *epsilons):
        if failed == _LOST and shared is not None:
            shared.check(failed)
        return None
    kv_cache.length += 1
    return y


def _is_decode_input(layer: Any, x: Tensor, cos: Any, sin: Any) -> bool:
    """One row that native code may read, outside of training, with no global hooks that want to see the layer's modules."""
    if not _is_plain_input(x) or x.numel() != x.shape[-1] or x.dim() != 3 or layer.training:
        return False
    return _is_readable(cos) and _is_readable(sin) and not _module._global_forward_hooks and not _module._global_forward_pre_hooks


def _native_kv_cache(attention: Any, cache: Any) -> Any:
    """The layer's KVCacheLayer; None where the cache is of another kind."""
    layers, index = getattr(cache, "layers", ()), attention.layer_idx
    if index is None or index >= len(layers) or type(layers[index]) is not kv_cache_layer_class():
        return None
    return layers[index]


def _packed_linears(modules: Any) -> tuple[list[int], list[int], SharedGather | None] | None:
    """Addresses of packed weight and bias of each linear layer, in _LINEARS' order, their N, and what sums outputs over ranks;
    None where one of them does not run the native kernel directly.
    """
    pointers: list[int] = []
    sizes: list[int] = []
    sums: list[SharedGather | None] = []
    for owner, names in _LINEARS:
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
            if type(linear) is not QuantLinear or _is_modified(linear):
                return None
            spec, direct = linear.choice.spec, linear._direct
            if direct is None or direct[0] is not OP or linear._multiplier is not None or spec.act_dtype is not torch.bfloat16:
                return None
            weight, bias, n = direct[1]
            pointers += (weight.data_ptr(), 0 if bias is None else bias.data_ptr())
            sizes.append(n)
    return (pointers, sizes, sums[0]) if sums[0] is sums[1] else None


def _native_sum(layer: RowParallel) -> SharedGather | None:
    """What sums a row-parallel layer's output in native code, where it is such a sum and no more."""
    return None if _is_modified(layer) or layer.scales is not None or layer.bias is not None else layer.tp.shared


def _norm_weights(
    modules: Any, attention: Any, hidden: int, head_dim: int
) -> tuple[list[int], tuple[float, float, float]] | None:
    """Addresses of the weights of input, post-attention, query and key norm (0: none), and the epsilons of the first two and of
    the last two; None where one of them is not a known RMSNorm of its size.
    """
    norms = [modules["input_layernorm"], modules["post_attention_layernorm"]]
    sizes = [hidden, hidden]
    qk_epsilon = 0.0
    if _module_kind(attention) == "attention_qk_norm":
        norms += attention._modules["q_norm"], attention._modules["k_norm"]
        sizes += head_dim, head_dim
        qk_epsilon = norms[2].variance_epsilon
        if norms[3].variance_epsilon != qk_epsilon:
            return None
    pointers = [0] * 4
    for i, norm in enumerate(norms):
        weight = _readable_weight(norm)
        if (
            weight is None
            or weight.numel() != sizes[i]
            or _module_kind(norm) != "rms_norm"
            or _is_modified(norm, _rms_norm_forward)
        ):
            return None
        pointers[i] = weight.data_ptr()
    return pointers, (norms[0].variance_epsilon, norms[1].variance_epsilon, qk_epsilon)
