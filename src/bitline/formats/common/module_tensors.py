"""The tensors of one quantized module: looked up by suffix, checked by dtype and shape, and assembled into a layer record."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from bitline import bitstream
from bitline.errors import CheckpointError, WeightError
from bitline.formats.base import LayerRecord, PartReader, Range, TensorInfo, TensorSource, in_tensor, whole_units
from bitline.formats.common.scales import FLOATS, SCALAR_SHAPES
from bitline.formats.common.slices import ROWS, Layout, PartSource, StoredTensor, part_spec, part_units, vector_axes
from bitline.sharding import narrow_permuted
from bitline.types import LinearSpec
from bitline.weight import TENSOR_FIELDS, QuantizedWeight

Suffix = str | tuple[str, ...]  # of a tensor's name, after the module's; of several, the first that exists
MIN_DIVISOR, MAX_DIVISOR = 1e-35, 1e35  # a number outside has no finite, nonzero float32 reciprocal


class ModuleTensors:
    """The tensors of one module of a checkpoint. Readers subclass it with what their config says of the module.

    name: the module's name. codes: the header of its codes, the tensor that errors name unless another is at fault.
    warnings: become the record's `oddities`. Every tensor that is looked up counts as used by the layer.
    """

    def __init__(self, source: TensorSource, name: str, codes: str = "weight") -> None:
        self.source, self.name = source, name
        self.warnings: list[str] = []
        self._used: dict[str, TensorInfo] = {}
        self._unused: dict[str, None] = {}
        self._codes_suffix = codes
        self.codes = self.require(codes)

    def over(self, source: TensorSource) -> Self:
        """This module with the tensors of another source, as if it had just been made."""
        other = copy.copy(self)
        other.source, other.warnings, other._used, other._unused = source, [], {}, {}
        other.codes = other.require(self._codes_suffix)
        return other

    # ---- headers ---------------------------------------------------------------------------------------------------------

    def find(self, suffix: Suffix) -> TensorInfo | None:
        """The header of a tensor of this module; None where it is absent."""
        for one in (suffix,) if isinstance(suffix, str) else suffix:
            info = self.source.tensors.get(f"{self.name}.{one}")
            if info is not None:
                self._used[info.name] = info
                return info
        return None

    def leave_unused(self, *suffixes: str) -> None:
        """Count tensors of this module, those that exist, as its own though nothing that they hold is needed."""
        for suffix in suffixes:
            if (info := self.find(suffix)) is not None:
                self._unused[info.name] = None

    def require(
        self, suffix: Suffix, dtypes: tuple[torch.dtype, ...] = (), shapes: tuple[tuple[int, ...], ...] = ()
    ) -> TensorInfo:
        """The header of a tensor that must exist, with one of these dtypes and shapes where any are given."""
        info = self.find(suffix)
        label = suffix if isinstance(suffix, str) else suffix[0]
        if info is None:
            raise CheckpointError(
                "a quantized layer lacks a tensor", file=self.source.path, tensor=f"{self.name}.{label}",
                found=f"{', '.join(self._used) or 'nothing'} without it",
                expected=label if isinstance(suffix, str) else " or ".join(suffix),
                fix="a shard is missing or the checkpoint is truncated: download it again",
            )  # fmt: skip
        if dtypes and info.dtype not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise self.error(info, "a tensor has another dtype than its format", info.dtype, expected)
        if shapes and info.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(info, f"{label} does not fit its layer", list(info.shape), expected)
        return info

    def matrix(self, suffix: str = "weight", dtypes: tuple[torch.dtype, ...] = ()) -> tuple[int, int]:
        """The shape of a tensor that must be a non-empty matrix of one of these dtypes."""
        info = self.require(suffix, dtypes)
        if len(info.shape) != 2 or 0 in info.shape:
            raise self.error(info, "not the matrix of a linear layer", list(info.shape), "[rows, columns]")
        return info.shape[0], info.shape[1]

    def scalar(self, suffix: Suffix, dtypes: tuple[torch.dtype, ...] = FLOATS) -> TensorInfo:
        """The header of a tensor that must be a single number."""
        info = self.require(suffix, dtypes)
        if info.shape not in SCALAR_SHAPES:
            raise self.error(info, "not a single number", list(info.shape), "[] or [1]")
        return info

    def has_vector(self, suffix: str, size: int, what: str) -> bool:
        """Whether there is a float vector [size]; one of another size or dtype is an error."""
        info = self.find(suffix)
        if info is not None and (info.shape not in ((size,), (1, size)) or info.dtype not in FLOATS):
            found = f"{info.dtype} {list(info.shape)}"
            raise self.error(info, f"{what} does not fit its layer", found, f"floats [{size}]")
        return info is not None

    def has_bias(self, n: int) -> bool:
        """Whether there is a bias; one that is not n floats is an error."""
        return self.has_vector("bias", n, "a bias")

    # ---- data ------------------------------------------------------------------------------------------------------------

    def read(self, suffix: Suffix, *shape: int) -> Tensor:
        """A tensor's data, in this shape where one is given."""
        data = self.source.read(f"{self.name}.{self._present(suffix)}")
        return data.reshape(shape) if shape else data

    def _present(self, suffix: Suffix) -> str:
        """The first of several suffixes that a tensor has, the first one where none has."""
        suffixes = (suffix,) if isinstance(suffix, str) else suffix
        return next((s for s in suffixes if f"{self.name}.{s}" in self.source.tensors), suffixes[0])

    def read_reciprocal(self, suffix: str) -> Tensor:
        """1 / scalar, float32 []: the divisor of a global activation scale that is stored as a factor."""
        value = self.read(suffix).reshape(()).double()
        if not MIN_DIVISOR < float(value) < MAX_DIVISOR:
            expected = f"{MIN_DIVISOR} to {MAX_DIVISOR}"
            raise self.error(self.require(suffix), "a scale without a float32 reciprocal", float(value), expected)
        return value.reciprocal().float()

    # ---- errors, warnings and the record ---------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        """Add a warning about the layer."""
        self.warnings.append(text)

    def error(self, info: TensorInfo, what: str, found: object, expected: object, fix: str | None = None) -> CheckpointError:
        """An error about one tensor."""
        return CheckpointError(what, file=info.file, tensor=info.name, found=found, expected=expected, fix=fix)

    def scale_shape_error(self, info: TensorInfo, n: int, k: int, expected: object) -> CheckpointError:
        """The error for scales whose shape does not fit an [n, k] weight."""
        return self.error(info, f"scales do not fit a [{n}, {k}] weight", list(info.shape), expected)

    def record(
        self, label: str, spec: LinearSpec, read_fields: Callable[[], Mapping[str, Any]], stored_as: Mapping[str, Suffix],
        layout: Layout | None = None, again: Callable[[Self], LayerRecord] | None = None,
        read_in_order: Callable[[Self, int], Mapping[str, Any]] | None = None,
    ) -> LayerRecord:  # fmt: skip
        """The layer record.

        read_fields: reads the fields of the QuantizedWeight, all but the bias. stored_as: field to the suffix of its tensor,
        so that an invalid field is an error about that tensor.

        layout: how the module's tensors, all but the bias, lie along N and K; without it the layer is only read whole. again:
        makes the record of the same module over another source. read_in_order: of an act-order weight, from this module over a
        part of the codes' columns and their number: the fields as `read_fields` reads them, but codes of these columns in input
        order.
        """

        def read() -> QuantizedWeight:
            return self._weight(spec, read_fields(), stored_as)

        nbytes = sum(info.nbytes for info in self._used.values())
        stored = None if layout is None else self._stored(layout)
        parts = self._part_reader(spec, read, stored, again) if stored and again else None
        if stored and parts and read_in_order and (spec.act_order or spec.ragged):
            parts = self._permuted_part_reader(spec, parts, stored, read_in_order, stored_as)
        names, unused = tuple(self._used), tuple(self._unused)
        return LayerRecord(self.name, label, spec, names, read, nbytes, tuple(self.warnings), unused, parts)

    def _weight(self, spec: LinearSpec, fields: Mapping[str, Any], stored_as: Mapping[str, Suffix]) -> QuantizedWeight:
        """The weight of these fields and the module's bias."""
        try:
            bias = self.read("bias", spec.n) if spec.bias else None
            return QuantizedWeight(spec, bias=bias, origin=self.name, **fields)
        except WeightError as error:
            sources = {name: self.find(suffix) for name, suffix in {"bias": "bias", **stored_as}.items()}
            raise in_tensor(error, self.codes, sources) from error

    # ---- parts -----------------------------------------------------------------------------------------------------------

    def _stored(self, layout: Layout) -> dict[str, StoredTensor] | None:
        """The module's tensors with their places in the weight; None where one has no part of its own."""
        bias = self.source.tensors.get(f"{self.name}.bias")
        of_bias: Layout = {} if bias is None else {"bias": vector_axes(ROWS, bias.shape)}
        stored: dict[str, StoredTensor] = {}
        for suffix, axes in (of_bias | layout).items():
            info = self.source.tensors.get(name := f"{self.name}.{self._present(suffix)}")
            if info is not None and axes is None:
                return None
            if info is not None and axes is not None:
                stored[name] = StoredTensor.of(info, axes)
        return stored

    def _part_reader(
        self, spec: LinearSpec, read: Callable[[], QuantizedWeight], stored: dict[str, StoredTensor],
        again: Callable[[Self], LayerRecord],
    ) -> PartReader:  # fmt: skip
        """Reads parts by making the record again over the tensors' entries of the part."""

        def read_part(rows: Range, columns: Range) -> QuantizedWeight:
            record = again(self.over(PartSource(self.source, stored, spec, rows, columns)))
            if record.spec == part_spec(spec, rows, columns):
                return record.read()
            weight = read()  # alone, the part would pass for a layer of another scheme: without zero points, say
            return weight.narrow(0, *rows).narrow(1, *columns)

        return PartReader(part_units(stored.values(), spec), read_part)

    def _permuted_part_reader(
        self, spec: LinearSpec, parts: PartReader, stored: dict[str, StoredTensor],
        read_in_order: Callable[[Self, int], Mapping[str, Any]], stored_as: Mapping[str, Suffix],
    ) -> PartReader:  # fmt: skip
        """Reads columns of codes alone and scales of all groups, of which any columns may need any."""
        codes = f"{self.name}.{self._codes_suffix}"
        tensors = {name: tensor if name == codes else tensor.along_rows() for name, tensor in stored.items()}
        unit = math.lcm(*(axis.size for axis in stored[codes].axes if axis is not None and axis.dim == 1))

        def read_part(rows: Range, columns: Range) -> QuantizedWeight:
            if columns == (0, spec.k):
                return parts.read(rows, columns)
            first, last = whole_units(columns, unit, spec.k)
            part = self.over(PartSource(self.source, tensors, spec, rows, (first, last)))
            fields: dict[str, Any] = {**dict.fromkeys(TENSOR_FIELDS), **read_in_order(part, last - first)}
            own_codes = bitstream.narrow(fields["codes"], spec.weight.bits, columns[0] - first, columns[1] - first)
            cut, changes = narrow_permuted(part_spec(spec, rows, (0, spec.k)), fields, *columns, own_codes)
            del fields["bias"]
            return part._weight(cut, fields | changes, stored_as)

        return PartReader((parts.units[0], 1), read_part)
