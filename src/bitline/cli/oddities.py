"""What `bitline inspect` notices beyond the readers' own oddities: scales, column orders, lists of layers left alone.

Nothing here reads codes. Scales are read a few megabytes at a time and only counted.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.cli.render import last_word
from bitline.formats.base import LayerRecord, TensorInfo
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.quant_config import quantization_config
from bitline.types import LinearSpec

HALF_MAX, HALF_TINY, HALF_LEAST = 65504.0, 2.0**-14, 2.0**-24  # of float16: the largest, the smallest normal, the smallest
AUTO_BYTES, AUTO_TENSORS = 64_000_000, 10_000  # scales that are read without being asked to: a fraction of a second
_BATCH = 1 << 22  # numbers that are looked at together

# By the last part of a tensor's name: scales of the weight, and other numbers that have to be finite.
_SCALES = {"scales", "scale", "weight_scale", "weight_scale_inv", "_weight_scale", "absmax", "SCB"}
_NUMBERS = {
    "weight_scale_2", "weight_global_scale", "input_scale", "input_scale_2", "input_global_scale", "activation_scale",
    "pre_quant_scale", "nested_absmax", "nested_quant_map", "scaled_zeros", "qzeros", "zero", "bias",
}  # fmt: skip
_G_IDX = {"g_idx", "weight_g_idx"}
_LISTS = (
    "ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude", "skip_modules", "llm_int8_skip_modules",
)  # fmt: skip
_MOST_STEPS = 2_000_000  # comparisons of an entry of a list with a name


@dataclass
class Oddity:
    """One thing that is odd, or only worth knowing, and where: how many layers, and the first of them."""

    what: str
    layers: list[str] = field(default_factory=list)
    note: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        level = "note" if self.note else "odd"
        example = self.layers[0] if self.layers else None
        return {"what": self.what, "level": level, "layers": len(self.layers), "example": example}


# ---- what the records and the config say -------------------------------------------------------------------------------


def column_order(record: LayerRecord) -> str:
    """ "none" (no g_idx), "trivial" (it says what is so anyway), "act-order" (columns are in another order) or "ragged"."""
    if record.spec.act_order:
        return "act-order"
    if record.spec.ragged:
        return "ragged"
    for name in record.tensors:
        if name.endswith("g_idx") and _last(name) in _G_IDX:
            return "trivial"
    return "none"


_ORDERS = {
    "trivial": "g_idx is trivial (column // group size): columns are in their own order",
    "act-order": "g_idx is an activation order: columns are stored by group and the input is gathered",
    "ragged": "g_idx makes groups of unequal size",
}


def of_layers(kinds: Mapping[str, list[LayerRecord]]) -> list[Oddity]:
    """The readers' oddities, those that differ in numbers alone together, and what each g_idx turned out to be.

    kinds: layers by `column_order`.
    """
    odd: dict[str, Oddity] = {}
    for record in itertools.chain(*kinds.values()):
        for text in record.oddities:
            odd.setdefault("".join("#" if c.isdigit() else c for c in text), Oddity(text)).layers.append(record.name)
    orders = [Oddity(_ORDERS[order], [r.name for r in kinds[order]], note=True) for order in _ORDERS if order in kinds]
    return [*odd.values(), *orders]


def of_lists(checkpoint: Checkpoint, records: list[LayerRecord]) -> list[Oddity]:
    """Entries of the config's list of layers left alone that the files contradict, or that name nothing in them."""
    config = quantization_config(checkpoint.source)
    lists = {key: [e for e in config[key] if isinstance(e, str) and e] for key in _LISTS if isinstance(config.get(key), list)}
    found = []
    # `ignore` is the readers' own business: what it says of a layer is among the layer's oddities.
    if names := {e for key, entries in lists.items() if key != "ignore" for e in entries}:
        noticed = [r.name for r in records if not r.oddities and any(parent in names for parent in _parents(r.name))]
        if noticed:
            what = "the config's list of layers left alone names this layer, yet its tensors are quantized"
            found.append(Oddity(what, noticed))
    missing = list(_missing(checkpoint, list(dict.fromkeys(itertools.chain(*lists.values())))))
    if missing:
        what = f"{len(missing)} entries" if len(missing) > 1 else "1 entry"
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        found.append(Oddity(f"{what} of the config's list of layers left alone, which the files do not hold: {some}"))
    return found


def _missing(checkpoint: Checkpoint, entries: list[str]) -> Iterator[str]:
    """Entries that fit no module, as far as a bounded number of comparisons shows."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in checkpoint.source.tensors))
    known = {parent for module in modules for parent in _parents(module)}
    text, effort, steps = "\n".join(modules), MatchBudget(), 0
    tied = checkpoint.config.get("tie_word_embeddings") is not False  # then the files need not have an lm_head
    for entry in entries:
        if entry in known or (tied and "lm_head" in entry):
            continue
        steps += len(modules)
        if steps > _MOST_STEPS:
            return
        if not _is_pattern(entry):
            missing = entry not in text  # some producers list any part of a name
        else:
            try:
                missing = not any(map(Pattern(_expression(entry), effort).match, modules))
            except PatternError:
                continue  # the reader has read it in its own way
        if missing:
            yield (entry if entry.isprintable() else ascii(entry))[:100]


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or "*" in entry or "?" in entry


def _expression(entry: str) -> str:
    """ "re:" begins a regular expression; in others `*` and `?` stand for any characters and for one."""
    return entry[3:] if entry.startswith("re:") else re.escape(entry).replace(r"\*", ".*").replace(r"\?", ".") + "$"


def _parents(module: str) -> list[str]:
    return list(itertools.accumulate(module.split("."), "{}.{}".format))


def of_left_alone(checkpoint: Checkpoint, records: list[LayerRecord]) -> list[Oddity]:
    """Layers in 16 or 32 bits whose namesakes elsewhere in the model are quantized."""
    quantized = Counter(last_word(record.name) for record in records)
    dense: dict[str, list[str]] = defaultdict(list)
    for name in checkpoint.dense_names():
        info = checkpoint.source.tensors[name]
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and len(info.shape) == 2 and quantized.get(last_word(module)):
            dense[last_word(module)].append(module)
    return [
        Oddity(f"left in full precision, while {quantized[kind]} other {kind} are quantized", modules, note=True)
        for kind, modules in dense.items()
    ]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


# ---- scales ------------------------------------------------------------------------------------------------------------

_WHAT = {
    "nan": "NaN", "infinite": "infinite numbers", "overflow": "scales beyond half precision (65504)",
    "large": "scales that make weights beyond half precision (65504)", "negative": "negative scales", "zero": "scales of zero",
    "vanishing": "scales that are zero in half precision", "subnormal": "subnormal scales (below 2**-14)",
}  # fmt: skip


_HARMLESS = {"negative", "zero"}  # AutoRound's symmetric scales have either sign, and a group may hold nothing but zeros


@dataclass(frozen=True)
class _Side:
    """A tensor of numbers beside the codes.

    view: what its bytes are. reach: the largest number that it is multiplied by, 0 where it is no scale of the weight.
    padding: zeros that stand for nothing.
    """

    info: TensorInfo
    view: torch.dtype
    reach: float
    padding: int = 0


def side_tensors(checkpoint: Checkpoint, records: Iterable[LayerRecord]) -> list[_Side]:
    """The scales of all layers and the other numbers that have to be finite; none of them is codes."""
    found: dict[str, _Side] = {}
    for record in records:
        for name in record.tensors:
            last = _last(name)
            is_scale = last in _SCALES or last.endswith("_scales")
            if not (is_scale or last in _NUMBERS) or name in found:
                continue
            info = checkpoint.source.tensors[name]
            view = torch.float8_e8m0fnu if info.dtype == torch.uint8 and is_scale else info.dtype
            if view == torch.float8_e8m0fnu and record.spec.scale_dtype != view:
                continue  # codes of scales, and no scales
            if view.is_floating_point:
                # AWQ's gemv versions pad each row of their scales.
                padding = max(0, math.prod(info.shape) - record.spec.scale_count()) if last == "scales" else 0
                found[name] = _Side(info, view, _reach(record.spec) if is_scale else 0.0, padding)
    return list(found.values())


@functools.cache
def _reach(spec: LinearSpec) -> float:
    """The largest number that a scale is multiplied by; 1 where another scale comes on top."""
    if spec.scale2_block is not None:
        return 1.0
    if spec.zero == "int":
        return float((1 << spec.weight.bits) - 1)
    return max(abs(spec.weight.min()), abs(spec.weight.max()))


def check_scales(checkpoint: Checkpoint, records: list[LayerRecord], wanted: bool | None) -> dict[str, Any]:
    """Count what is odd among the scales. wanted: None reads them where they are few and small, and says so where not.

    NaN, infinite, negative, zero and subnormal scales, and those that half precision cannot hold or that make weights it
    cannot hold. Of input scales, biases and the like only NaN and infinity are counted.
    """
    sides = side_tensors(checkpoint, records)
    nbytes = sum(side.info.nbytes for side in sides)
    report: dict[str, Any] = {"checked": False, "tensors": len(sides), "nbytes": nbytes, "findings": []}
    few = nbytes <= AUTO_BYTES and len(sides) <= AUTO_TENSORS
    if not sides or wanted is False or (wanted is None and not few):
        return report
    found: dict[str, dict[str, Any]] = {}
    for batch in _batches(sides):
        for side, counts in _count(checkpoint, batch):
            for problem, count in counts.items():
                entry = found.setdefault(problem, {"what": _WHAT[problem], "values": 0, "tensors": 0, "example": side.info.name})
                entry["values"] += count
                entry["tensors"] += 1
    findings = [{"problem": p, "level": "note" if p in _HARMLESS else "odd"} | found[p] for p in _WHAT if p in found]
    return report | {"checked": True, "findings": findings}


def _batches(sides: list[_Side]) -> Iterator[list[_Side]]:
    """Tensors of one kind, in file order, about _BATCH numbers at a time."""
    kinds: dict[Any, list[_Side]] = defaultdict(list)
    for side in sides:
        kinds[side.view, side.reach].append(side)
    for members in kinds.values():
        batch: list[_Side] = []
        size = 0
        for side in members:
            batch.append(side)
            size += side.info.nbytes
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def _count(checkpoint: Checkpoint, batch: list[_Side]) -> Iterator[tuple[_Side, dict[str, int]]]:
    """What is odd in each tensor of a batch. One pass over all of them shows that nothing is, as nearly always."""
    values = [_numbers(checkpoint, side) for side in batch]
    together = torch.cat(values)
    if not together.numel():
        return
    low, high = (float(v) for v in together.aminmax())
    first = batch[0]
    smallest = {torch.float16: HALF_TINY, torch.float8_e8m0fnu: 0.0}.get(first.view, HALF_LEAST)
    # A NaN makes both of them NaN, and every comparison false.
    clean = smallest <= low and high * first.reach <= HALF_MAX if first.reach else -torch.inf < low and high < torch.inf
    if clean:
        return
    for side, numbers in zip(batch, values, strict=True):
        if counts := _odd(numbers, side):
            yield side, counts


def _numbers(checkpoint: Checkpoint, side: _Side) -> Tensor:
    """A tensor's numbers, flat, in float32 or, if it is so stored, float64."""
    data = checkpoint.read(side.info.name).reshape(-1).view(side.view)
    return data if data.dtype == torch.float64 else data.float()


def _odd(values: Tensor, side: _Side) -> dict[str, int]:
    size = values.abs()
    masks = {"nan": values.isnan(), "infinite": values.isinf()}
    if side.reach:
        finite = size < torch.inf
        masks["overflow"] = finite & (size > HALF_MAX)
        masks["large"] = finite & (size <= HALF_MAX) & (size * side.reach > HALF_MAX)
        masks["negative"] = values < 0
        masks["zero"] = size == 0
        if side.view == torch.float16:
            masks["subnormal"] = (size > 0) & (size < HALF_TINY)
        elif side.view != torch.float8_e8m0fnu:  # a block of zeros has the smallest of E8M0's scales
            masks["vanishing"] = (size > 0) & (size <= HALF_LEAST / 2)
    counts = {problem: int(mask.sum()) for problem, mask in masks.items()}
    if counts.get("zero"):
        counts["zero"] = max(0, counts["zero"] - side.padding)
    return {problem: count for problem, count in counts.items() if count}
