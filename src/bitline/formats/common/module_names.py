"""Names of modules under which a config may speak of a module that its checkpoint calls otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

# What a model may be wrapped in: "model.language_model.layers.0" and "language_model.model.layers.0" are "layers.0".
_WRAPPERS = {"model", "language_model", "text_model", "transformer", "thinker", "llm", "backbone", "base_model"}
# One projection for several, as some architectures and servers fuse them, and its parts.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "qkv": ("q_proj", "k_proj", "v_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
}  # fmt: skip
_WHOLES = {part: [whole for whole, parts in FUSED.items() if part in parts] for parts in FUSED.values() for part in parts}

_T = TypeVar("_T")


def tail(name: str) -> str:
    """A module's name without what the model is wrapped in."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


def others(name: str) -> Iterator[str]:
    """Other names of a module, the likeliest first: without its wrapping, as part of a fused one, its fused parts."""
    short = tail(name)
    owner, dot, last = short.rpartition(".")
    yield short
    yield from (owner + dot + whole for whole in _WHOLES.get(last, ()))


class ByName(dict[str, _T]):
    """Values by the names of modules, found under a module's own name or, failing that, under another of its names."""

    def __init__(self, values: Mapping[str, _T]) -> None:
        super().__init__(values)
        self._short: dict[str, _T] = {}
        for name, value in values.items():
            self._short.setdefault(tail(name), value)

    def find(self, module: str) -> _T | None:
        """The value of a module; None where none of its names is there, or the parts of a fused one disagree."""
        if module in self:
            return self[module]
        if not self._short:
            return None
        for name in others(module):
            if name in self._short:
                return self._short[name]
        owner, dot, last = tail(module).rpartition(".")
        parts = [self._short.get(owner + dot + part) for part in FUSED.get(last, ())]
        return parts[0] if parts and parts[0] is not None and all(part == parts[0] for part in parts) else None
