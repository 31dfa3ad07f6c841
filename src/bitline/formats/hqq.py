"""HQQ: groups of the flattened weight, packed by slices of group rows, with float zero points.

Every layer describes its shape, group size and packing in small tensors beside the codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorSource, missing_codes
from bitline.formats.common.ignored_modules import ignored_names
from bitline.formats.common.module_tensors import ModuleTensors
from bitline.formats.common.scales import FLOATS, SCALAR_SHAPES
from bitline.formats.quant_config import find_quantization
from bitline.types import LinearSpec, ScalarType

_INTEGERS = (torch.int32, torch.int64, torch.uint8)
# Other tensors of a layer: how it was quantized, and how its own code moves it between devices.
_UNUSED = (
    "nbits", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip


@dataclass(frozen=True)
class _Packing:
    """storage_bits: of one stored element. shifts: of the slice of rows that each field of an element holds, in order."""

    weight: ScalarType
    storage_bits: int
    shifts: tuple[int, ...]


_PACKINGS = {
    "8bit_u8": _Packing(types.uint8, 8, (0,)),
    "4bit_u8": _Packing(types.uint4, 8, (4, 0)),
    "2bit_u8": _Packing(types.uint2, 8, (6, 4, 2, 0)),
    "1bit_u8": _Packing(types.uint1, 8, (7, 6, 5, 4, 3, 2, 1, 0)),
    "3bit_32": _Packing(types.uint3, 32, (27, 24, 21, 18, 15, 12, 9, 6, 3, 0)),
}


@dataclass(frozen=True)
class _Groups:
    """Groups of an [n, k] weight: `size` weights along `axis` of the reshaped weight, or one group for all of it."""

    n: int
    k: int
    axis: int
    size: int
    per_tensor: bool

    @property
    def packed_rows(self) -> int:
        """Rows of the matrix that was packed: [groups, size] for axis 1, [size, groups] for axis 0, [n, k] per tensor."""
        if self.per_tensor:
            return self.n
        return self.n * self.k // self.size if self.axis == 1 else self.size

    @property
    def count(self) -> int:
        """Number of groups, each with a scale and a zero point."""
        return 1 if self.per_tensor else self.n * self.k // self.size

    @property
    def block(self) -> tuple[int, int]:
        """The scale block of the canonical weight."""
        if self.per_tensor:
            return self.n, self.k
        if self.axis == 1:  # a group may run over the end of a row
            return 1, math.gcd(self.k, self.size)
        return (self.n, 1) if self.size == self.n else (1, 1)

    def expand(self, values: Tensor) -> Tensor:
        """One value per group to one per scale block, flat."""
        block = self.block
        if self.axis == 1 and not self.per_tensor and block[1] != self.size:
            return values.repeat_interleave(self.size // block[1])
        if block == (1, 1):  # row i of the packed matrix is every n * k / size-th weight
            return values.repeat(self.size)
        return values


class HQQReader:
    """Layer records of HQQ checkpoints."""

    name = "hqq"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "hqq"."""
        return find_quantization(source)[0].get("quant_method") == "hqq"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a W_q. Of tensor data only the small tensors that describe a layer are read."""
        config, file = find_quantization(source)
        ignored_names(config, file, "skip_modules")
        if not isinstance(config.get("quant_config", {}), Mapping):
            raise CheckpointError("quant_config is not an object", file=file, field="quant_config",
                                  found=repr(config["quant_config"])[:200])  # fmt: skip
        for name in source.tensors:
            if name.endswith(".W_q"):
                yield _HQQModule(source, name.removesuffix(".W_q")).layer()
            elif name.endswith(".packing") and f"{name.removesuffix('.packing')}.W_q" not in source.tensors:
                raise missing_codes(source.tensors[name], f"{name.removesuffix('.packing')}.W_q")


class _HQQModule(ModuleTensors):
    """A module with its description."""

    def __init__(self, source: TensorSource, name: str) -> None:
        super().__init__(source, name, "W_q")

    def layer(self) -> LayerRecord:
        """The record: W = scale * (code - zero) as scale * code + offset, offset = -zero * scale, in float32."""
        n, k = self._shape()
        label = self._packing_name()
        packing = _PACKINGS[label]
        self._refuse_quantized_scales()
        groups = self._groups(n, k)
        self._check_codes(groups, packing, label)
        if groups.axis == 0 and not groups.per_tensor and groups.size != n:
            self.warn("groups cross the rows (axis 0): each weight has a scale and an offset of its own, 8 bytes")
        self._check_scales(groups.count)
        spec = LinearSpec(n, k, packing.weight, groups.block, zero="float", bias=self.has_bias(n))
        self.leave_unused(*_UNUSED)

        def read_fields() -> dict[str, Tensor]:
            scale, zero = self._read_scales()
            offset = -(zero * scale)
            self._check_range(scale, packing.weight.bits)
            stored = self.read("W_q").reshape(-1).view(torch.uint8 if packing.storage_bits == 8 else torch.int32)
            return {
                "codes": _repack(stored, packing.shifts, spec), "scale": groups.expand(scale).view(spec.grid),
                "offset": groups.expand(offset).view(spec.grid),
            }  # fmt: skip

        stored_as = {"scale": ("scale", "zero_scale"), "offset": ("zero", "zero_scale")}
        return self.record(f"hqq {label}", spec, read_fields, stored_as)

    # ---- the description -------------------------------------------------------------------------------------------------

    def _shape(self) -> tuple[int, int]:
        info = self.require("shape", _INTEGERS, ((2,),))
        n, k = (int(size) for size in self.read("shape"))
        if not (1 <= n < 1 << 40 and 1 <= k < 1 << 40):
            raise self.error(info, "the shape is not that of a linear layer", [n, k], "[out_features, in_features]")
        return n, k

    def _packing_name(self) -> str:
        info = self.require("packing", (torch.uint8,))
        text = bytes(self.read("packing").tolist()) if len(info.shape) == 1 and info.nbytes <= 32 else b""
        packing = text.decode("ascii", "replace")
        if packing not in _PACKINGS:
            raise self.error(info, "a packing that is not known", repr(packing), ", ".join(_PACKINGS))
        return packing

    def _groups(self, n: int, k: int) -> _Groups:
        axis = self._integer("axis")
        if axis not in (0, 1):
            raise self.error(self.require("axis"), "an axis that a matrix does not have", axis, "0 or 1")
        per_tensor = self._is_per_tensor()
        info = self.find("group_size")
        if per_tensor:
            self.leave_unused("group_size")
            size = n * k
        elif info is not None:
            size = self._integer("group_size")
        else:
            size = (n, k)[axis == 1]
        if size < 1 or n * k % size:
            raise self.error(self.codes, "groups do not fill the weight", f"groups of {size}", f"a divisor of {n * k}")
        return _Groups(n, k, axis, size, per_tensor)

    def _is_per_tensor(self) -> bool:
        """Whether one scale serves the whole weight (channel_wise false)."""
        info = self.source.tensors.get(f"{self.name}.scale")
        if info is None or info.shape not in SCALAR_SHAPES or self.find("channel_wise") is None:
            return False
        return self._integer("channel_wise") == 0

    def _integer(self, suffix: str) -> int:
        self.require(suffix, _INTEGERS, ((), (1,)))
        return int(self.read(suffix).reshape(()))

    # ---- codes and scales ------------------------------------------------------------------------------------------------

    def _check_codes(self, groups: _Groups, packing: _Packing, label: str) -> None:
        """W_q has the bytes that its packing and shape need, whatever dtype it is stored as."""
        if len(self.codes.shape) != 2:
            raise self.error(self.codes, "not a matrix of codes", list(self.codes.shape), "[rows, columns]")
        rows, per_element = groups.packed_rows, len(packing.shifts)
        nbytes = -(-rows // per_element) * (groups.n * groups.k // rows) * packing.storage_bits // 8
        if self.codes.nbytes != nbytes or (packing.storage_bits == 8 and rows % per_element):
            raise self.error(
                self.codes, "codes do not fit their shape", f"{self.codes.nbytes} bytes",
                f"{nbytes} for [{groups.n}, {groups.k}] in {label}",
            )  # fmt: skip

    def _refuse_quantized_scales(self) -> None:
        for suffix in ("quant_scale", "quant_zero"):
            if self.find(suffix) is not None and self._integer(suffix):
                raise self.error(
                    self.codes, "quantized scales (double quantization) are not supported yet", suffix, 0,
                    "quantize the model again with quant_scale and quant_zero false",
                )  # fmt: skip

    def _check_scales(self, groups: int) -> None:
        """The headers of scale and zero, or of zero_scale, which stacks both."""
        if self.find("scale") is None and self.find("zero_scale") is not None:
            self.require("zero_scale", FLOATS, ((2, groups, 1), (2, 1, groups), (2, groups)))
            return
        for suffix in ("scale", "zero"):
            self.require(suffix, FLOATS, ((groups, 1), (1, groups), (groups,), *(SCALAR_SHAPES if groups == 1 else ())))

    def _read_scales(self) -> tuple[Tensor, Tensor]:
        """Scales and zero points, float32 [groups]."""
        if self.find("scale") is None:
            zero, scale = self.read("zero_scale").float().flatten(1)
            return scale, zero
        return self.read("scale").float().flatten(), self.read("zero").float().flatten()

    def _check_range(self, scale: Tensor, bits: int) -> None:
        """scale * code must be a float32 for every code."""
        top = (1 << bits) - 1
        if bool((scale * top).isinf().any()) and not bool(scale.isinf().any()):
            info, largest = self.require(("scale", "zero_scale")), float(scale.abs().max())
            raise self.error(info, "scales times codes overflow float32", largest, f"below 3e38 / {top}")


def _repack(stored: Tensor, shifts: tuple[int, ...], spec: LinearSpec) -> Tensor:
    """Stored elements, flat, whose fields are slices of the flattened weight, to canonical rows uint8 [N, ceil(K * bits / 8)]."""
    n, k, bits, count = spec.n, spec.k, spec.weight.bits, stored.numel()
    out = torch.empty(n, bitstream.row_bytes(k, bits), dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, n, step):
        first, last = r * k, min(r + step, n) * k
        slices = []
        for i in range(first // count, -(-last // count)):
            part = stored[max(0, first - i * count) : last - i * count]
            slices.append(((part >> shifts[i]) & ((1 << bits) - 1)).to(torch.uint8))  # the mask drops the copied sign
        out[r : r + step] = bitstream.pack(torch.cat(slices).view(-1, k), bits)
    return out


READER = HQQReader()
