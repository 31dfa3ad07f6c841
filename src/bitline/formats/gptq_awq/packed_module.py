"""One module with qweight, qzeros, scales and bias: the checks of its headers that GPTQ and AWQ have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from bitline import native
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, missing_codes
from bitline.formats.common.module_tensors import FLOATS, Layer
from bitline.formats.gptq_awq.config import Ints
from bitline.types import LinearSpec


def modules(source: TensorSource) -> Iterator[str]:
    """Names of the modules that hold a qweight, in file order. Scales or zero points without one are a CheckpointError."""
    for name, info in source.tensors.items():
        base, dot, suffix = name.rpartition(".")
        if dot and suffix == "qweight":
            yield base
        elif dot and suffix in ("scales", "qzeros") and len(info.shape) == 2 and f"{base}.qweight" not in source.tensors:
            raise missing_codes(info, f"{base}.qweight")


class IntModule(Layer):
    """A module under inspection.

    n, groups: columns and rows of scales. width: bits of the codes, held against the config.
    """

    def __init__(self, source: TensorSource, base: str, settings: Ints, config_file: Path) -> None:
        super().__init__(source, base, "qweight")
        self.settings, self.config_file = settings, config_file
        self.matrix("qweight", (torch.int32,))
        self.groups, self.n = self.matrix("scales", FLOATS)
        self.scales = self.need("scales")
        self.qzeros = self.find("qzeros")
        if self.qzeros is not None:
            self.matrix("qzeros", (torch.int32,))
        self.has_bias = self.bias(self.n)
        self.width = settings.bits
        if settings.skip:
            self.oddities.append("the config says that this layer is not quantized, yet its tensors are")

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

    def done(self, label: str, spec: LinearSpec, codes: Callable[[], dict[str, Tensor | None]]) -> LayerRecord:
        """The layer record. codes: reads what the format has its own way of: codes, and zero, perm, group_index if any."""
        fields = {"scale": "scales", "zero": "qzeros", "perm": "g_idx", "group_index": "g_idx"}
        return self.record(label, spec, lambda: {"scale": native.transposed(self.read("scales")), **codes()}, fields)
