"""Module names: a config may name a module differently than its checkpoint does, by wrapper or by fused projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

# Wrappers of the transformer: "model.language_model.layers.0" and "language_model.model.layers.0" are both "layers.0".
_WRAPPERS = {"model", "language_model", "text_model", "transformer", "thinker", "llm", "backbone", "base_model"}
# Fused projections of some architectures and serving engines, and the projections they fuse.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "qkv": ("q_proj", "k_proj", "v_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
}  # fmt: skip
_FUSED_INTO = {part: [fused for fused, parts in FUSED.items() if part in parts] for parts in FUSED.values() for part in parts}

_T = TypeVar("_T")


def strip_wrappers(name: str) -> str:
    """A module's name without the model's wrappers."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


def aliases(name: str) -> Iterator[str]:
    """Other names of a module, the likeliest first: without wrappers, then the fused projections that it is part of."""
    short = strip_wrappers(name)
    parent, dot, last = short.rpartition(".")
    yield short
    yield from (parent + dot + fused for fused in _FUSED_INTO.get(last, ()))


class ByModuleName(dict[str, _T]):
    """Values by module name, found under the module's own name or, failing that, under one of its aliases."""

    def __init__(self, values: Mapping[str, _T]) -> None:
        super().__init__(values)
        self._short: dict[str, _T] = {}
        for name, value in values.items():
            self._short.setdefault(strip_wrappers(name), value)

    def find(self, module: str) -> _T | None:
        """The value of a module; None where no name of it is a key, or the parts of a fused projection disagree."""
        if module in self:
            return self[module]
        if not self._short:
            return None
        for name in aliases(module):
            if name in self._short:
                return self._short[name]
        parent, dot, last = strip_wrappers(module).rpartition(".")
        parts = [self._short.get(parent + dot + part) for part in FUSED.get(last, ())]
        return parts[0] if parts and parts[0] is not None and all(part == parts[0] for part in parts) else None
