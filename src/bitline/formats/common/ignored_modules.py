"""A config's list of modules that are not quantized ("ignore", "modules_to_not_convert"): a hint, since tensors decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.common.module_names import strip_wrappers
from bitline.formats.common.module_tensors import ModuleTensors

IGNORED_WARNING = "the config says that this layer is not quantized, but its tensors are"
KV_CACHE_WARNING = "the config quantizes this layer's output, which is for the KV cache and does not affect the layer"


def ignored_names(config: Mapping[str, Any], file: Path, key: str = "modules_to_not_convert") -> list[str]:
    """The names under `key` of the config, [] where there are none; a value that is no list of names is a CheckpointError."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{key} is not a list of names", file=file, field=key, found=repr(names)[:200])
    return names


class IgnoredModules:
    """The modules that a config says are not quantized. A quantized module on the list gets a warning.

    An entry is a run of whole components of a module's name ("lm_head", "mlp.gate", "model.layers.0"), a glob for the
    whole name (with `*` or `?`), or "re:" and a regular expression matched from the name's start.
    """

    def __init__(self, entries: Iterable[str], file: Path) -> None:
        self._names: set[str] = set()
        self._patterns: list[Pattern] = []
        budget = MatchBudget(file, "ignore")
        for entry in dict.fromkeys(entries):
            try:
                if entry.startswith("re:"):
                    self._patterns.append(Pattern(entry[3:], budget))
                elif "*" in entry or "?" in entry:
                    self._patterns.append(Pattern(_glob(entry), budget))
                else:
                    self._names.add(strip_wrappers(entry))
            except PatternError as error:
                raise CheckpointError(
                    "an entry of the list of ignored modules is not a regular expression", file=file, field="ignore",
                    found=f"{entry!r}: {error}",
                ) from error  # fmt: skip
        self._sizes = {name.count(".") + 1 for name in self._names}

    def warn_if_listed(self, module: ModuleTensors) -> None:
        """Add a warning to a quantized module that the list names."""
        if not self._names and not self._patterns:
            return
        parts = module.name.split(".")
        runs = {".".join(parts[i : i + size]) for size in self._sizes for i in range(len(parts) - size + 1)}
        if runs & self._names or any(p.match(module.name) for p in self._patterns):
            module.warn(IGNORED_WARNING)


def _glob(text: str) -> str:
    """A glob as a regular expression for a whole name."""
    out = "".join(".*" if c == "*" else "." if c == "?" else f"\\{c}" if not c.isalnum() and c != "_" else c for c in text)
    return f"{out}$"
