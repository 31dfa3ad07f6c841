"""A decoder's forward for one token on a CPU, in native code.

For one token transformers makes some twenty calls from Python to torch in each layer, which take longer than the linear layers
of a small model. Here all decoder layers are one native call, or one each (csrc/decode_step.cpp), and so are the last norm and an
unquantized LM head, in bfloat16. The model keeps its modules and their code: an instance gets a native `forward`, which hands
over to the class's own one whenever a call is not exactly such a step.

`load_model(..., native_step=False)` leaves a model without native forwards, for users who need every torch operation.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from bitline import native
from bitline.model import decoder_stack
from bitline.model.decoder_experts import described_experts
from bitline.model.decoder_layer import decode_token, is_plain_input, rms_norm_forward
from bitline.model.known_modules import calls_layers_in_order, has_known_attention, is_known_layer, module_kind
from bitline.model.kv_cache import kv_cache_layer_class
from bitline.model.native_parts import readable_weight
from bitline.parallel import GatherOutput

MIN_LM_HEAD = 1 << 20  # weights of an unquantized LM head that is worth a native call


def install(model: Any) -> int:
    """Give known modules of a model a native forward; returns how many got one, 0 without the native core."""
    if native.core() is None:
        return 0
    installed = 0
    lm_head = getattr(model, "get_output_embeddings", lambda: None)()
    lm_head = lm_head.linear if isinstance(lm_head, GatherOutput) else lm_head
    for module in model.modules():
        kind = module_kind(module)
        if module is lm_head and type(module) is nn.Linear:
            forward: Any = _lm_head_forward
        elif kind == "rms_norm":
            forward = rms_norm_forward
        elif has_known_attention(module):
            forward = _decoder_layer_forward
        else:
            continue
        if "forward" not in module.__dict__:
            module.forward = MethodType(forward, module)
            installed += 1
    for module in model.modules():
        if calls_layers_in_order(module) and len(module.layers) > 1 and all(map(has_native_step, module.layers)):
            decoder_stack.join(module.layers)
    return installed


def has_native_step(module: Any) -> bool:
    """Whether `install` gave a decoder layer a native forward that computes all of it."""
    own = getattr(module.__dict__.get("forward"), "__func__", None)
    if own is not _decoder_layer_forward:
        return False
    return is_known_layer(module) or described_experts(module.mlp, module.hidden_size) is not None


def _replace_empty_cache_layer(layer: Any, x: Tensor, cache: Any) -> None:
    """Give the layer of a DynamicCache that nothing is in yet, for one sequence, the buffers that native steps append to."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if type(cache) is not DynamicCache or x.shape[0] != 1 or layer.training or not is_plain_input(x):
        return
    layers, index = cache.layers, getattr(layer._modules.get("self_attn"), "layer_idx", None)
    if index is None or index >= len(layers) or getattr(cache, "offloading", False):
        return
    if type(layers[index]) is DynamicLayer and not layers[index].is_initialized:
        layers[index] = kv_cache_layer_class()()


def _lm_head_forward(self: Any, input: Tensor) -> Tensor:
    """x @ W.T of a large unquantized LM head, for one row."""
    weight, core = readable_weight(self), native.core()
    if (
        weight is not None and core is not None and self.bias is None and weight.numel() >= MIN_LM_HEAD and is_plain_input(input)
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
    step = attention_mask is None and past_key_values is not None and position_embeddings is not None
    step = step and all(value is None or value is False for value in kwargs.values())  # options that ask for nothing
    if step:
        y = decoder_stack.output_of(self, hidden_states, position_embeddings, past_key_values)
        if y is not None:
            return y
    if past_key_values is not None:
        _replace_empty_cache_layer(self, hidden_states, past_key_values)
    if step:
        y = decode_token(self, hidden_states, position_embeddings, past_key_values)
        if y is not None:
            return y
    y_torch: Tensor = type(self).forward(
        self, hidden_states, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
        use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
    )  # fmt: skip
    return y_torch
