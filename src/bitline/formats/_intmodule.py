"""One module with qweight, qzeros, scales and bias: the checks of its headers that GPTQ and AWQ have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.formats._intconfig import Ints
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, in_tensor
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def modules(source: TensorSource) -> Iterator[str]:
    """Names of the modules that hold a qweight, in file order."""
    return (name.removesuffix(".qweight") for name in source.tensors if name.endswith(".qweight"))


class IntModule:
    """A module under inspection.

    n, groups: columns and rows of scales. width: bits of the codes, held against the config. oddities: what was noticed.
    """

    def __init__(self, source: TensorSource, base: str, settings: Ints, config_file: Path) -> None:
        self.source, self.base, self.settings, self.config_file = source, base, settings, config_file
        self.oddities: list[str] = []
        self._used: list[str] = []
        self.qweight = self.need("qweight", (torch.int32,))
        self.scales = self.need("scales", _FLOATS)
        self.groups, self.n = self.scales.shape
        self.qzeros = self.find("qzeros")
        if self.qzeros is not None:
            self.need("qzeros", (torch.int32,))
        self.bias = self.find("bias")
        if self.bias is not None and (self.bias.shape != (self.n,) or self.bias.dtype not in _FLOATS):
            raise self.error(
                self.bias, "a bias does not fit its layer", f"{self.bias.dtype} {list(self.bias.shape)}", f"floats [{self.n}]"
            )
        self.width = settings.bits
        if settings.skip:
            self.oddities.append("the config says that this layer is not quantized, yet its tensors are")

    def find(self, suffix: str) -> TensorInfo | None:
        """The header of a tensor of this module, noted as used; None where it is absent."""
        info = self.source.tensors.get(f"{self.base}.{suffix}")
        if info is not None and info.name not in self._used:
            self._used.append(info.name)
        return info

    def need(self, suffix: str, dtypes: tuple[torch.dtype, ...]) -> TensorInfo:
        """The header of a matrix that has to be there, with one of these dtypes."""
        info = self.find(suffix)
        if info is None:
            raise CheckpointError(
                "a quantized layer lacks a tensor", file=self.source.path, tensor=f"{self.base}.{suffix}",
                found=f"{self.base}.qweight without it", fix="a shard is missing or the checkpoint was cut: download it again",
            )  # fmt: skip
        if info.dtype not in dtypes:
            raise self.error(info, f"{suffix} has another dtype than its format", info.dtype, " or ".join(map(str, dtypes)))
        if len(info.shape) != 2 or 0 in info.shape:
            raise self.error(info, f"{suffix} is not a matrix", list(info.shape), "two dimensions >= 1")
        return info

    def read(self, suffix: str) -> Tensor:
        """A tensor's data."""
        return self.source.read(f"{self.base}.{suffix}")

    def error(self, info: TensorInfo, what: str, found: object, expected: object) -> CheckpointError:
        """An error about one tensor."""
        return CheckpointError(what, file=info.file, tensor=info.name, found=found, expected=expected)

    def check_bits(self, info: TensorInfo, words: int) -> None:
        """The columns of `info` hold n codes of the config's bits in whole words; else both facts are named."""
        expected = -(-self.n * self.width // 32)
        if words != expected:
            really = words * 32 / self.n
            raise self.error(
                info, "the tensors and the config disagree about bits", f"{words} words for {self.n} codes, {really:g} bits each",
                f"{expected} words, as bits = {self.width} in {self.config_file.name} means",
            )  # fmt: skip

    def block(self, k: int) -> tuple[int, int]:
        """The block of one scale; the number of groups is held against the config's group_size."""
        size = k if self.settings.group_size == -1 else self.settings.group_size
        if -(-k // size) != self.groups:
            per = f"about {-(-k // self.groups)} columns each"
            raise self.error(
                self.scales, "the tensors and the config disagree about groups", f"{self.groups} groups of {k} columns, {per}",
                f"{-(-k // size)}, as group_size = {self.settings.group_size} in {self.config_file.name} means",
            )  # fmt: skip
        return 1, size

    def check_zeros(self) -> None:
        """qzeros have a row per group and a code per column."""
        if self.qzeros is None:
            return
        self.check_bits(self.qzeros, self.qzeros.shape[1])
        if self.qzeros.shape[0] != self.groups:
            raise self.error(self.qzeros, "zero points and scales do not fit", f"{self.qzeros.shape[0]} groups", self.groups)

    def record(self, label: str, spec: LinearSpec, codes: Callable[[], dict[str, Tensor | None]]) -> LayerRecord:
        """The layer record. codes: reads what the format has its own way of: codes, and zero, perm, group_index if any."""

        def read() -> QuantizedWeight:
            tensors: dict[str, Any] = codes()
            bias = None if self.bias is None else self.read("bias")
            try:
                return QuantizedWeight(spec, scale=self.read("scales").t().contiguous(), bias=bias, origin=self.base, **tensors)
            except WeightError as error:
                order = self.source.tensors.get(f"{self.base}.g_idx")
                fields = {"scale": self.scales, "zero": self.qzeros, "bias": self.bias, "perm": order, "group_index": order}
                raise in_tensor(error, self.qweight, fields) from error

        nbytes = sum(self.source.tensors[name].nbytes for name in self._used)
        return LayerRecord(self.base, label, spec, tuple(self._used), read, nbytes, tuple(self.oddities))
