"""One token through all decoder layers of a model as one native call.

The first layer's forward computes every layer's output. Each further layer is still called by the model, and returns what was
computed for it if it is called with exactly the output of the layer before. So whoever calls, replaces or hooks a layer sees the
same as ever; where anything is hooked or replaced, layers compute one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from operator import is_, itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bitline import native
from bitline.experts import ExpertStack, QuantExperts
from bitline.linear import QuantLinear
from bitline.model.decoder_layer import (
    CAPACITY,
    KEYS,
    LOST,
    VALUES,
    DescribedLayer,
    LayerFields,
    described,
    is_decode_input,
    native_kv_cache,
)  # fmt: skip

_SCALARS = 4  # float64 values of csrc/decode_step.h's LayerScalars
_PLACE = "_bitline_stack_place"


class _Ahead(NamedTuple):
    """What was computed for a layer: its output y at a position, if it is called with this x and rotation."""

    x: Tensor
    rotation: Any
    position: int
    y: Tensor


class _Place:
    """A layer's place in its stack, kept in the layer's `__dict__`. Copies and pickles of the layer are in no stack."""

    def __init__(self, stack: DecoderStack | None = None, index: int = 0) -> None:
        self.stack, self.index = stack, index

    def __reduce__(self) -> tuple[type[_Place], tuple[()]]:
        return _Place, ()


def join(layers: Iterable[nn.Module]) -> None:
    """Make one stack of a model's decoder layers, which are called in this order."""
    members = tuple(layers)
    stack = DecoderStack(members)
    for index, layer in enumerate(members):
        layer.__dict__[_PLACE] = _Place(stack, index)


def of(layers: Any) -> DecoderStack | None:
    """The stack of a model's decoder layers, if `join` made one of exactly these."""
    place = layers[0].__dict__.get(_PLACE) if len(layers) else None
    stack = None if place is None else place.stack
    return stack if stack is not None and len(layers) == len(stack.layers) and all(map(is_, layers, stack.layers)) else None


def output_of(layer: Any, x: Tensor, rotation: Any, cache: Any) -> Tensor | None:
    """A layer's output for one token, computed now with those of all layers behind it or before; None where it has to be computed
    alone, and then nothing has changed.

    rotation: cos and sin of the position.
    """
    place = layer.__dict__.get(_PLACE)
    if place is None or place.stack is None:
        return None
    if place.index == 0:
        found: Tensor | None = place.stack.run(x, rotation, cache)
        return found
    held = native_kv_cache(layer._modules["self_attn"], cache)
    ahead = None if held is None else held.ahead
    if ahead is None:
        return None
    held.ahead = None
    if ahead.x is not x or ahead.rotation is not rotation or ahead.position != held.length:
        return None
    held.length += 1
    y: Tensor = ahead.y
    return y


class DecoderStack:
    """Decoder layers that a model calls one after the other."""

    def __init__(self, layers: tuple[Any, ...]) -> None:
        self.layers = layers
        self._prepared: _Prepared | None = None

    def run(self, x: Tensor, rotation: Any, cache: Any) -> Tensor | None:
        """The first layer's output; the others' are kept for them in their KV caches. None where layers have to be computed one
        by one, and then nothing has changed.
        """
        found = self._compute(x, rotation, cache, self._current)
        if found is None:
            return None
        caches, y = found
        outputs = y.unbind(0)
        for held, before, after in zip(caches[1:], outputs, outputs[1:], strict=False):
            held.ahead = _Ahead(before, rotation, caches[0].length, after)
        caches[0].length += 1
        return outputs[0]

    def prepare(self, hidden: int, cache: Any) -> bool:
        """Whether `last_output` can be called from now on with this cache, as long as no layer changes."""
        attention = self.layers[0]._modules["self_attn"]
        if native.core() is None or native_kv_cache(attention, cache) is None:
            return False
        head_dim = getattr(attention, "head_dim", 0)  # one of another class may have none, and is no part of a native call
        return self._current(hidden, head_dim) is not None

    def last_output(self, x: Tensor, rotation: Any, cache: Any) -> Tensor | None:
        """The last layer's output, after `prepare`. None as from `run`."""
        found = self._compute(x, rotation, cache, self._as_prepared)
        if found is None:
            return None
        caches, y = found
        for held in caches:
            held.length += 1
        return y[-1]

    def _current(self, hidden: int, rotated: int) -> _Prepared | None:
        """The native call of the layers as they are now; None where they have to be computed one by one."""
        prepared = self._prepared
        if prepared is None or not prepared.is_current(hidden, rotated):
            self._prepared = prepared = _Prepared.of(self.layers, hidden, rotated)
        return prepared

    def _as_prepared(self, hidden: int, rotated: int) -> _Prepared | None:
        """The native call of the layers as they were when it was prepared."""
        prepared = self._prepared
        return prepared if prepared is not None and prepared.sizes == (hidden, rotated) else None

    def _compute(
        self, x: Tensor, rotation: Any, cache: Any, prepared_for: Callable[[int, int], _Prepared | None]
    ) -> tuple[list[Any], Tensor] | None:
        """The layers' KV caches, not longer yet, and outputs [layers, *x.shape]."""
        core, (cos, sin) = native.core(), rotation
        if core is None or not is_decode_input(self.layers[0], x, cos, sin) or cos.numel() != sin.numel():
            return None
        prepared = prepared_for(x.shape[-1], cos.numel())
        found = None if prepared is None else prepared.pointed_to(cache, x.dtype)
        if prepared is None or found is None:
            return None
        caches, fields_at = found
        y = x.new_empty(len(caches), *x.shape)
        failed = core.decode_layers(fields_at, prepared.scalars_at, len(caches), x.data_ptr(), y.data_ptr(),
                                    cos.data_ptr(), sin.data_ptr(), caches[0].length)  # fmt: skip
        if failed == LOST and prepared.shared is not None:
            prepared.shared.check(failed)
        return None if failed else (caches, y)


class _Watch:
    """Values behind functions of many objects, to be compared again: all calls from one place, which takes some 30 ns a value."""

    def __init__(self, function: Callable[[Any], Any], objects: list[Any], same: bool = False) -> None:
        self.function, self.objects, self.same = function, objects, same
        self.values = list(map(function, objects))

    def is_unchanged(self) -> bool:
        found = map(self.function, self.objects)
        return all(map(is_, found, self.values)) if self.same else list(found) == self.values


class _Fields:
    """Descriptions of all layers for native code, pointed to the buffers of one model's KV caches."""

    def __init__(self, layers: Any) -> None:
        self.layers = type(layers).from_buffer_copy(layers)
        self.address = ctypes.addressof(self.layers)
        self.buffers: list[Any] = []
        self.capacity = 0  # positions that have room in all buffers

    def fit(self, buffers: list[Any], position: int) -> bool:
        """Whether they point to these buffers, in which the position has room."""
        return len(buffers) == len(self.buffers) and all(map(is_, buffers, self.buffers)) and position < self.capacity

    def point_to(self, buffers: list[Any]) -> None:
        for fields, (keys, values) in zip(self.layers, buffers, strict=True):
            fields[KEYS], fields[VALUES], fields[CAPACITY] = keys.data_ptr(), values.data_ptr(), keys.shape[2]
        self.buffers, self.capacity = buffers, min(fields[CAPACITY] for fields in self.layers)


class _Prepared:
    """The native call of a stack, and what of its modules must not change while it is used again."""

    def __init__(self, layers: tuple[Any, ...], found: list[DescribedLayer], hidden: int, rotated: int) -> None:
        self.layers, self.shared = layers, found[0].shared
        self.experts = [layer.experts for layer in found]  # to which `fields` points
        self.sizes = hidden, rotated
        self.kv_heads, self.head_dim = [layer.kv_heads for layer in found], [layer.head_dim for layer in found]
        self.fields = (LayerFields * len(found))(*(LayerFields(*layer.fields) for layer in found))
        self.scalars = (ctypes.c_double * (_SCALARS * len(found)))(*(value for layer in found for value in layer.scalars))
        self.scalars_at = ctypes.addressof(self.scalars)
        # By the first layer's KV cache: threads that generate with one model have caches, and so calls, of their own.
        self.fields_of: WeakKeyDictionary[Any, _Fields] = WeakKeyDictionary()
        tensors = [tensor for layer in found for tensor in layer.tensors]
        self.watches = _watches(layers, tensors)
        self.storages = [tensor.untyped_storage() for tensor in tensors]  # whoever gives a tensor other data leaves them here

    @classmethod
    def of(cls, layers: tuple[Any, ...], hidden: int, rotated: int) -> _Prepared | None:
        """None where layers have to be computed one by one."""
        if any(layer._forward_hooks or layer._forward_pre_hooks or layer.training for layer in layers):
            return None
        found: list[DescribedLayer] = []
        for layer in layers:
            one = described(layer, hidden, rotated)
            if one is None or not one.has_mlp or one.shared is not (found[0].shared if found else one.shared):
                return None
            found.append(one)
        return cls(layers, found, hidden, rotated)

    def is_current(self, hidden: int, rotated: int) -> bool:
        """Whether no module was hooked, replaced or changed since."""
        return self.sizes == (hidden, rotated) and all(watch.is_unchanged() for watch in self.watches)

    def pointed_to(self, cache: Any, dtype: torch.dtype) -> tuple[list[Any], int] | None:
        """The layers' KV caches, with room for one more position, and the address of fields that point to them; None where they
        are of another kind.
        """
        caches = [native_kv_cache(layer._modules["self_attn"], cache) for layer in self.layers]
        if any(held is None or held.length != caches[0].length for held in caches):
            return None
        fields = self.fields_of.get(caches[0])
        if fields is None:
            fields = self.fields_of[caches[0]] = _Fields(self.fields)
        if fields.fit([held.buffers for held in caches], caches[0].length):
            return caches, fields.address
        for held, kv_heads, head_dim in zip(caches, self.kv_heads, self.head_dim, strict=True):
            if not held.reserve(kv_heads, head_dim, dtype, 1):
                return None
        fields.point_to([held.buffers for held in caches])
        return caches, fields.address


def _watches(layers: tuple[Any, ...], tensors: list[Tensor]) -> list[_Watch]:
    """What has to stay for the native call to compute what the modules would: their parts, hooks, forwards and settings, and
    where weights and biases lie.
    """
    modules = [module for layer in layers for module in layer.modules()]
    attributes = [module.__dict__ for module in modules]
    linears = [module.__dict__ for module in modules if isinstance(module, QuantLinear)]
    experts = [module.__dict__ for module in modules if isinstance(module, QuantExperts)]
    stacks = [module for module in modules if isinstance(module, ExpertStack)]
    routers = [own for own in attributes if "top_k" in own and own["_parameters"]]
    norms = [own for own in attributes if "variance_epsilon" in own]
    parameters = [own["_parameters"] for own in attributes]
    return [
        _Watch(type, modules),
        _Watch(len, [part for own in attributes for part in (own, own["_forward_hooks"], own["_forward_pre_hooks"])]),
        _Watch(dict.copy, [own["_modules"] for own in attributes if own["_modules"]]),
        _Watch(itemgetter("forward"), [own for own in attributes if "forward" in own], same=True),
        _Watch(itemgetter("training"), [part.__dict__ for layer in layers for part in (layer, layer._modules["mlp"])]),
        _Watch(itemgetter("_direct"), linears, same=True),
        _Watch(itemgetter("_stacks"), experts, same=True),
        _Watch(itemgetter(0), [stack.packed for stack in stacks], same=True),
        _Watch(itemgetter("packed"), [stack.__dict__ for stack in stacks], same=True),
        _Watch(itemgetter("bias"), [stack._buffers for stack in stacks], same=True),
        _Watch(itemgetter("top_k", "hidden_dim"), routers),
        _Watch(itemgetter("norm_topk_prob"), [own for own in routers if "norm_topk_prob" in own]),
        _Watch(itemgetter("weight"), [own for own in parameters if "weight" in own], same=True),
        _Watch(itemgetter("bias"), [own for own in parameters if "bias" in own], same=True),
        _Watch(itemgetter("variance_epsilon"), norms),
        _Watch(itemgetter("scaling"), [layer._modules["self_attn"].__dict__ for layer in layers]),
        _Watch(Tensor.data_ptr, tensors),
    ]
