"""One token on a CPU: native code for what lies between a decoder's linear layers.

A step of one row is some twenty calls from Python to torch in each layer of transformers' models, which take longer than the
linear layers of a small model. Here norms, gated MLPs, attention and a plain output layer become one or two native calls each
(csrc/step.cpp), in bfloat16, and products of one input run in one parallel loop. The model keeps its modules and their code:
an instance gets a forward of ours, which hands over to the class's own one whenever a call is not exactly such a step.

A class is known by the text of its forward, so that another version of transformers that computes something else is left
alone. Whoever needs every torch operation of a model loads it with `load_model(..., native_step=False)`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from bitline import native
from bitline.kernels.native_cpu import OP
from bitline.linear import QuantLinear

ROWS = 8  # of a norm's input; above that torch's own operators are as fast
LARGE = 1 << 20  # numbers of a plain output layer that is worth a call of ours

# SHA-256 of function bodies, as Python writes them from their syntax trees: without comments, docstrings and annotations.
_NORM = "50b8139e32eaccc8"
_MLP = "5b8abf7af12a4b42"
_ATTENTION = frozenset(("edb09e4cdb72174c", "ea92a9846ca1ecb5", "992c57d97163d600"))  # Llama's, Mistral's, Qwen2's
_ATTENTION_NORMED = "457e3a53f1f0cfb6"  # Qwen3's: queries and keys are normed
_ROTATE, _HALF = "257620718ecff20c", "b92c1a98279c25d0"

_IGNORED = frozenset(("position_ids", "use_cache"))  # arguments that attention of one row without a mask does not need


def install(model: Any) -> int:
    """Give known modules of a model a native step; how many got one. None where there is no native core."""
    if native.core() is None:
        return 0
    found = 0
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        cls: Any = type(module)
        step = _dense if module is head and cls is nn.Linear else _step_of(cls)
        if step is None or "forward" in module.__dict__ or (step is _mlp and not _gated_by_silu(module)):
            continue
        module.forward = MethodType(step, module)
        found += 1
    return found


def _is_norm(module: nn.Module) -> bool:
    cls: Any = type(module)  # for type checkers nn.Module is not hashable
    return _step_of(cls) is _norm


def _gated_by_silu(module: nn.Module) -> bool:
    from transformers.activations import SiLUActivation

    return type(getattr(module, "act_fn", None)) in (nn.SiLU, SiLUActivation)


@functools.cache
def _step_of(cls: Any) -> Callable[..., Any] | None:
    """The step for modules of a class, where its forward is one that is known."""
    forward = cls.forward
    if cls.__module__.partition(".")[0] != "transformers" or hasattr(forward, "__wrapped__"):
        return None
    text = _text(forward)
    if text == _NORM:
        return _norm
    if text == _MLP:
        return _mlp
    if text in _ATTENTION or text == _ATTENTION_NORMED:
        names = sys.modules[forward.__module__].__dict__
        if _text(names.get("apply_rotary_pos_emb")) == _ROTATE and _text(names.get("rotate_half")) == _HALF:
            return _attention_normed if text == _ATTENTION_NORMED else _attention
    return None


def _text(function: Any) -> str:
    """The hash of a function's body; empty where it has no source, or where another function is around it."""
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return ""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, TypeError):
        return ""
    assert isinstance(node, ast.FunctionDef)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return hashlib.sha256("\n".join(map(ast.unparse, body)).encode()).hexdigest()[:16]


def _plain(x: Tensor) -> bool:
    """Whether native code may read a tensor, and nobody watches what torch does with it."""
    return (
        type(x) is Tensor
        and x.dtype is torch.bfloat16
        and x.is_cpu
        and x.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )


def _untouched(module: nn.Module) -> bool:
    """Whether calling a module is no more than its own forward."""
    return not (module._forward_hooks or module._forward_pre_hooks or _module._global_forward_hooks
                or _module._global_forward_pre_hooks)  # fmt: skip


def _weight(module: nn.Module) -> Tensor | None:
    """A module's weight as a parameter that native code may read."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype is not torch.bfloat16 or not weight.is_cpu or not weight.is_contiguous():
        return None
    return weight


def _sizes(layers: tuple[nn.Module, ...], x: Tensor) -> list[int] | None:
    """The outputs of layers that run on the native kernel and are called by nobody else's code; else None."""
    sizes = []
    for layer in layers:
        if type(layer) is not QuantLinear or "forward" in layer.__dict__ or not _untouched(layer):
            return None
        spec, direct = layer.choice.spec, layer._direct
        if direct is None or direct[0] is not OP or layer._multiplier is not None:
            return None
        if spec.k != x.shape[-1] or spec.act_dtype is not torch.bfloat16:
            return None
        sizes.append(spec.n)
    return sizes


def _row(core: Any, layers: tuple[Any, ...], sizes: list[int], x: Tensor) -> Tensor | None:
    """Outputs of two or three layers for one row, one after another; None where the core cannot."""
    y = x.new_empty(sum(sizes))
    pointers: list[int | None] = []
    for layer in layers:
        packed, bias, _ = layer._direct[1]
        pointers += (packed.data_ptr(), None if bias is None else bias.data_ptr())
    pointers += [None] * (6 - len(pointers))
    return None if core.gemm_row(x.data_ptr(), x.shape[-1], *pointers, y.data_ptr(), 2) else y


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
    return type(self).forward(self, hidden_states)


def _mlp(self: Any, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)), for one row."""
    core = native.core()
    if core is not None and _plain(x) and x.numel() == x.shape[-1]:
        modules = self._modules
        layers = modules["gate_proj"], modules["up_proj"]
        sizes = _sizes(layers, x)
        if sizes is not None and sizes[0] == sizes[1] and _untouched(modules["act_fn"]):
            both = _row(core, layers, sizes, x)
            if both is not None:
                n, at = sizes[0], both.data_ptr()
                y = x.new_empty(*x.shape[:-1], n)
                core.step_gate(at, at + 2 * n, y.data_ptr(), n)
                return modules["down_proj"](y)
    return type(self).forward(self, x)


def _attention(
    self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, past_key_values: Any = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Attention of one row over a cache of `make_room`."""
    if attention_mask is None and past_key_values is not None and position_embeddings is not None and kwargs.keys() <= _IGNORED:
        out = _attend(self, hidden_states, position_embeddings, past_key_values, ())
        if out is not None:
            return self._modules["o_proj"](out), None
    return type(self).forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **kwargs)


def _attention_normed(
    self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, past_key_values: Any = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """The same with norms of each head's queries and keys."""
    norms = self._modules["q_norm"], self._modules["k_norm"]
    known = all(_is_norm(norm) and _untouched(norm) and _weight(norm) is not None for norm in norms)
    if (
        known and attention_mask is None and past_key_values is not None and position_embeddings is not None
        and kwargs.keys() <= _IGNORED
    ):  # fmt: skip
        out = _attend(self, hidden_states, position_embeddings, past_key_values, norms)
        if out is not None:
            return self._modules["o_proj"](out), None
    return type(self).forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **kwargs)


def _attend(self: Any, x: Tensor, position_embeddings: Any, cache: Any, norms: tuple[Any, ...]) -> Tensor | None:
    """Every head's weighted values [1, 1, N] of one row, whose key and value are in the cache then; None: nothing was done."""
    core = native.core()
    if core is None or not _plain(x) or x.numel() != x.shape[-1] or x.dim() != 3 or self.training:
        return None
    room = cache.layers[self.layer_idx]
    if type(room) is not _room():
        return None
    modules, dim = self._modules, self.head_dim
    layers = modules["q_proj"], modules["k_proj"], modules["v_proj"]
    sizes = _sizes(layers, x)
    cos, sin = position_embeddings
    if sizes is None or sizes[1] != sizes[2] or any(size % dim for size in sizes) or sizes[0] % sizes[1]:
        return None
    if not _plain(cos) or not _plain(sin) or cos.numel() != dim or sin.numel() != dim or dim % 16 or dim > 256:
        return None
    heads, repeat = sizes[1] // dim, sizes[0] // sizes[1]
    if repeat > 32 or not room.reserve(heads, dim, x.dtype, 1):
        return None
    qkv = _row(core, layers, sizes, x)
    if qkv is None:
        return None
    at = qkv.data_ptr()
    for norm, start, rows in zip(norms, (at, at + 2 * sizes[0]), (heads * repeat, heads), strict=False):
        if norm.weight.numel() != dim:
            return None
        core.step_norm(start, norm.weight.data_ptr(), start, rows, dim, norm.variance_epsilon)
    y = x.new_empty(1, 1, sizes[0])
    failed = core.step_attention(at, cos.data_ptr(), sin.data_ptr(), room.held[0].data_ptr(), room.held[1].data_ptr(),
                                 y.data_ptr(), heads, repeat, dim, room.held[0].shape[2], room.length, self.scaling)  # fmt: skip
    if failed:
        return None
    room.length += 1
    return y


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


def make_room(model: Any, cache: Any) -> None:
    """Let the full-attention layers of a new DynamicCache, for a model with native steps, be such that a step can add to them."""
    from transformers.cache_utils import DynamicLayer

    steps = any(getattr(m.__dict__.get("forward"), "__func__", None) in (_attention, _attention_normed) for m in model.modules())
    if steps:
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
