"""Which entries of a module's stored tensors a part of its weight needs, and a source in which the module is that part.

A reader says of each stored tensor which of its dimensions run along N or K. The part's record is then made by the reader's own
code, from tensors that are slices: no reader has a second way to decode.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from bitline.formats.base import Range, TensorInfo, TensorSource
from bitline.formats.common.scales import grid_of
from bitline.types import LinearSpec


@dataclass(frozen=True)
class Axis:
    """A dimension of a stored tensor along N (dim 0) or K (dim 1): `count` successive entries hold `size` rows or columns."""

    dim: Literal[0, 1]
    size: int = 1
    count: int = 1

    def entries(self, part: Range, whole: int, stored: int) -> Range:
        """The entries of a part of `whole` rows or columns, which starts and ends at multiples of `size` or at the end.

        stored: entries in all.
        """
        start, stop = part
        return start // self.size * self.count, stored if stop == whole else stop // self.size * self.count


ROWS, COLUMNS = Axis(0), Axis(1)
Axes = Sequence[Axis | None]  # of each dimension of a tensor; None for one that every part needs whole
Change = Callable[[Tensor, Range, Range], Tensor]


@dataclass(frozen=True)
class Stored:
    """A tensor whose values also change in a part. change: (its entries, rows, columns of the part) to what the part stores."""

    axes: Axes
    change: Change


# By the suffix of a tensor's name, or several of which the first that exists counts; tensors that are not in it are read whole.
# None for a tensor without whose other entries no part can be read.
Layout = dict[str | tuple[str, ...], Axes | Stored | None]


def int32_axis(dim: Literal[0, 1], bits: int, *, planar: bool = False) -> Axis:
    """Codes packed in int32; those of `bits` that do not divide 32, and bit planes, in blocks of 32 codes."""
    return Axis(dim, 32, bits) if planar or 32 % bits else Axis(dim, 32 // bits)


def byte_axis(bits: int, dim: Literal[0, 1] = 1) -> Axis:
    """Codes packed in bytes, as one bit stream."""
    common = math.gcd(8, bits)
    return Axis(dim, 8 // common, bits // common)


def uncut_columns(spec: LinearSpec) -> Axis:
    """A dimension that is not cut along K; no tensor of the module then is."""
    return Axis(1, spec.k)


def scale_axes(spec: LinearSpec, shape: Sequence[int]) -> Axes | None:
    """Scales or zero points that are stored on the scale grid, also as a vector or a scalar; None for any other shape."""
    grid = grid_of(spec.n, spec.k, spec.block)
    rows, columns = (None if count == 1 else Axis(dim, spec.block[dim]) for dim, count in _numbered(grid))
    if math.prod(grid) == math.prod(shape) == 1:
        return (None,) * len(shape)
    if tuple(shape) == grid:
        return rows, columns
    if tuple(shape) in ((grid[0],), (1, grid[0])) and grid[1] == 1:
        return (*(None,) * (len(shape) - 1), rows)
    if len(shape) == 4 and (shape[0], shape[2]) == grid:
        return rows, None, columns, None
    return None


def _numbered(grid: tuple[int, int]) -> list[tuple[Literal[0, 1], int]]:
    return [(0, grid[0]), (1, grid[1])]


def vector_axes(axis: Axis, shape: Sequence[int]) -> Axes:
    """A vector along N or K, stored as [size], [1, size] or [size, 1]."""
    return [axis if size > 1 else None for size in shape]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a module with its place in the weight."""

    info: TensorInfo
    axes: Axes
    change: Change | None = None

    @staticmethod
    def of(info: TensorInfo, stored: Axes | Stored) -> StoredTensor:
        """A tensor with its entry in a layout."""
        return StoredTensor(info, stored.axes, stored.change) if isinstance(stored, Stored) else StoredTensor(info, stored)

    def along_rows(self) -> StoredTensor:
        """The tensor with all of its columns in every part."""
        return replace(self, axes=[axis if axis is not None and axis.dim == 0 else None for axis in self.axes])

    def ranges(self, spec: LinearSpec, part: tuple[Range, Range]) -> list[Range]:
        """Its entries of a part, for each of its dimensions."""
        whole = (spec.n, spec.k)
        return [
            (0, size) if axis is None else axis.entries(part[axis.dim], whole[axis.dim], size)
            for axis, size in zip(self.axes, self.info.shape, strict=True)
        ]


def part_units(tensors: Iterable[StoredTensor], spec: LinearSpec) -> tuple[int, int]:
    """Rows and columns that have entries in common; 0 where no part is smaller than the whole."""
    found = [1, 1]
    for axis in (axis for tensor in tensors for axis in tensor.axes if axis is not None):
        found[axis.dim] = math.lcm(found[axis.dim], axis.size)
    return (found[0] if found[0] < spec.n else 0), (found[1] if found[1] < spec.k else 0)


def part_spec(spec: LinearSpec, rows: Range, columns: Range) -> LinearSpec:
    """The spec of a part that starts at multiples of the scale blocks."""
    n, k = rows[1] - rows[0], columns[1] - columns[0]
    second = spec.scale2_block
    return spec.replace(n=n, k=k, scale2_block=None if second is None else (min(second[0], n), min(second[1], k)))


class PartSource:
    """A source in which the tensors of one module hold rows and columns of its weight; others are unchanged.

    tensors: of the module, by the full names in `source`.
    """

    def __init__(
        self, source: TensorSource, tensors: Mapping[str, StoredTensor], spec: LinearSpec, rows: Range, columns: Range
    ) -> None:
        self._source, self.path, self.config, self.reads = source, source.path, source.config, source.reads
        self.metadata: Mapping[str, Any] = getattr(source, "metadata", {})
        self._part, self._stored = (rows, columns), tensors
        self._ranges = {name: tensor.ranges(spec, self._part) for name, tensor in tensors.items()}
        own: dict[str, TensorInfo] = {}
        for name, tensor in tensors.items():
            shape = tuple(stop - start for start, stop in self._ranges[name])
            own[name] = replace(tensor.info, shape=shape, nbytes=math.prod(shape) * tensor.info.dtype.itemsize)
        self.tensors: Mapping[str, TensorInfo] = collections.ChainMap(own, source.tensors)  # type: ignore[arg-type]

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """A tensor's entries of the part, or the first rows of them."""
        if not self._ranges.get(name):
            return self._source.read(name, rows)
        first, *rest = self.tensors[name].shape
        return self.read_part(name, [(0, first if rows is None else min(rows, first)), *((0, size) for size in rest)])

    def read_part(self, name: str, ranges: Sequence[Range]) -> Tensor:
        """A part of a tensor's entries of the part."""
        if not self._ranges.get(name):
            return self._source.read_part(name, ranges)
        in_file = [(at + start, at + stop) for (at, _), (start, stop) in zip(self._ranges[name], ranges, strict=True)]
        tensor, change = self._source.read_part(name, in_file), self._stored[name].change
        return tensor if change is None else change(tensor, *self._part)
