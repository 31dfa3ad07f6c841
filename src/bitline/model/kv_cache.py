"""The KV cache that a native decode step appends to: one contiguous buffer per layer for keys and one for values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INITIAL_CAPACITY = 256  # positions


class KVCacheBuffers:
    """Keys and values [batch, kv_heads, capacity, head_dim] of one layer, of which `length` positions are in use.

    transformers' DynamicLayer concatenates at every token; here the capacity doubles when it is full. The methods but `reserve`
    are those of transformers' cache layers.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        self.buffers: tuple[Any, Any] | None = None  # keys, values
        self.length = 0
        self.ahead: Any = None  # the layer's output, where it was computed with another layer's (decoder_stack.py)

    @property
    def is_initialized(self) -> bool:
        """Whether the buffers are allocated."""
        return self.buffers is not None

    @property
    def keys(self) -> Tensor | None:
        """[batch, kv_heads, length, head_dim], a view."""
        return None if self.buffers is None else self.buffers[0][:, :, : self.length]

    @property
    def values(self) -> Tensor | None:
        """[batch, kv_heads, length, head_dim], a view."""
        return None if self.buffers is None else self.buffers[1][:, :, : self.length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, with the states as their first positions."""
        capacity = max(INITIAL_CAPACITY, key_states.shape[2])
        self.buffers = _with_capacity(key_states, capacity), _with_capacity(value_states, capacity)

    def reserve(self, kv_heads: int, head_dim: int, dtype: torch.dtype, positions: int) -> bool:
        """Allocate for more positions of a batch of one; False where the buffers have another shape or dtype."""
        if self.buffers is None:
            empty = torch.empty(1, kv_heads, 0, head_dim, dtype=dtype)
            self.lazy_initialization(empty, empty)
        assert self.buffers is not None
        keys, values = self.buffers
        if keys.shape != values.shape or keys.shape[:2] != (1, kv_heads) or keys.shape[3] != head_dim or keys.dtype is not dtype:
            return False
        self._grow(self.length + positions)
        return True

    def _grow(self, length: int) -> None:
        assert self.buffers is not None
        keys, values = self.buffers
        capacity = max(length, 2 * keys.shape[2])
        if length > keys.shape[2]:
            self.buffers = _with_capacity(keys, capacity), _with_capacity(values, capacity)

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append positions; returns all keys and values."""
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self._grow(end)
        assert self.buffers is not None
        keys, values = self.buffers
        keys[:, :, self.length : end], values[:, :, self.length : end] = key_states, value_states
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask for `query_length` more tokens covers."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Positions in use."""
        return self.length

    def get_max_length(self) -> int:
        """-1: unbounded."""
        return -1

    def reset(self) -> None:
        """Free the buffers."""
        self.buffers, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove positions."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, not {tokens_to_remove}")  # as DynamicLayer does
        self.length = max(0, self.length + tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._replace(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        self._replace(lambda states: states[indices])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequences in the order of a beam search."""
        self._replace(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.buffers is not None:
            self.buffers = function(self.buffers[0]), function(self.buffers[1])


def _with_capacity(states: Tensor, capacity: int) -> Tensor:
    """A copy [batch, heads, capacity, head_dim] whose first positions are the states'; the rest is uninitialized."""
    larger = states.new_empty(*states.shape[:2], capacity, states.shape[3])
    larger[:, :, : states.shape[2]] = states
    return larger


@functools.cache
def kv_cache_layer_class() -> Any:
    """KVCacheLayer: KVCacheBuffers as a cache layer of transformers, which is imported only now."""
    from transformers.cache_utils import CacheLayerMixin

    class KVCacheLayer(KVCacheBuffers, CacheLayerMixin):
        """A layer of a transformers Cache."""

    return KVCacheLayer
