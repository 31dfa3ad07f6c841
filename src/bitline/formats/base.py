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

# Limits on what a file may make its reader allocate.
MEMORY_MARGIN_BYTES = 64 << 20  # beyond the size of the files
PYTHON_VALUE_BYTES = 100  # a short parsed value with its slot in a container; a file may spend two characters on it
MAX_EXPERTS = 1 << 14  # in one tensor; models have hundreds
MAX_ACT_ORDER_COLUMNS = 1 << 22  # columns of a g_idx; models have tens of thousands


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it; its bytes are known to lie inside the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    nbytes: int


class TensorSource(Protocol):
    """All tensors of a checkpoint, whatever files it is sharded over. Headers are read on opening, data on demand."""

    path: Path
    config: Mapping[str, Any]  # config.json, or {} where there is none
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """The tensor, or only its first rows, memory-mapped where the file allows it. A missing name is a CheckpointError."""
        ...


@dataclass(frozen=True)
class LayerRecord:
    """One quantized linear layer of a checkpoint: its spec, and a function that reads its weight.

    name: the module's name in the checkpoint ("model.layers.0.mlp.down_proj"). format: the checkpoint format and variant
    ("gptq v1", "awq gemm", "compressed-tensors pack-quantized", "gguf Q4_1"). tensors: the checkpoint tensors it uses.
    oddities: warnings about the layer, such as a config that disagrees with the tensors. The layer is read correctly
    nevertheless.
    """

    name: str
    format: str
    spec: LinearSpec
    tensors: tuple[str, ...]
    read: Callable[[], QuantizedWeight] = field(repr=False, compare=False)
    nbytes: int = 0
    oddities: tuple[str, ...] = ()

    def weight(self) -> QuantizedWeight:
        """Read, convert and validate the layer. Invalid data is a CheckpointError that names file and tensor."""
        return self.read()


class Reader(Protocol):
    """A checkpoint family. `matches` looks at the config and the tensor names only; `layers` reads no weight data."""

    name: str

    def matches(self, source: TensorSource) -> bool:
        """True where this reader handles the checkpoint's quantization method."""
        ...

    def layers(self, source: TensorSource) -> Iterable[LayerRecord]:
        """Every quantized linear layer, shapes and dtypes checked; a config that contradicts them is a CheckpointError."""
        ...


def missing_codes(info: TensorInfo, codes: str) -> CheckpointError:
    """The error for scales, zero points or metadata whose packed codes are missing. codes: the name they would have."""
    return CheckpointError(
        "scales without codes", file=info.file, tensor=info.name, found=f"no {codes}", expected=f"{codes} in the same module",
        fix="a shard is missing or the checkpoint is truncated: download it again",
    )  # fmt: skip


def check_expert_count(info: TensorInfo, experts: int) -> None:
    """Refuse a stack of more experts than any model has: each becomes a layer, even if the file spends no byte on it."""
    if experts > MAX_EXPERTS:
        raise CheckpointError(
            "more experts in one tensor than any model has", file=info.file, tensor=info.name, field="shape", found=experts,
            expected=f"at most {MAX_EXPERTS}",
        )  # fmt: skip


def check_act_order_length(info: TensorInfo, columns: int) -> None:
    """Refuse a g_idx of more columns than any layer has: sorting takes 16 bytes a column."""
    if columns > MAX_ACT_ORDER_COLUMNS:
        raise CheckpointError(
            "an act-order index of more columns than any layer has", file=info.file, tensor=info.name, field="shape",
            found=columns, expected=f"at most {MAX_ACT_ORDER_COLUMNS}",
        )  # fmt: skip


def in_tensor(error: WeightError, info: TensorInfo, fields: Mapping[str, TensorInfo | None] | None = None) -> CheckpointError:
    """A WeightError as a CheckpointError: the same facts, with the file and the tensor.

    info: the tensor of the codes. fields: the tensors that other fields of the weight come from ("scale", "perm", …).
    """
    info = (fields or {}).get(error.field or "") or info
    return CheckpointError(
        error.what, file=info.file, tensor=info.name, found=error.found, expected=error.expected,
        fix="the file is damaged or mislabelled: download it again or convert it again",
    )  # fmt: skip
