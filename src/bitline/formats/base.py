"""The contract between a checkpoint and its format reader: tensors by name on one side, layer records on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

Range = tuple[int, int]  # [start, stop)

# Limits on what a file may make its reader allocate.
MEMORY_MARGIN_BYTES = 64 << 20  # beyond the size of the files
PYTHON_VALUE_BYTES = 100  # a short parsed value with its slot in a container; a file may spend two characters on it
MAX_EXPERTS = 1 << 14  # in one tensor; models have hundreds
MAX_ACT_ORDER_COLUMNS = 1 << 22  # columns of a g_idx; models have tens of thousands

# Last components of names of tensors that a quantized layer's module may have and its weight does not need, in every format.
# Readers name those of their own format (`LayerRecord.unused`).
HARMLESS = frozenset((
    "k_scale", "v_scale", "q_scale", "kv_scale", "output_scale", "output_zero_point",  # of a quantized KV cache
    "e_score_correction_bias", "per_expert_scale",  # parameters of a router beside its weight, which the model itself loads
))  # fmt: skip


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

    @property
    def reads(self) -> set[str]:
        """Names of the tensors that were read, in whole or in part."""
        ...

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """The tensor, or only its first rows, memory-mapped where the file allows it. A missing name is a CheckpointError."""
        ...

    def read_part(self, name: str, ranges: Sequence[Range]) -> Tensor:
        """A contiguous part of a tensor, one range for each dimension, without reading the rest where the file allows it."""
        ...


def info_to_read(source: TensorSource, name: str) -> TensorInfo:
    """The header of a tensor that `source` is about to read, now one of its `reads`. A missing name is a CheckpointError."""
    info = source.tensors.get(name)
    if info is None:
        raise CheckpointError("no such tensor", file=source.path, tensor=name, expected=f"one of {len(source.tensors)} names")
    source.reads.add(name)
    return info


@dataclass(frozen=True)
class PartReader:
    """Reads a part of a layer without the rest of it.

    units: rows and columns that are stored together: ranges start at multiples of them, and end at multiples or at the layer's
    end. 0 for a dimension that is only read whole. read: (rows, columns) to the weight of that part, equal to the whole weight's
    `narrow`.
    """

    units: tuple[int, int]
    read: Callable[[Range, Range], QuantizedWeight]


@dataclass(frozen=True)
class LayerRecord:
    """One quantized linear layer of a checkpoint: its spec, and a function that reads its weight.

    name: the module's name in the checkpoint ("model.layers.0.mlp.down_proj"). format: the checkpoint format and variant
    ("gptq v1", "awq gemm", "compressed-tensors pack-quantized", "gguf Q4_1"). tensors: the checkpoint tensors it uses.
    oddities: warnings about the layer, such as a config that disagrees with the tensors. The layer is read correctly
    nevertheless. unused: tensors of its module that hold nothing that the weight needs. Every other one must have been read,
    through the source, when the weight has been: `Checkpoint` refuses a layer with a tensor that nothing reads. parts: reads rows
    and columns alone; None where the whole layer is read and then cut.
    """

    name: str
    format: str
    spec: LinearSpec
    tensors: tuple[str, ...]
    read: Callable[[], QuantizedWeight] = field(repr=False, compare=False)
    nbytes: int = 0
    oddities: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    parts: PartReader | None = field(default=None, repr=False, compare=False)

    @property
    def units(self) -> tuple[int, int]:
        """Rows and input columns that the file stores together; 0 where all are read whatever is asked for."""
        return (0, 0) if self.parts is None else self.parts.units

    def weight(self, rows: Range | None = None, columns: Range | None = None) -> QuantizedWeight:
        """Read, convert and validate the layer, or a part of it.

        A part has the same bits as that `narrow` of the whole weight. Only the units that it touches are read, see `units`; data
        outside of them are not checked.

        Args:
            rows: [start, stop) of N; None for all.
            columns: [start, stop) of K, in input order; None for all.

        Raises:
            CheckpointError: For invalid data, with file and tensor.
            WeightError: For an empty or impossible range.
        """
        sizes = (self.spec.n, self.spec.k)
        wanted = (rows or (0, self.spec.n), columns or (0, self.spec.k))
        for size, (start, stop) in zip(sizes, wanted, strict=True):
            if not 0 <= start < stop <= size:
                raise WeightError("cannot read a part of a layer", tensor=self.name, found=f"[{start}, {stop})",
                                  expected=f"a range within [0, {size})")  # fmt: skip
        stored = [whole_units(part, unit, size) for part, unit, size in zip(wanted, self.units, sizes, strict=True)]
        if self.parts is None or stored == [(0, self.spec.n), (0, self.spec.k)]:
            weight = self.read()
        else:
            weight = self.parts.read(*stored)
        dim: Any
        for dim, ((start, stop), (first, last)) in enumerate(zip(wanted, stored, strict=True)):
            if (start, stop) != (first, last):
                weight = weight.narrow(dim, start - first, stop - first)
        return weight


def whole_units(part: Range, unit: int, size: int) -> Range:
    """The least range of whole units around a part."""
    if unit == 0:
        return 0, size
    return part[0] // unit * unit, min(-(-part[1] // unit) * unit, size)


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
