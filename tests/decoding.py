"""Models that are decoded token by token, and the native calls that this takes. See also the fixture `one_thread_inference`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tiny
from bitline import native
from bitline.model.generate import generate

# What models of an architecture need beside tiny.SETTINGS for native steps.
FAMILIES = {"Llama": {}, "Mistral": {"sliding_window": None}, "Qwen2": {}, "Qwen3": {"head_dim": 32}}


def write_family(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of one of FAMILIES with 1024 positions, as compressed-tensors W4A16; also in inference mode."""
    with torch.inference_mode(mode=False):
        settings = tiny.SETTINGS | {"max_position_embeddings": 1024} | FAMILIES[name] | changes
        return tiny.compressed(folder, tiny.random_model(name, settings))[0]


def token_logits(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    """Logits of a prompt, the first three of token ids [1, T], and of each token after it: float64 [T - 2, V].

    cache: an empty one; None: a new DynamicCache.
    """
    import transformers

    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    rows = [model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True).logits[:, -1]]
    for i in range(3, ids.shape[1]):
        rows.append(model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits[:, -1])
    return torch.cat(rows).double()


def record_calls(monkeypatch: Any, **described: Callable[..., Any]) -> list[Any]:
    """A list that grows with each call of these functions of the native core, by what `described` says of its arguments."""
    core, calls = native.core(), []
    for name, describe in described.items():
        function = getattr(core, name)

        def recorded(*arguments: Any, describe: Any = describe, function: Any = function) -> Any:
            calls.append(describe(*arguments))
            return function(*arguments)

        monkeypatch.setattr(core, name, recorded)
    return calls


def prompt_cache(model: Any, ids: torch.Tensor) -> Any:
    """A KV cache that holds a prompt, token ids [1, T]."""
    import transformers

    cache = transformers.DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


class Tokenizer:
    """What `generate` calls of a tokenizer."""

    eos_token_id = 2

    def decode(self, ids: Any, **_options: Any) -> str:
        return " ".join(map(str, torch.as_tensor(ids).tolist()))


def generated_tokens(model: Any, ids: torch.Tensor) -> tuple[int, ...]:
    """The 20 tokens that `generate` appends to token ids [1, T]."""
    return generate(model, Tokenizer(), ids, max_new_tokens=20, stop=False).token_ids
