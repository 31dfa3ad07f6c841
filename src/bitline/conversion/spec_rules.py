"""Rules that conversion targets share: what a weight must not have, and the spec that a format stores it in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bitline import types
from bitline.conversion.module_patterns import substring_conflicts
from bitline.conversion.source_model import SourceModel
from bitline.conversion.target import NotRepresentable
from bitline.errors import ConversionError
from bitline.types import LinearSpec, ScalarType

# ---- what a format does not support --------------------------------------------------------------------------------------


def require_no_input_multiplier(spec: LinearSpec, name: str) -> None:
    """NotRepresentable for a weight with per-channel factors of its input (AWQ's pre_quant_scale)."""
    if spec.input_multiplier:
        raise NotRepresentable(
            f"its input has per-channel factors (pre_quant_scale), which {name} does not store",
            "--lossy folds the factors into the weight and requantizes it",
        )


def require_weight_only(spec: LinearSpec, name: str) -> None:
    """NotRepresentable for a weight with activation quantization."""
    if spec.act is not None:
        raise NotRepresentable(
            f"its activations are quantized ({spec.act}), which {name} does not support",
            "--weights-only drops activation quantization",
        )


def require_no_act_order(spec: LinearSpec, name: str) -> None:
    """NotRepresentable for a weight with activation order."""
    if spec.act_order or spec.ragged:
        raise NotRepresentable(f"it has act-order (g_idx), which {name} does not support")


# ---- stored specs --------------------------------------------------------------------------------------------------------


def stored_group(spec: LinearSpec, allowed: tuple[int, ...] = (), divides_k: bool = False) -> int:
    """Columns per scale in a format that takes only `allowed` group sizes; K for one scale per row.

    divides_k: the group size has to divide K. A group may be split into smaller ones with the same scale; NotRepresentable
    where that does not help.
    """
    k, size = spec.k, spec.block[1]
    if size >= k:
        return k
    divisor = math.gcd(size, k) if divides_k else size
    fitting = [g for g in allowed if divisor % g == 0] if allowed else [divisor]
    if not fitting or ((spec.act_order or spec.ragged) and max(fitting) != size):
        sizes = ", ".join(map(str, allowed or (size,)))
        raise NotRepresentable(f"its groups of {size} columns cannot be split into groups of {sizes}")
    return max(fitting)


def integer_spec(spec: LinearSpec, scalar: ScalarType, columns: int, *, keep_act: bool = False) -> LinearSpec:
    """Integers of type `scalar` with one scale per row and group of `columns`; `uintN` has zero points, other types have none."""
    zero = "int" if not scalar.bias and not scalar.signed else "none"
    return spec.replace(
        weight=scalar, block=(1, columns), zero=zero, scale2_block=None, scale_dtype=torch.float32,
        act=spec.act if keep_act else None, input_multiplier=False,
    )  # fmt: skip


def is_integer(spec: LinearSpec) -> bool:
    """True for codes that are integers, whatever their zero point."""
    return spec.weight.kind == "int"


def needs_zero_points(spec: LinearSpec) -> bool:
    """True for integers with zero points or offsets, or with an implicit zero point that is not mid-range."""
    symmetric_bias = 0 if spec.weight.signed else 1 << (spec.weight.bits - 1)
    return spec.zero != "none" or (is_integer(spec) and spec.weight.bias != symmetric_bias)


def symmetric_spec(spec: LinearSpec, bits: tuple[int, ...], allowed: tuple[int, ...] = (128, 64, 32)) -> LinearSpec:
    """The symmetric integers that a weight is rounded to: the least of `bits` that is as wide, in groups of a similar size."""
    width = next((b for b in bits if b >= min(spec.weight.bits, 8)), bits[-1])
    size = spec.block[1]
    columns = size if size in allowed and spec.k % size == 0 else next((g for g in allowed if spec.k % g == 0), spec.k)
    return integer_spec(spec.replace(act_order=False, ragged=False), types.unsigned(width, symmetric=True), columns)


# ---- what the layers of a model share ------------------------------------------------------------------------------------


def most_common(values: list[Any]) -> Any:
    """The most frequent value, the first of equals; None for none."""
    return max(dict.fromkeys(values), key=values.count, default=None)


def common_group_size(specs: Iterable[LinearSpec]) -> int:
    """The most common group size; 0 where every layer has one scale per row, since K of some layer may equal any number."""
    sizes = [spec.group_size for spec in specs if spec.group_size > 0]
    return int(most_common(sizes)) if sizes else 0


def largest_block(specs: Iterable[LinearSpec]) -> tuple[int, int]:
    """(rows, columns) of the largest scale block of more than one row that is not the whole weight; (0, 0) for none."""
    blocks = [spec.block for spec in specs if spec.block[0] > 1 and spec.block != (spec.n, spec.k)]
    return max((b[0] for b in blocks), default=0), max((b[1] for b in blocks), default=0)


def config_block(spec: LinearSpec, largest: tuple[int, int]) -> tuple[int, int] | None:
    """The block size to write into a config for a block-scaled weight; None for per-tensor, per-row and per-group scales.

    A weight smaller than a block has a block of its own size; it is written as `largest`, the block of the other layers,
    where that means the same. So is a per-tensor weight whose activations are quantized in groups, as those of block-scaled
    weights are.
    """
    per_tensor = spec.block == (spec.n, spec.k)
    grouped_act = spec.act is not None and spec.act.granularity == "group"
    if (spec.block[0] == 1 and spec.n > 1) or (per_tensor and not (grouped_act and largest[0])):
        return None
    dims = zip(spec.block, largest, (spec.n, spec.k), strict=True)
    return largest if all(own == common or own == size <= common for own, common, size in dims) else spec.block


def ignored_modules(layers: Mapping[str, LinearSpec], source: SourceModel) -> list[str]:
    """Modules that stay unquantized, for formats whose readers match them as substrings of module names.

    A ConversionError where an ignored module's name is a substring of a quantized layer's.
    """
    ignored = source.unquantized_linears()
    for name, layer in substring_conflicts(ignored, layers).items():
        raise ConversionError(
            "this format matches ignored modules by substring, and one is part of a quantized layer's name",
            file=source.checkpoint.path, tensor=name, found=f"part of {layer}", expected="names that are no substring of others",
            fix="--to compressed-tensors or gptq match whole module names",
        )  # fmt: skip
    return ignored
