"""Module names in a quantization config: as few regular expressions as match exactly the modules that are meant."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a name: the index of a layer or an expert


def exact_patterns(chosen: Iterable[str], others: Iterable[str]) -> list[str]:
    """Regular expressions, anchored at both ends, that match every chosen name and none of the others."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in chosen:
        groups[_index_pattern(name)].append(name)
    taken = {_index_pattern(name) for name in others}
    out = []
    for pattern, names in groups.items():
        any_index = len(names) > 1 and pattern not in taken
        out += [f"^{pattern}$"] if any_index else [f"^{_escape(name)}$" for name in names]
    return out


def _index_pattern(name: str) -> str:
    """An expression for a name with any layer or expert index."""
    return r"\d+".join(_escape(part) for part in _INDEX.split(name))


def _escape(text: str) -> str:
    """re.escape of metacharacters only, as people write such patterns: mostly dots."""
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)


def group_by_value(values: Mapping[str, object]) -> list[tuple[object, list[str]]]:
    """Names grouped by equal values, the largest group first; values need not be hashable."""
    groups: list[tuple[object, list[str]]] = []
    for name, value in values.items():
        for known, names in groups:
            if known == value:
                names.append(name)
                break
        else:
            groups.append((value, [name]))
    return sorted(groups, key=lambda group: -len(group[1]))


def substring_conflicts(ignored: Iterable[str], layers: Iterable[str]) -> dict[str, str]:
    """Ignored names that are a substring of a layer's name, with that layer: it would be ignored too."""
    text = "\n".join(layers)
    found = {}
    for name in ignored:
        if (at := text.find(name)) >= 0:
            found[name] = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    return found
