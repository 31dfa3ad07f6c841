"""A config's list of modules that were left alone, which is a hint and no more: the tensors decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.common.module_names import tail
from bitline.formats.common.module_tensors import Layer

KV_ODDITY = "the config has this layer's output quantized, which is the key-value cache's business and is left alone"


def left_alone(config: Mapping[str, Any], file: Path, key: str = "modules_to_not_convert") -> list[str]:
    """The names of modules that a config says were left alone; what is no list of names is a CheckpointError."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{key} is not a list of names", file=file, field=key, found=repr(names)[:200])
    return names


def is_known(found: object, known: Iterable[object]) -> bool:
    """Whether an option's value is one of these. 1 is not true, and 0 is not false."""
    return any(found is value or (isinstance(value, str) and found == value) for value in known)


class Hints:
    """The modules that a config says were left alone. What the list says and the tensors do not is an oddity.

    Entries are whole parts of a module's name ("lm_head", "mlp.gate", "model.layers.0"); `*` and `?` are wildcards for a
    whole name, "re:" begins an expression that a name starts with.
    """

    def __init__(self, entries: Iterable[str], file: Path) -> None:
        self._names: set[str] = set()
        self._patterns: list[Pattern] = []
        effort = MatchBudget(file, "ignore")
        for entry in dict.fromkeys(entries):
            try:
                if entry.startswith("re:"):
                    self._patterns.append(Pattern(entry[3:], effort))
                elif "*" in entry or "?" in entry:
                    self._patterns.append(Pattern(_glob(entry), effort))
                else:
                    self._names.add(tail(entry))
            except PatternError as error:
                raise CheckpointError(
                    "an entry of the list of modules left alone is no regular expression", file=file, field="ignore",
                    found=f"{entry!r}: {error}",
                ) from error  # fmt: skip
        self._sizes = {name.count(".") + 1 for name in self._names}

    def note(self, module: Layer) -> None:
        """Add an oddity where the list names a module whose tensors are quantized."""
        if not self._names and not self._patterns:
            return
        parts = module.base.split(".")
        runs = {".".join(parts[i : i + size]) for size in self._sizes for i in range(len(parts) - size + 1)}
        if runs & self._names or any(p.match(module.base) for p in self._patterns):
            module.oddities.append("the config says that this layer is not quantized, yet its tensors are")


def _glob(text: str) -> str:
    """A regular expression for a whole name with wildcards."""
    out = "".join(".*" if c == "*" else "." if c == "?" else f"\\{c}" if not c.isalnum() and c != "_" else c for c in text)
    return f"{out}$"
