"""Module names in a config: as few regular expressions as say exactly which modules they mean."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a name: the number of a layer or an expert


def patterns(chosen: Iterable[str], others: Iterable[str]) -> list[str]:
    """Regular expressions, each anchored at both ends, that match every chosen name and none of the others."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in chosen:
        groups[_template(name)].append(name)
    taken = {_template(name) for name in others}
    out = []
    for template, names in groups.items():
        whole = len(names) > 1 and template not in taken
        out += [f"^{template}$"] if whole else [f"^{_escaped(name)}$" for name in names]
    return out


def _template(name: str) -> str:
    parts = _NUMBER.split(name)
    return r"\d+".join(_escaped(part) for part in parts)


def _escaped(text: str) -> str:
    """re.escape for characters that mean something in an expression, and no others: dots, mostly."""
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)


def by_value(values: Mapping[str, object]) -> list[tuple[object, list[str]]]:
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


def parts_of_others(alone: Iterable[str], layers: Iterable[str]) -> dict[str, str]:
    """Names that are part of a layer's name, with that layer: where a list holds parts of names, they would mean it as well."""
    text = "\n".join(layers)
    found = {}
    for name in alone:
        if (at := text.find(name)) >= 0:
            found[name] = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    return found
