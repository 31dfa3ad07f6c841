"""A config's list of modules that were left alone, which is a hint and no more: the tensors decide."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bitline.errors import CheckpointError
from bitline.formats._layer import Layer
from bitline.formats._patterns import Effort, Pattern, PatternError


class Hints:
    """The modules that a config says were left alone. What the list says and the tensors do not is an oddity.

    Entries name a module, or one that holds it; `*` and `?` are wildcards, "re:" begins an expression.
    """

    def __init__(self, entries: Iterable[str], file: Path) -> None:
        self._names: set[str] = set()
        self._patterns: list[Pattern] = []
        effort = Effort()
        for entry in dict.fromkeys(entries):
            try:
                if entry.startswith("re:"):
                    self._patterns.append(Pattern(entry[3:], effort))
                elif "*" in entry or "?" in entry:
                    self._patterns.append(Pattern(_glob(entry), effort))
                else:
                    self._names.add(entry)
            except PatternError as error:
                raise CheckpointError(
                    "an entry of the list of modules left alone is no regular expression", file=file, field="ignore",
                    found=f"{entry!r}: {error}",
                ) from error  # fmt: skip

    def note(self, module: Layer) -> None:
        """Add an oddity where the list names a module whose tensors are quantized."""
        if not self._names and not self._patterns:
            return
        parts = module.base.split(".")
        named = any(".".join(parts[: i + 1]) in self._names for i in range(len(parts)))
        if named or any(p.match(module.base) for p in self._patterns):
            module.oddities.append("the config says that this layer is not quantized, yet its tensors are")


def _glob(text: str) -> str:
    """A regular expression for a whole name with wildcards."""
    out = "".join(".*" if c == "*" else "." if c == "?" else f"\\{c}" if not c.isalnum() and c != "_" else c for c in text)
    return f"{out}$"
