"""One token after another through a whole model, for a loop that has the model and its KV cache for itself.

transformers' forward makes a mask, rotations and some thirty calls of modules for each token, and the native call of all layers
(decoder_stack.py) checks each time that none of them was hooked or replaced. Behind a call that streams all weights through the
caches, both wait for memory: together a fifth of a small model's token. Here the checks are made once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitline.model import decoder_stack
from bitline.model.decoder_stack import DecoderStack
from bitline.model.known_modules import calls_layers_in_order, returns_output_of_head
from bitline.model.native_parts import is_modified

_POSITIONS = 64  # whose rotations are computed at once
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # rotations that depend on nothing but the position


class TokenStep:
    """The forward of a model for one token, bit for bit. The model must not change while this is used.

    Computes embedding, final norm and head by their modules, all layers as one native call.
    """

    def __init__(self, model: Any, stack: DecoderStack, cache: Any) -> None:
        self._decoder, self._head, self._stack, self._cache = model.model, model.get_output_embeddings(), stack, cache
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, model: Any, cache: Any) -> TokenStep | None:
        """None where the model's own forward has to be called, for this model at all or because of hooks.

        cache: a DynamicCache, in which the prompt's keys and values are.
        """
        decoder = getattr(model, "model", None)
        if decoder is None or not returns_output_of_head(model) or not calls_layers_in_order(decoder):
            return None
        if (
            is_modified(model)
            or is_modified(decoder)
            or model.training
            or decoder.rotary_emb.__dict__.get("rope_type") not in _FIXED_ROPE
        ):
            return None
        stack = decoder_stack.of(decoder.layers)
        return None if stack is None or not stack.prepare(decoder.config.hidden_size, cache) else cls(model, stack, cache)

    def logits(self, ids: Tensor) -> Tensor | None:
        """The head's output for token ids int64 [1, 1]: [1, 1, V]. None where the model has to compute it, and then nothing has
        changed.
        """
        x = self._decoder.embed_tokens(ids)
        y = self._stack.last_output(x, self._rotation(x, self._cache.layers[0].length), self._cache)
        if y is None:
            return None
        found: Tensor = self._head(self._decoder.norm(y))
        return found

    def _rotation(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """cos and sin [1, 1, head_dim] of a position."""
        if position not in self._rotations:
            positions = torch.arange(position, position + _POSITIONS)[None]
            cos, sin = self._decoder.rotary_emb(x, position_ids=positions)
            self._rotations = {position + i: (cos[:, i : i + 1], sin[:, i : i + 1]) for i in range(_POSITIONS)}
        return self._rotations[position]
