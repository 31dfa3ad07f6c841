"""What a target of a conversion is: the forms of weight it can hold, and how it stores them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from bitline import types
from bitline.conversion.names import parts_of_others
from bitline.conversion.original import Original
from bitline.errors import ConversionError
from bitline.types import LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

# Scales in 16 bits, as most tools take them; the first that holds every value is written.
HALVES = (torch.float16, torch.bfloat16)


class NotExact(Exception):
    """Why a target cannot hold a weight exactly. fix: an option that would help; other targets are tried by the caller."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


class Target(Protocol):
    """A format to write. One object serves one conversion and sees all of its layers before the first is packed.

    name: as in `--to`. embeddings: whether the tools that read it take quantized embeddings.
    A *form* is the LinearSpec of a weight as the target stores it; its scale_dtype is settled when a weight is rewritten.
    """

    name: str
    embeddings: bool

    def forms(self, spec: LinearSpec) -> list[LinearSpec]:
        """The forms that may hold such a weight exactly, the smallest first. NotExact where none can."""
        ...

    def settle(self, forms: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotExact]]:
        """Every layer's first form made to agree with the others', where one config rules all; what cannot agree."""
        ...

    def fallback(self, spec: LinearSpec) -> LinearSpec:
        """The form that a weight is rounded to where it was said that it may be. NotExact where there is none."""
        ...

    def scales(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """The dtypes that scales may be stored in, the preferred first."""
        ...

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors of a weight in one of the forms, by the suffix of their names."""
        ...

    def config(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, Any]:
        """The quantization config of these layers, each with the form that it was stored in."""
        ...

    def files(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, dict[str, Any]]:
        """Further JSON files, by name."""
        ...


def no_input_factors(spec: LinearSpec, name: str) -> None:
    """NotExact for a weight whose input is multiplied column by column."""
    if spec.input_multiplier:
        raise NotExact(
            f"its input is multiplied by one factor a column (pre_quant_scale), which {name} has no place for",
            "--lossy multiplies the factors into the weight and rounds it again",
        )


def no_activations(spec: LinearSpec, name: str) -> None:
    """NotExact for a weight whose input is to be quantized."""
    if spec.act is not None:
        raise NotExact(
            f"its input is to be quantized ({spec.act}), which {name} cannot say",
            "--weights-only leaves inputs in 16 bits",
        )


def no_order(spec: LinearSpec, name: str) -> None:
    """NotExact for a weight whose columns are in another order than its input's."""
    if spec.act_order or spec.ragged:
        raise NotExact(f"its columns are in activation order, which {name}")


def columns_per_scale(spec: LinearSpec, allowed: tuple[int, ...] = (), whole: bool = False) -> int:
    """Columns of one scale in a target that takes only these sizes, K for all; whole: K must be made of whole groups.

    A group may be cut into smaller ones, whose scale is the same. NotExact where that does not help.
    """
    k, size = spec.k, spec.block[1]
    if size >= k:
        return k
    cut = math.gcd(size, k) if whole else size
    fitting = [g for g in allowed if cut % g == 0] if allowed else [cut]
    if not fitting or ((spec.act_order or spec.ragged) and max(fitting) != size):
        raise NotExact(f"groups of {size} columns, which cannot be cut into any of {', '.join(map(str, allowed or (size,)))}")
    return max(fitting)


def integer_form(spec: LinearSpec, scalar: ScalarType, columns: int, *, keep_act: bool = False) -> LinearSpec:
    """A form of integers with one scale for `columns` columns of a row; `uintN` has zero points, other types have none."""
    zero = "int" if not scalar.bias and not scalar.signed else "none"
    return spec.replace(
        weight=scalar, block=(1, columns), zero=zero, scale2_block=None, scale_dtype=torch.float32,
        act=spec.act if keep_act else None, input_multiplier=False,
    )  # fmt: skip


def is_integer(spec: LinearSpec) -> bool:
    """True for codes that stand for integers, whatever is subtracted from them."""
    return spec.weight.kind == "int"


def has_zero(spec: LinearSpec) -> bool:
    """True for integers that need zero points: they have some, or offsets, or their one zero is not the middle."""
    middle = 0 if spec.weight.signed else 1 << (spec.weight.bits - 1)
    return spec.zero != "none" or (is_integer(spec) and spec.weight.bias != middle)


def rounded_form(spec: LinearSpec, bits: tuple[int, ...], allowed: tuple[int, ...] = (128, 64, 32)) -> LinearSpec:
    """The symmetric integers that a weight is rounded to: as many bits as it has, or the next more, in groups of a like size."""
    width = next((b for b in bits if b >= min(spec.weight.bits, 8)), bits[-1])
    size = spec.block[1]
    columns = size if size in allowed and spec.k % size == 0 else next((g for g in allowed if spec.k % g == 0), spec.k)
    plain = spec.replace(act_order=False, ragged=False)
    return integer_form(plain, types.unsigned(width, symmetric=True), columns)


def common(values: list[Any]) -> Any:
    """The most frequent value, the first of them where several are; None where there is none."""
    return max(dict.fromkeys(values), key=values.count, default=None)


def usual_group(forms: Iterable[LinearSpec]) -> int:
    """The most common group size, 0 where every layer has one scale a row: a layer of just that many columns has it too."""
    sizes = [form.group_size for form in forms if form.group_size > 0]
    return int(common(sizes)) if sizes else 0


def common_block(forms: Iterable[LinearSpec]) -> tuple[int, int]:
    """Rows and columns of the largest scale block that is neither of one row nor the whole weight; (0, 0) for none."""
    blocks = [form.block for form in forms if form.block[0] > 1 and form.block != (form.n, form.k)]
    return max((b[0] for b in blocks), default=0), max((b[1] for b in blocks), default=0)


def block_of(form: LinearSpec, largest: tuple[int, int]) -> tuple[int, int] | None:
    """The block to name for scales of blocks, None for scales of tensors, rows and groups.

    A weight that is smaller than a block has one of its own size; it is called `largest`, as its neighbours' is, where that
    means the same. So is a whole weight whose input is quantized in groups, as inputs of block-scaled weights are.
    """
    whole = form.block == (form.n, form.k)
    grouped = form.act is not None and form.act.granularity == "group"
    if (form.block[0] == 1 and form.n > 1) or (whole and not (grouped and largest[0])):
        return None
    part = zip(form.block, largest, (form.n, form.k), strict=True)
    return largest if all(have == want or have == size <= want for have, want, size in part) else form.block


def left_alone(layers: Mapping[str, LinearSpec], original: Original) -> list[str]:
    """Modules that keep plain weights, for a config whose readers look for parts of names; a ConversionError where that fails."""
    alone = original.plain_linears()
    for name, layer in parts_of_others(alone, layers).items():
        raise ConversionError(
            "this format names the layers left alone by parts of their names, and one is part of a quantized layer's",
            file=original.checkpoint.path, tensor=name, found=f"part of {layer}", expected="names that are no part of others",
            fix="--to compressed-tensors or gptq names whole modules",
        )  # fmt: skip
    return alone
