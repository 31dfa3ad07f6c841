"""Findings of `bitline inspect` about layers and the config: warnings, act-order, ignored modules, unquantized layers."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bitline.checkpoint import Checkpoint
from bitline.cli.render import leaf_name
from bitline.formats.base import LayerRecord
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.quant_config import quantization_config

_G_IDX = {"g_idx", "weight_g_idx"}
_IGNORE_KEYS = (
    "ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude", "skip_modules", "llm_int8_skip_modules",
)  # fmt: skip
_MAX_COMPARISONS = 2_000_000  # of an ignored-modules entry with a module name


@dataclass
class Finding:
    """A warning or a note about a checkpoint, with the layers that it concerns."""

    what: str
    layers: list[str] = field(default_factory=list)
    note: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        level = "note" if self.note else "odd"
        example = self.layers[0] if self.layers else None
        return {"what": self.what, "level": level, "layers": len(self.layers), "example": example}


# ---- layers --------------------------------------------------------------------------------------------------------------


def column_order(record: LayerRecord) -> str:
    """ "none" (no g_idx), "trivial" (g_idx is column // group size), "act-order", or "ragged" (unequal groups)."""
    if record.spec.act_order:
        return "act-order"
    if record.spec.ragged:
        return "ragged"
    for name in record.tensors:
        if name.endswith("g_idx") and name.rpartition(".")[2] in _G_IDX:
            return "trivial"
    return "none"


_ORDER_NOTES = {
    "trivial": "g_idx is trivial (column // group size): no act-order",
    "act-order": "g_idx is an activation order: columns are stored by group and the input is gathered",
    "ragged": "g_idx makes groups of unequal size",
}


def layer_findings(by_order: Mapping[str, list[LayerRecord]]) -> list[Finding]:
    """The readers' warnings, those that differ in numbers only together, and a note on each kind of g_idx.

    by_order: layers by `column_order`.
    """
    warnings: dict[str, Finding] = {}
    for record in itertools.chain(*by_order.values()):
        for text in record.oddities:
            without_numbers = "".join("#" if c.isdigit() else c for c in text)
            warnings.setdefault(without_numbers, Finding(text)).layers.append(record.name)
    notes = [
        Finding(text, [r.name for r in by_order[order]], note=True) for order, text in _ORDER_NOTES.items() if order in by_order
    ]
    return [*warnings.values(), *notes]


def unquantized_findings(checkpoint: Checkpoint, records: list[LayerRecord]) -> list[Finding]:
    """Unquantized 2-D weights whose namesakes elsewhere in the model are quantized."""
    quantized = Counter(leaf_name(record.name) for record in records)
    unquantized: dict[str, list[str]] = defaultdict(list)
    for name in checkpoint.dense_names():
        info = checkpoint.source.tensors[name]
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and len(info.shape) == 2 and quantized.get(leaf_name(module)):
            unquantized[leaf_name(module)].append(module)
    return [
        Finding(f"not quantized, while {quantized[leaf]} other {leaf} are", modules, note=True)
        for leaf, modules in unquantized.items()
    ]


# ---- ignored modules -----------------------------------------------------------------------------------------------------


def ignored_module_findings(checkpoint: Checkpoint, records: list[LayerRecord]) -> list[Finding]:
    """Entries of the config's list of ignored modules that the files contradict, or that match nothing in them."""
    config = quantization_config(checkpoint.source)
    lists = {
        key: [e for e in config[key] if isinstance(e, str) and e] for key in _IGNORE_KEYS if isinstance(config.get(key), list)
    }
    found = []
    # Readers interpret `ignore` themselves, and what contradicts it is among their warnings.
    if names := {e for key, entries in lists.items() if key != "ignore" for e in entries}:
        quantized = [r.name for r in records if not r.oddities and any(parent in names for parent in _parents(r.name))]
        if quantized:
            found.append(
                Finding("the config's list of ignored modules names this layer, but its tensors are quantized", quantized)
            )
    unmatched = list(_unmatched(checkpoint, list(dict.fromkeys(itertools.chain(*lists.values())))))
    if unmatched:
        count = f"{len(unmatched)} entries" if len(unmatched) > 1 else "1 entry"
        some = ", ".join(unmatched[:3]) + (", …" if len(unmatched) > 3 else "")
        found.append(Finding(f"{count} of the config's list of ignored modules match nothing in the files: {some}"))
    return found


def _unmatched(checkpoint: Checkpoint, entries: list[str]) -> Iterator[str]:
    """Entries that match no module, as far as a bounded number of comparisons shows."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in checkpoint.source.tensors))
    known = {parent for module in modules for parent in _parents(module)}
    all_names, budget, comparisons = "\n".join(modules), MatchBudget(), 0
    tied = checkpoint.config.get("tie_word_embeddings") is not False  # then the files need not have an lm_head
    for entry in entries:
        if entry in known or (tied and "lm_head" in entry):
            continue
        comparisons += len(modules)
        if comparisons > _MAX_COMPARISONS:
            return
        if not _is_pattern(entry):
            matches = entry in all_names  # some producers list substrings of names
        else:
            try:
                matches = any(map(Pattern(_as_regex(entry), budget).match, modules))
            except PatternError:
                continue  # for the reader to interpret
        if not matches:
            yield (entry if entry.isprintable() else ascii(entry))[:100]


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or "*" in entry or "?" in entry


def _as_regex(entry: str) -> str:
    """ "re:" introduces a regular expression; other patterns have `*` and `?` as wildcards."""
    return entry[3:] if entry.startswith("re:") else re.escape(entry).replace(r"\*", ".*").replace(r"\?", ".") + "$"


def _parents(module: str) -> list[str]:
    """The module's name and those of the modules that contain it."""
    return list(itertools.accumulate(module.split("."), "{}.{}".format))
