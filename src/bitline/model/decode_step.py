"""One token on a CPU: native code for what lies between a decoder's linear layers.

A step of one row is some twenty calls from Python to torch in each layer of transformers' models, which take longer than the
linear layers of a small model. Here a decoder's layer is one native call (csrc/step.cpp), and so are the last norm and a plain
output layer, in bfloat16. The model keeps its modules and their code: an instance gets a forward of ours, which hands over to the
class's own one whenever a call is not exactly such a step.

A class is known by the text of its forward, so that another version of transformers that computes something else is left
alone. Whoever needs every torch operation of a model loads it with `load_model(..., native_step=False)`.
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
from bitline.kernels.cpu.native_cpu import OP
from bitline.linear import QuantLinear, needs_dispatcher

ROWS = 8  # of a norm's input; above that torch's own operators are as fast
LARGE = 1 << 20  # numbers of a plain output layer that is worth a call of ours

# SHA-256 of function bodies, as Python writes them from their syntax trees: without comments, docstrings and annotations.
_TEXTS = {
    "50b8139e32eaccc8": "norm", "5b8abf7af12a4b42": "mlp", "b139d1b607c01194": "layer",
    "edb09e4cdb72174c": "attention", "ea92a9846ca1ecb5": "attention", "992c57d97163d600": "attention",  # Llama, Mistral, Qwen2
    "457e3a53f1f0cfb6": "attention of normed heads",  # Qwen3
    "257620718ecff20c": "rotate", "b92c1a98279c25d0": "half",
}  # fmt: skip
_WEIGHTS = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))
_Layer = ctypes.c_int64 * 31  # csrc/step.h: Layer


def install(model: Any) -> int:
    """Give known modules of a model a native step; how many got one. None where there is no native core."""
    if native.core() is None:
        return 0
    found = 0
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        kind = _kind(module)
        step = _dense if module is head and type(module) is nn.Linear else _norm if kind == "norm" else _layer
        if "forward" in module.__dict__ or (step is _layer and (kind != "layer" or not _is_whole(module))):
            continue
        module.forward = MethodType(step, module)
        found += 1
    return found


def _kind(module: Any) -> str:
    """What a module of transformers computes, of the kinds that are known by their text; else nothing."""
    cls: Any = type(module)
    return _kind_of(cls)


@functools.cache
def _kind_of(cls: Any) -> str:
    if cls.__module__.partition(".")[0] != "transformers":
        return ""
    kind = _TEXTS.get(_text(cls.forward), "")
    if kind.startswith("attention"):
        names = sys.modules[cls.forward.__module__].__dict__
        turn, half = (_TEXTS.get(_text(names.get(name))) for name in ("apply_rotary_pos_emb", "rotate_half"))
        return kind if (turn, half) == ("rotate", "half") else ""
    return kind


def _text(function: Any) -> str:
    """The hash of a function's body; empty where it has no source, or where another function is around it."""
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:  # transformers' own wrapper does something else in training alone
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


def _is_whole(layer: Any) -> bool:
    """Whether a decoder's layer consists of parts that are known too."""
    parts = [layer._modules.get(name) for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")]
    if any(part is None for part in parts):
        return False
    attention, mlp, *norms = parts
    return _are_known(attention, mlp) and all(_kind(norm) == "norm" for norm in norms)


def _are_known(attention: Any, mlp: Any) -> bool:
    return _kind(attention).startswith("attention") and _kind(mlp) == "mlp" and type(mlp._modules.get("act_fn")) in _silu()


@functools.cache
def _silu() -> tuple[type, ...]:
    from transformers.activations import SiLUActivation

    return nn.SiLU, SiLUActivation


def _readable(x: Any) -> bool:
    return type(x) is Tensor and x.dtype is torch.bfloat16 and x.is_cpu and x.is_contiguous()


def _plain(x: Tensor) -> bool:
    """Whether native code may read a tensor, and nobody watches what torch does with it."""
    return _readable(x) and not torch.is_grad_enabled() and not needs_dispatcher(x)


def _weight(module: nn.Module) -> Tensor | None:
    """A module's weight as a parameter that native code may read."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype is not torch.bfloat16 or not weight.is_cpu or not weight.is_contiguous():
        return None
    return weight


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon), for few rows."""
    weight, core = _weight(self), native.core()
    if weight is not None and core is not None and _plain(hidden_states):
        n = weight.numel()
        rows = hidden_states.numel() // n
        if hidden_states.shape[-1:] == weight.shape and rows <= ROWS:
            y = torch.empty_like(hidden_states)
            core.step_norm(hidden_states.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, n, self.variance_epsilon)
            return y
    found: Tensor = type(self).forward(self, hidden_states)
    return found


def _dense(self: Any, input: Tensor) -> Tensor:
    """x @ W.T of a large plain layer, for one row."""
    weight, core = _weight(self), native.core()
    if (
        weight is not None and core is not None and self.bias is None and weight.numel() >= LARGE and _plain(input)
        and input.numel() == input.shape[-1] == weight.shape[1]
    ):  # fmt: skip
        n, k = weight.shape
        y = input.new_empty(*input.shape[:-1], n)
        if core.step_rows(input.data_ptr(), weight.data_ptr(), y.data_ptr(), n, k) == 0:
            return y
    return nn.Linear.forward(self, input)


def _layer(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
    use_cache: Any = False, position_embeddings: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """One row through a decoder's layer, its key and value into a cache of `make_room`."""
    if attention_mask is None and past_key_values is not None and position_embeddings is not None and not kwargs:
        y = _one_row(self, hidden_states, position_embeddings, past_key_values)
        if y is not None:
            return y
    found: Tensor = type(self).forward(
        self, hidden_states, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
        use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
    )  # fmt: skip
    return found


def _one_row(self: Any, x: Tensor, position_embeddings: Any, cache: Any) -> Tensor | None:
    """The layer's output, or None where transformers has to compute it and nothing was done."""
    core, (cos, sin) = native.core(), position_embeddings
    if core is None or not _plain(x) or x.numel() != x.shape[-1] or x.dim() != 3 or self.training:
        return None
    if not _readable(cos) or not _readable(sin):
        return None
    if _module._global_forward_hooks or _module._global_forward_pre_hooks:
        return None
    modules = self._modules
    attention, mlp = modules["self_attn"], modules["mlp"]
    if not _are_known(attention, mlp):
        return None
    rooms, at = getattr(cache, "layers", ()), attention.layer_idx
    if at is None or at >= len(rooms) or type(rooms[at]) is not _room():
        return None
    room = rooms[at]
    if _is_changed(attention) or _is_changed(mlp) or _is_changed(mlp._modules["act_fn"]):
        return None
    packed: list[int] = []
    sizes: list[int] = []
    for owner, names in _WEIGHTS:
        inside = modules[owner]._modules
        for name in names:
            layer = inside[name]
            if type(layer) is not QuantLinear or _is_changed(layer):
                return None
            spec, direct = layer.choice.spec, layer._direct
            if direct is None or direct[0] is not OP or layer._multiplier is not None or spec.act_dtype is not torch.bfloat16:
                return None
            weight, bias, n = direct[1]
            packed += (weight.data_ptr(), 0 if bias is None else bias.data_ptr())
            sizes.append(n)
    dim, hidden = attention.head_dim, x.shape[-1]
    heads, repeat, of_heads = sizes[1] // dim, sizes[0] // sizes[1], 0.0
    norms = [modules["input_layernorm"], modules["post_attention_layernorm"]]
    widths = [hidden, hidden]
    if _kind(attention) == "attention of normed heads":
        norms += attention._modules["q_norm"], attention._modules["k_norm"]
        widths += dim, dim
        of_heads = norms[2].variance_epsilon
        if norms[3].variance_epsilon != of_heads:
            return None
    scales = [0] * 4
    for i, norm in enumerate(norms):
        found = _weight(norm)
        if found is None or found.numel() != widths[i] or _kind(norm) != "norm" or _is_changed(norm, _norm):
            return None
        scales[i] = found.data_ptr()
    if cos.numel() != dim or sin.numel() != dim or dim % 16 or dim > 256 or not 1 <= repeat <= 32:
        return None
    if not room.reserve(heads, dim, x.dtype, 1):
        return None
    keys, values = room.held
    y = torch.empty_like(x)
    layer = _Layer(
        x.data_ptr(), y.data_ptr(), *scales, cos.data_ptr(), sin.data_ptr(), keys.data_ptr(), values.data_ptr(), *packed,
        hidden, heads, repeat, dim, keys.shape[2], room.length, sizes[4],
    )  # fmt: skip
    first, second = norms[0].variance_epsilon, norms[1].variance_epsilon
    if core.step_layer(ctypes.addressof(layer), attention.scaling, first, second, of_heads):
        return None
    room.length += 1
    return y


def _is_changed(module: Any, ours: Any = None) -> bool:
    """Whether somebody wants to see what a module is given or gives, or has put another forward into it."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    return "forward" in own and (ours is None or getattr(own["forward"], "__func__", None) is not ours)


def make_room(model: Any, cache: Any) -> None:
    """Let the full-attention layers of a new DynamicCache, for a model with native steps, be such that a step can add to them."""
    from transformers.cache_utils import DynamicLayer

    if any(getattr(module.__dict__.get("forward"), "__func__", None) is _layer for module in model.modules()):
        cache.layers = [_room()() if type(layer) is DynamicLayer else layer for layer in cache.layers]


def _larger(t: Tensor, size: int) -> Tensor:
    """The same positions with room for `size` of them."""
    larger = t.new_empty(*t.shape[:2], size, t.shape[3])
    larger[:, :, : t.shape[2]] = t
    return larger


@functools.cache
def _room() -> Any:
    from transformers.cache_utils import CacheLayerMixin

    class Room(CacheLayerMixin):
        """Keys and values [batch, heads, positions, dim] of one layer, in memory that doubles when it is full."""

        is_sliding = False

        def __init__(self) -> None:
            self.held: tuple[Any, Any] | None = None
            self.length = 0

        @property
        def is_initialized(self) -> bool:
            return self.held is not None

        @property
        def keys(self) -> Tensor | None:
            return None if self.held is None else self.held[0][:, :, : self.length]

        @property
        def values(self) -> Tensor | None:
            return None if self.held is None else self.held[1][:, :, : self.length]

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            size = max(256, key_states.shape[2])
            self.held = _larger(key_states, size), _larger(value_states, size)

        def reserve(self, heads: int, dim: int, dtype: torch.dtype, more: int) -> bool:
            """Make room for more positions of one sequence; False where what is held is of another kind."""
            if self.held is None:
                like = torch.empty(1, heads, 0, dim, dtype=dtype)
                self.lazy_initialization(like, like)
            assert self.held is not None
            keys, values = self.held
            if keys.shape != values.shape or keys.shape[:2] != (1, heads) or keys.shape[3] != dim or keys.dtype is not dtype:
                return False
            self._grow(self.length + more)
            return True

        def _grow(self, length: int) -> None:
            assert self.held is not None
            keys, values = self.held
            size = max(length, 2 * keys.shape[2])
            if length > keys.shape[2]:
                self.held = _larger(keys, size), _larger(values, size)

        def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
            """Add positions; all keys and values then."""
            if self.held is None:
                self.lazy_initialization(key_states, value_states)
            end = self.length + key_states.shape[2]
            self._grow(end)
            assert self.held is not None
            keys, values = self.held
            keys[:, :, self.length : end], values[:, :, self.length : end] = key_states, value_states
            self.length = end
            return keys[:, :, :end], values[:, :, :end]

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.length + query_length, 0

        def get_seq_length(self) -> int:
            return self.length

        def get_max_length(self) -> int:
            return -1

        def reset(self) -> None:
            self.held, self.length = None, 0

    return Room
