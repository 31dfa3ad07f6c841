"""The tensors of one quantized module: looked up by suffix, checked by dtype and shape, and assembled into a layer record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, in_tensor
from bitline.formats.common.scales import FLOATS, SCALAR_SHAPES
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

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
        self.codes = self.require(codes)

    # ---- headers ---------------------------------------------------------------------------------------------------------

    def find(self, suffix: Suffix) -> TensorInfo | None:
        """The header of a tensor of this module; None where it is absent."""
        for one in (suffix,) if isinstance(suffix, str) else suffix:
            info = self.source.tensors.get(f"{self.name}.{one}")
            if info is not None:
                self._used[info.name] = info
                return info
        return None

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
        suffixes = (suffix,) if isinstance(suffix, str) else suffix
        found = next((s for s in suffixes if f"{self.name}.{s}" in self.source.tensors), suffixes[0])
        data = self.source.read(f"{self.name}.{found}")
        return data.reshape(shape) if shape else data

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
        self, label: str, spec: LinearSpec, read_fields: Callable[[], Mapping[str, Any]], stored_as: Mapping[str, Suffix]
    ) -> LayerRecord:
        """The layer record.

        read_fields: reads the fields of the QuantizedWeight, all but the bias. stored_as: field to the suffix of its tensor,
        so that an invalid field is an error about that tensor.
        """

        def read() -> QuantizedWeight:
            fields = dict(read_fields())
            try:
                bias = self.read("bias", spec.n) if spec.bias else None
                return QuantizedWeight(spec, bias=bias, origin=self.name, **fields)
            except WeightError as error:
                sources = {name: self.find(suffix) for name, suffix in {"bias": "bias", **stored_as}.items()}
                raise in_tensor(error, self.codes, sources) from error

        nbytes = sum(info.nbytes for info in self._used.values())
        return LayerRecord(self.name, label, spec, tuple(self._used), read, nbytes, tuple(self.warnings))
