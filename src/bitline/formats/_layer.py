"""One module's tensors under inspection: the checks of headers that several readers have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, in_tensor
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Layer:
    """A module and those of its tensors that were looked at.

    base: the module's name. main: the header of its codes, which an error is about where no other tensor is. oddities:
    what was noticed.
    """

    def __init__(self, source: TensorSource, base: str, main: str) -> None:
        self.source, self.base = source, base
        self.oddities: list[str] = []
        self._used: list[str] = []
        self.main = self.need(main)

    def find(self, suffix: str) -> TensorInfo | None:
        """The header of a tensor of this module, noted as used; None where it is absent."""
        info = self.source.tensors.get(f"{self.base}.{suffix}")
        if info is not None and info.name not in self._used:
            self._used.append(info.name)
        return info

    def need(self, suffix: str, dtypes: tuple[torch.dtype, ...] = (), shapes: tuple[tuple[int, ...], ...] = ()) -> TensorInfo:
        """The header of a tensor that has to be there, with one of these dtypes and shapes, where any are given."""
        info = self.find(suffix)
        if info is None:
            raise CheckpointError(
                "a quantized layer lacks a tensor", file=self.source.path, tensor=f"{self.base}.{suffix}",
                found=f"{', '.join(self._used) or 'nothing'} without it",
                fix="a shard is missing or the checkpoint was cut: download it again",
            )  # fmt: skip
        if dtypes and info.dtype not in dtypes:
            names = " or ".join(map(str, dtypes))
            raise self.error(info, "a tensor has another dtype than its format", info.dtype, names)
        if shapes and info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(info, f"{suffix} does not fit its layer", list(info.shape), wanted)
        return info

    def matrix(self, suffix: str, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
        """The shape of a tensor that has to be a matrix of one of these dtypes."""
        info = self.need(suffix, dtypes)
        if len(info.shape) != 2 or 0 in info.shape:
            raise self.error(info, "not the matrix of a linear layer", list(info.shape), "[rows, columns]")
        return info.shape[0], info.shape[1]

    def bias(self, n: int) -> bool:
        """Whether there is a bias; one that does not have n floats is an error."""
        info = self.find("bias")
        if info is not None and (info.shape != (n,) or info.dtype not in FLOATS):
            raise self.error(info, "a bias does not fit its layer", f"{info.dtype} {list(info.shape)}", f"floats [{n}]")
        return info is not None

    def read(self, suffix: str) -> Tensor:
        """A tensor's data."""
        return self.source.read(f"{self.base}.{suffix}")

    def error(self, info: TensorInfo, what: str, found: object, expected: object, fix: str | None = None) -> CheckpointError:
        """An error about one tensor."""
        return CheckpointError(what, file=info.file, tensor=info.name, found=found, expected=expected, fix=fix)

    def record(
        self, label: str, spec: LinearSpec, build: Callable[[], Mapping[str, Any]], fields: Mapping[str, str]
    ) -> LayerRecord:
        """The layer record. build: reads the parts of the weight, all but the bias. fields: part to the suffix it comes from."""

        def read() -> QuantizedWeight:
            parts = dict(build())
            try:
                return QuantizedWeight(spec, bias=self.read("bias") if spec.bias else None, origin=self.base, **parts)
            except WeightError as error:
                named = {"bias": "bias", **fields}
                sources = {part: self.source.tensors.get(f"{self.base}.{suffix}") for part, suffix in named.items()}
                raise in_tensor(error, self.main, sources) from error

        nbytes = sum(self.source.tensors[name].nbytes for name in self._used)
        return LayerRecord(self.base, label, spec, tuple(self._used), read, nbytes, tuple(self.oddities))
