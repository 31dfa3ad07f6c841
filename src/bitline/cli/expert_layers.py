"""Layers that are experts, for `bitline explain`: which they are, and what a batch of tokens makes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bitline.checkpoint import Checkpoint
from bitline.expert_counts import active_experts, tokens_per_expert
from bitline.experts import expert_policy
from bitline.model.expert_names import EXPERT_LAYER, TOP_K_KEYS, expert_number
from bitline.select import Policy
from bitline.types import LinearSpec


class Experts(NamedTuple):
    """num_experts: of one stack. top_k: of a token. layers: of one expert."""

    num_experts: int
    top_k: int
    layers: tuple[LinearSpec, ...] = ()

    def policy(self, policy: Policy) -> Policy:
        """The policy for one expert's layer."""
        return expert_policy(policy, *self)

    def of_stack(self, seconds: Mapping[str, float], policy: Policy, held: int) -> dict[str, float]:
        """Seconds of one expert's layer by its tokens as seconds of the active ones among `held` experts by M."""
        found = {}
        for m in policy.m:
            key = str(tokens_per_expert(self.num_experts, self.top_k, m))
            if key in seconds:
                found[str(m)] = seconds[key] * active_experts(self.num_experts, self.top_k, m) * held / self.num_experts
        return found


def experts_of(names: Sequence[str], checkpoint: Checkpoint, dtype: torch.dtype) -> Experts | None:
    """The experts that layers of one kind are, None for plain layers. dtype: of the input."""
    numbers = {name: number for name in names if (number := expert_number(name)) is not None}
    if not numbers:
        return None
    first, count = next(iter(numbers)), max(numbers.values()) + 1
    one = (_module(first), numbers[first])
    of_one = (r.spec for r in checkpoint.layers() if expert_number(r.name) == one[1] and _module(r.name) == one[0])
    layers = dict.fromkeys(spec.replace(act_dtype=dtype) for spec in of_one)
    return Experts(count, min(_top_k(checkpoint), count), tuple(layers))


def _module(name: str) -> str:
    """The module of the experts that a layer belongs to, or its block's name in a GGUF file."""
    found = EXPERT_LAYER.search(name)
    assert found is not None
    return re.sub(r"\.ffn_\w+$", "", name[: found.start()])


def _top_k(checkpoint: Checkpoint) -> int:
    """Experts of a token; 1 where the configuration does not say."""
    for settings in _settings(checkpoint.source.config):
        for key in TOP_K_KEYS:
            if isinstance(value := settings.get(key), int) and value > 0:
                return value
    used = [v for key, v in checkpoint.metadata.items() if key.endswith(".expert_used_count")] if checkpoint.is_gguf else []
    return int(used[0]) if used else 1


def _settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = config.get("text_config")
    return [config, inner] if isinstance(inner, Mapping) else [config]
