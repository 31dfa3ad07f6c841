"""A module of qweight, qzeros, scales and bias in int32: the header checks that GPTQ and AWQ gemm have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from bitline import native
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, missing_codes
from bitline.formats.common.ignored_modules import IGNORED_WARNING
from bitline.formats.common.module_tensors import ModuleTensors
from bitline.formats.common.scales import FLOATS
from bitline.formats.common.slices import ROWS, Axes, Axis, Layout, int32_axis
from bitline.formats.gptq_awq.config import ModuleSettings
from bitline.types import LinearSpec


def modules_with_qweight(source: TensorSource) -> Iterator[str]:
    """Names of the modules that have a qweight, in file order. Scales or zero points without one are a CheckpointError."""
    for tensor, info in source.tensors.items():
        module, dot, suffix = tensor.rpartition(".")
        if dot and suffix == "qweight":
            yield module
        elif dot and suffix in ("scales", "qzeros") and len(info.shape) == 2 and f"{module}.qweight" not in source.tensors:
            raise missing_codes(info, f"{module}.qweight")


class PackedModule(ModuleTensors):
    """A module of int32-packed codes. groups, n: the shape of its scales. bits: the config's, checked against the shapes."""

    def __init__(self, source: TensorSource, name: str, settings: ModuleSettings, config_file: Path) -> None:
        super().__init__(source, name, "qweight")
        self.settings, self.config_file = settings, config_file
        self.matrix("qweight", (torch.int32,))
        self.groups, self.n = self.matrix("scales", FLOATS)
        self.scales = self.require("scales")
        self.qzeros = self.find("qzeros")
        if self.qzeros is not None:
            self.matrix("qzeros", (torch.int32,))
        self.bias = self.has_bias(self.n)
        self.bits = settings.bits
        if settings.ignored:
            self.warn(IGNORED_WARNING)

    def check_packed_columns(self, info: TensorInfo, packed_columns: int) -> None:
        """The columns of `info` hold n codes of the config's bits in whole int32; else both facts are in the error."""
        expected = -(-self.n * self.bits // 32)
        if packed_columns != expected:
            actual_bits = packed_columns * 32 / self.n
            raise self.error(
                info, "the tensors and the config disagree about bits",
                f"{packed_columns} int32 for {self.n} codes, {actual_bits:g} bits each",
                f"{expected} int32, as bits = {self.bits} in {self.config_file.name} means",
            )  # fmt: skip

    def check_qzeros(self) -> None:
        """qzeros have a row per group and a code per column."""
        if self.qzeros is None:
            return
        self.check_packed_columns(self.qzeros, self.qzeros.shape[1])
        if self.qzeros.shape[0] != self.groups:
            raise self.error(self.qzeros, "zero points and scales do not fit", f"{self.qzeros.shape[0]} groups", self.groups)

    def scale_block(self, k: int) -> tuple[int, int]:
        """The config's scale block, checked against the number of groups that the scales have."""
        block = self.settings.scale_block(k)
        if -(-k // block[1]) != self.groups:
            per_group = f"about {-(-k // self.groups)} columns each"
            raise self.error(
                self.scales, "the tensors and the config disagree about groups",
                f"{self.groups} groups of {k} columns, {per_group}", self.settings.expected_groups(k, self.config_file),
            )  # fmt: skip
        return block

    def over(self, source: TensorSource) -> Self:
        """See ModuleTensors."""
        return type(self)(source, self.name, self.settings, self.config_file)

    def layout(self, spec: LinearSpec, codes: Axes, *, planar: bool = False) -> Layout:
        """How the module's tensors lie along N and K. codes: qweight's. planar: zero points are bit planes."""
        groups = None if self.groups == 1 else Axis(1, spec.block[1])
        return {"qweight": codes, "scales": (groups, ROWS), "qzeros": (groups, int32_axis(0, self.bits, planar=planar))}

    def packed_record(
        self, label: str, spec: LinearSpec, read_codes: Callable[[], dict[str, Tensor | None]], layout: Layout,
        again: Callable[[Self], LayerRecord], read_in_order: Callable[[Self, int], dict[str, Tensor | None]] | None = None,
    ) -> LayerRecord:  # fmt: skip
        """The layer record. read_codes: reads the format's own fields: codes, and zero, perm and group_index if any. The rest is
        for ModuleTensors.record.
        """
        stored_as = {"scale": "scales", "zero": "qzeros", "perm": "g_idx", "group_index": "g_idx"}
        read = lambda: {"scale": self.read_scales(), **read_codes()}
        return self.record(label, spec, read, stored_as, layout, again, read_in_order)

    def read_scales(self) -> Tensor:
        """Scales [N, G]."""
        return native.transposed(self.read("scales"))
