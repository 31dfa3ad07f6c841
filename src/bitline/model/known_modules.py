"""Modules of transformers whose computation is known, by the source of their forward.

A class is recognized by the hash of its forward's source, so a version of transformers that computes something else is not known.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

# SHA-256 of known function bodies, unparsed from their syntax trees: without comments, docstrings and annotations.
_KNOWN_BODIES = {
    "50b8139e32eaccc8": "rms_norm", "5b8abf7af12a4b42": "mlp", "b139d1b607c01194": "decoder_layer",
    "963fa4d47f287836": "decoder_layer",  # Mixtral
    "64900aacce01346d": "routed_mlp_shared", "cb8b051b34674b5a": "routed_mlp",  # Qwen2-MoE, Qwen3-MoE
    "6ee751e522284af2": "routed_mlp", "793098f9664b271c": "router", "a27fa18e8112b1c9": "router_float32",  # the last is Mixtral's
    "edb09e4cdb72174c": "attention", "ea92a9846ca1ecb5": "attention", "992c57d97163d600": "attention",  # Llama, Mistral, Qwen2
    "457e3a53f1f0cfb6": "attention_qk_norm",  # Qwen3
    "257620718ecff20c": "apply_rotary_pos_emb", "b92c1a98279c25d0": "rotate_half",
    "673f5d551ea25302": "causal_lm", "79b71545dbce782c": "causal_lm",  # their logits are the head's output
    "61c267c3b7df43b3": "causal_lm",  # of models with experts
    "b9c0eae1e2b38972": "decoder", "5ef674717a323c21": "decoder", "9b8e9bc6275a252a": "decoder",  # Llama, Mistral, Qwen2 to 3
    "d5cb05a34d21834e": "decoder", "69af5a8fb7b9cc64": "decoder",  # Qwen2-MoE; Qwen3-MoE and Mixtral
}  # fmt: skip

# Reading and hashing a source takes longer than a token. By the function: a class's forward may be replaced.
_kind_of_function: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def module_kind(module: Any) -> str:
    """What a module of transformers computes, a value of _KNOWN_BODIES; "" where its source is not known."""
    cls: Any = type(module)
    return class_kind(cls)


@functools.cache
def class_kind(cls: Any) -> str:
    """As `module_kind`, of a class."""
    if cls.__module__.partition(".")[0] != "transformers":
        return ""
    kind = _KNOWN_BODIES.get(body_hash(cls.forward), "")
    if kind.startswith("attention"):  # its forward calls these two
        names = sys.modules[cls.forward.__module__].__dict__
        if any(_KNOWN_BODIES.get(body_hash(names.get(name))) != name for name in ("apply_rotary_pos_emb", "rotate_half")):
            return ""
    return kind


def returns_output_of_head(model: Any) -> bool:
    """Whether a model's logits are known to be what its head returns."""
    return _known_model(model) == "causal_lm"


def calls_layers_in_order(model: Any) -> bool:
    """Whether a decoder is known to pass each of its `layers` the output of the one before, and nothing else to touch that."""
    return _known_model(model) == "decoder"


def _known_model(model: Any) -> str:
    """As `module_kind`, of a model, whose forward has decorators."""
    cls: Any = type(model)
    if cls.__module__.partition(".")[0] != "transformers" or "forward" in model.__dict__:
        return ""
    forward = inspect.unwrap(cls.forward)
    if not inspect.isfunction(forward):
        return ""
    if forward not in _kind_of_function:
        _kind_of_function[forward] = _KNOWN_BODIES.get(body_hash(forward), "")
    return _kind_of_function[forward]


def body_hash(function: Any) -> str:
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
    if not isinstance(node, ast.FunctionDef):  # a lambda's line
        return ""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return hashlib.sha256("\n".join(map(ast.unparse, body)).encode()).hexdigest()[:16]


def is_known_layer(layer: Any) -> bool:
    """Whether a module is a decoder layer that native code can compute, and its parts are known too."""
    return has_known_attention(layer) and is_known_mlp(layer._modules["mlp"])


def has_known_attention(layer: Any) -> bool:
    """Whether a module is a decoder layer that native code can compute up to its MLP, of whatever kind that is."""
    if module_kind(layer) != "decoder_layer":
        return False
    parts = [layer._modules.get(name) for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")]
    if any(part is None for part in parts):
        return False
    attention, _, *norms = parts
    return is_known_attention(attention) and all(module_kind(norm) == "rms_norm" for norm in norms)


def is_known_attention(attention: Any) -> bool:
    """Whether native code can compute a decoder layer's attention."""
    return module_kind(attention).startswith("attention")


def is_known_mlp(mlp: Any) -> bool:
    """Whether native code can compute a decoder layer's MLP."""
    return module_kind(mlp) == "mlp" and type(mlp._modules.get("act_fn")) in _silu_classes()


@functools.cache
def _silu_classes() -> tuple[type, ...]:
    from transformers.activations import SiLUActivation

    return nn.SiLU, SiLUActivation
