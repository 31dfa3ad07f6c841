"""One module's tensors under inspection: the checks of headers that the readers have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, in_tensor
from bitline.types import LinearSpec, ufloat8_e5m3
from bitline.weight import QuantizedWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
NUMBER = ((), (1,), (1, 1))  # shapes of a single number


Suffix = str | tuple[str, ...]  # what follows the module's name; of several, the first that is there


def e5m3_scales(stored: Tensor) -> Tensor:
    """Scales of unsigned E5M3, uint8, as bfloat16, which holds them all: no dtype of torch is E5M3."""
    return torch.tensor(ufloat8_e5m3.values(), dtype=torch.bfloat16)[stored.int()]


class Layer:
    """A module and those of its tensors that were looked at.

    base: the module's name. main: the header of its codes, which an error is about where no other tensor is. oddities:
    what was noticed.
    """

    def __init__(self, source: TensorSource, base: str, main: str = "weight") -> None:
        self.source, self.base = source, base
        self.oddities: list[str] = []
        self._used: dict[str, TensorInfo] = {}
        self.main = self.need(main)

    def find(self, suffix: Suffix) -> TensorInfo | None:
        """The header of a tensor of this module, noted as used; None where it is absent."""
        for one in (suffix,) if isinstance(suffix, str) else suffix:
            info = self.source.tensors.get(f"{self.base}.{one}")
            if info is not None:
                self._used[info.name] = info
                return info
        return None

    def need(self, suffix: Suffix, dtypes: tuple[torch.dtype, ...] = (), shapes: tuple[tuple[int, ...], ...] = ()) -> TensorInfo:
        """The header of a tensor that has to be there, with one of these dtypes and shapes, where any are given."""
        info = self.find(suffix)
        name = suffix if isinstance(suffix, str) else suffix[0]
        if info is None:
            raise CheckpointError(
                "a quantized layer lacks a tensor", file=self.source.path, tensor=f"{self.base}.{name}",
                found=f"{', '.join(self._used) or 'nothing'} without it",
                expected=name if isinstance(suffix, str) else " or ".join(suffix),
                fix="a shard is missing or the checkpoint was cut: download it again",
            )  # fmt: skip
        if dtypes and info.dtype not in dtypes:
            names = " or ".join(map(str, dtypes))
            raise self.error(info, "a tensor has another dtype than its format", info.dtype, names)
        if shapes and info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(info, f"{name} does not fit its layer", list(info.shape), wanted)
        return info

    def matrix(self, suffix: str = "weight", dtypes: tuple[torch.dtype, ...] = ()) -> tuple[int, int]:
        """The shape of a tensor that has to be a matrix of one of these dtypes."""
        info = self.need(suffix, dtypes)
        if len(info.shape) != 2 or 0 in info.shape:
            raise self.error(info, "not the matrix of a linear layer", list(info.shape), "[rows, columns]")
        return info.shape[0], info.shape[1]

    def number(self, suffix: Suffix, dtypes: tuple[torch.dtype, ...] = FLOATS) -> TensorInfo:
        """The header of a scalar that has to be there."""
        info = self.need(suffix, dtypes)
        if info.shape not in NUMBER:
            raise self.error(info, "not a single number", list(info.shape), "[] or [1]")
        return info

    def vector(self, suffix: str, size: int, what: str) -> bool:
        """Whether there is a float vector of this size; one of another size or dtype is an error."""
        info = self.find(suffix)
        if info is not None and (info.shape not in ((size,), (1, size)) or info.dtype not in FLOATS):
            found = f"{info.dtype} {list(info.shape)}"
            raise self.error(info, f"{what} does not fit its layer", found, f"floats [{size}]")
        return info is not None

    def bias(self, n: int) -> bool:
        """Whether there is a bias; one that does not have n floats is an error."""
        return self.vector("bias", n, "a bias")

    def read(self, suffix: Suffix, *shape: int) -> Tensor:
        """A tensor's data, in this shape where one is given."""
        names = (suffix,) if isinstance(suffix, str) else suffix
        name = next((n for n in names if f"{self.base}.{n}" in self.source.tensors), names[0])
        data = self.source.read(f"{self.base}.{name}")
        return data.reshape(shape) if shape else data

    def error(self, info: TensorInfo, what: str, found: object, expected: object, fix: str | None = None) -> CheckpointError:
        """An error about one tensor."""
        return CheckpointError(what, file=info.file, tensor=info.name, found=found, expected=expected, fix=fix)

    def unfit(self, info: TensorInfo, n: int, k: int, expected: object) -> CheckpointError:
        """The error about scales of another shape than the weight's."""
        return self.error(info, f"scales do not fit a [{n}, {k}] weight", list(info.shape), expected)

    def record(
        self, label: str, spec: LinearSpec, build: Callable[[], Mapping[str, Any]], fields: Mapping[str, Suffix]
    ) -> LayerRecord:
        """The layer record. build: reads the parts of the weight, all but the bias. fields: part to the suffix it comes from."""

        def read() -> QuantizedWeight:
            parts = dict(build())
            try:
                bias = self.read("bias", spec.n) if spec.bias else None
                return QuantizedWeight(spec, bias=bias, origin=self.base, **parts)
            except WeightError as error:
                sources = {part: self.find(suffix) for part, suffix in {"bias": "bias", **fields}.items()}
                raise in_tensor(error, self.main, sources) from error

        nbytes = sum(info.nbytes for info in self._used.values())
        return LayerRecord(self.base, label, spec, tuple(self._used), read, nbytes, tuple(self.oddities))
