"""The contract between a checkpoint and its format reader: tensors by name on one side, layer records on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

SPARE_BYTES = 64 << 20  # what reading may take beyond what the files hold
VALUE_BYTES = 100  # that Python takes for a short value and its place among others, for which a file may have two characters
MOST_EXPERTS = 1 << 14  # in one tensor; models have hundreds
MOST_ORDERED = 1 << 22  # columns in activation order; models have tens of thousands


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it; its bytes are known to lie inside the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    nbytes: int


class TensorSource(Protocol):
    """Every tensor of a checkpoint, whatever files it is spread over. Headers are read on opening, data when asked for."""

    path: Path
    config: Mapping[str, Any]  # config.json, or {} where there is none
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """The tensor, or only its first rows, memory-mapped where the file allows it. A missing name is a CheckpointError."""
        ...


@dataclass(frozen=True)
class LayerRecord:
    """One quantized linear layer of a checkpoint: what it is, and a function that reads it.

    name: the module's name in the checkpoint ("model.layers.0.mlp.down_proj"). format: the family in the field's words
    ("gptq v1", "awq gemm", "compressed-tensors pack-quantized", "gguf Q4_1"). tensors: the names it is made of.
    oddities: what a careful reader noticed and a user may want to know; none of them makes the layer wrong.
    """

    name: str
    format: str
    spec: LinearSpec
    tensors: tuple[str, ...]
    read: Callable[[], QuantizedWeight] = field(repr=False, compare=False)
    nbytes: int = 0
    oddities: tuple[str, ...] = ()

    def weight(self) -> QuantizedWeight:
        """Read, convert and validate the layer. What is wrong is a CheckpointError that names file and tensor."""
        return self.read()


class Reader(Protocol):
    """A checkpoint family. `matches` looks at the config and the tensor names only; `layers` reads no weight data."""

    name: str

    def matches(self, source: TensorSource) -> bool:
        """True where this reader knows the checkpoint's quantization."""
        ...

    def layers(self, source: TensorSource) -> Iterable[LayerRecord]:
        """Every quantized linear layer, checked for shapes and dtypes; the config's contradictions are CheckpointErrors."""
        ...


def without_codes(info: TensorInfo, codes: str) -> CheckpointError:
    """The error about a part of a layer whose codes are not there. codes: the name that they would have."""
    return CheckpointError(
        "scales without codes", file=info.file, tensor=info.name, found=f"no {codes}", expected=f"{codes} beside them",
        fix="a shard is missing or the checkpoint was cut: download it again",
    )  # fmt: skip


def check_experts(info: TensorInfo, experts: int) -> None:
    """An error where a stack has more experts than any model: each becomes a layer, however little of the file it is."""
    if experts > MOST_EXPERTS:
        raise CheckpointError(
            "more experts in one tensor than any model has", file=info.file, tensor=info.name, field="shape", found=experts,
            expected=f"at most {MOST_EXPERTS}",
        )  # fmt: skip


def check_order(info: TensorInfo, columns: int) -> None:
    """An error where an activation order has more columns than any layer: sorting them takes 16 bytes each."""
    if columns > MOST_ORDERED:
        raise CheckpointError(
            "an activation order of more columns than any layer has", file=info.file, tensor=info.name, field="shape",
            found=columns, expected=f"at most {MOST_ORDERED}",
        )  # fmt: skip


def in_tensor(error: WeightError, info: TensorInfo, fields: Mapping[str, TensorInfo | None] | None = None) -> CheckpointError:
    """A weight's contradiction as the checkpoint's: the same facts, with the file and the tensor.

    info: the tensor of the codes. fields: the tensors that other fields of the weight come from ("scale", "perm", …).
    """
    info = (fields or {}).get(error.field or "") or info
    return CheckpointError(
        error.what, file=info.file, tensor=info.name, found=error.found, expected=error.expected,
        fix="the file is damaged or mislabelled: download it again or convert it again",
    )  # fmt: skip
