"""The canonical weight: what every checkpoint reader produces and every kernel packs from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from bitline import bitstream, sharding
from bitline.dequant import apply_scales, apply_second_level, codes_to_float, column_groups
from bitline.errors import InputError, WeightError
from bitline.host import without_default_device
from bitline.types import LinearSpec
from bitline.weight_checks import WeightChecks


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A linear layer's quantized weight [N, K] in the canonical form, immutable and validated.

    Columns are stored in `perm` order. G is the number of scale columns; the scale grid is [ceil(N / bn), ceil(K / bk)] for
    spec.block (bn, bk), and [., G] for a ragged weight. LinearSpec gives the dequantization formula.

    Attributes:
        spec: Shape and quantization scheme.
        codes: uint8 [N, ceil(K * bits / 8)]; each row is a little-endian bit stream along K. Rows may be strided.
        scale: Block scales on the scale grid, in the checkpoint's dtype: floats, float8_e8m0fnu for MX, float8_e4m3fn for NVFP4,
            uint8 or int8 for GGUF's K-quants, in units of scale2.
        zero: Zero points in code units, uint8 on the scale grid. Present where spec.zero is "int".
        offset: Offset in the weight's units, added after scaling, on the scale grid in the scale's dtype. Present where spec.zero
            is "float".
        scale2: Second level of scales, a factor of `scale`: NVFP4's global scale, float64 [1, 1] (so that the reciprocal that
            files store is exact), or GGUF's super-block scales, on the grid of spec.scale2_block.
        offset2: The same for `offset`.
        perm: Act-order permutation, int32 [K]: stored column j is input column perm[j].
        group_index: int32 [K], non-decreasing: the scale column of each stored column. Present where spec.ragged.
        input_scale: Static activation scale, one number; for NVFP4 the input's global scale.
        input_zero: Static activation zero point, one number.
        bias: [N].
        input_multiplier: [K] factors of the input columns, applied before activation quantization (AWQ's pre-quantization scale).
            `dequantize` does not include them.
        origin: Name of the tensor in the checkpoint, for messages.

    Raises:
        WeightError: Where a tensor is missing or superfluous, has the wrong shape or dtype, holds NaN or infinity, or is out of
            range. Values are not checked on the meta device.
    """

    spec: LinearSpec
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    offset: Tensor | None = None
    scale2: Tensor | None = None
    offset2: Tensor | None = None
    perm: Tensor | None = None
    group_index: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None
    bias: Tensor | None = None
    input_multiplier: Tensor | None = None
    origin: str = field(default="", compare=False)

    @without_default_device
    def __post_init__(self) -> None:
        checks = WeightChecks(self.spec, self._fields(), self.origin)
        checks.check_structure()
        if self.codes.device.type != "meta":
            checks.check_values()

    def _fields(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in TENSOR_FIELDS}

    # ---- accessors and copies --------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.spec.n, self.spec.k

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        return {name: t for name, t in self._fields().items() if t is not None}

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors().values())

    @without_default_device
    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Copy to a device. No dtype changes.

        Args:
            device: The target device.

        Returns:
            The copy, or the weight itself where it is on the device already.
        """
        if self.device == torch.device(device):
            return self
        moved: dict[str, Any] = {name: t.to(device) for name, t in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def with_bias(self, bias: Tensor | None) -> QuantizedWeight:
        """The same weight with another bias.

        Args:
            bias: [N], or None for no bias.
        """
        return dataclasses.replace(self, spec=self.spec.replace(bias=bias is not None), bias=bias)

    def with_act_dtype(self, dtype: torch.dtype) -> QuantizedWeight:
        """The same weight for inputs and outputs of another dtype.

        Args:
            dtype: bfloat16, float16 or float32.

        Raises:
            InputError: Where `dtype` is not a torch.dtype.
        """
        if not isinstance(dtype, torch.dtype):
            raise InputError("an input dtype is a torch.dtype", found=repr(dtype), expected="for example torch.bfloat16")
        return dataclasses.replace(self, spec=self.spec.replace(act_dtype=dtype))

    def without_input_multiplier(self) -> QuantizedWeight:
        """The same weight without `input_multiplier`, for a caller that applies it itself."""
        if self.input_multiplier is None:
            return self
        return dataclasses.replace(self, spec=self.spec.replace(input_multiplier=False), input_multiplier=None)

    @without_default_device
    def scaled_input(self, x: Tensor) -> Tensor:
        """Apply `input_multiplier`.

        Args:
            x: [..., K].

        Returns:
            x * input_multiplier, computed in float32 and rounded once to x's dtype; x itself where there is no multiplier.
        """
        return x if self.input_multiplier is None else (x.float() * self.input_multiplier.float()).to(x.dtype)

    # ---- dequantization --------------------------------------------------------------------------------------------

    @without_default_device
    def unpacked(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """Unpack codes.

        Args:
            rows: A slice or int64 indices of rows.

        Returns:
            One code per byte, uint8 [n, K], columns in stored order.
        """
        return bitstream.unpack(self.codes[rows], self.spec.weight.bits, self.spec.k)

    @without_default_device
    def scales(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Block scales with the global or super-block scale multiplied in.

        Args:
            dtype: dtype of the result. float32 is exact for every known format.

        Returns:
            A tensor on the scale grid.
        """
        return apply_second_level(self.spec, self.scale, self.scale2).to(dtype)

    @without_default_device
    def offsets(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Offsets with `offset2` multiplied in.

        Args:
            dtype: dtype of the result.

        Returns:
            A tensor on the scale grid, in the weight's units; None where spec.zero is not "float".
        """
        return None if self.offset is None else apply_second_level(self.spec, self.offset, self.offset2).to(dtype)

    @without_default_device
    def column_groups(self) -> Tensor:
        """The scale column of each stored column, int64 [K]."""
        return column_groups(self.spec, self.group_index, self.device)

    @without_default_device
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize the weight. This is the reference semantics of every kernel.

        Args:
            dtype: dtype of the result. The computation is in float32 and rounded to it once.

        Returns:
            [N, K], columns in input order.
        """
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        chunk = bitstream.rows_per_chunk(self.spec.k)
        for r in range(0, self.spec.n, chunk):
            out[r : r + chunk] = self.dequantize_rows(slice(r, min(r + chunk, self.spec.n)), dtype)
        return out

    @without_default_device
    def dequantize_rows(self, rows: slice | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize some rows.

        Args:
            rows: A slice, or int64 indices [n] as for an embedding look-up.
            dtype: As for `dequantize`.

        Returns:
            [n, K], columns in input order.
        """
        s = self.spec
        # index_select, since indexing takes a negative row from the end
        codes = self.codes.index_select(0, rows) if isinstance(rows, Tensor) else self.codes[rows]
        values = codes_to_float(codes, s.weight, s.k)
        indices = rows if isinstance(rows, Tensor) else torch.arange(s.n, device=self.device)[rows]
        block_row = (indices + s.block_offset[0]) // s.block[0]
        scale = apply_second_level(s, self.scale, self.scale2, block_row)
        zero = None if self.zero is None else self.zero.index_select(0, block_row).float()
        offset = None if self.offset is None else apply_second_level(s, self.offset, self.offset2, block_row)
        values = apply_scales(values, s, scale, zero, offset, self.group_index)
        if self.perm is not None:
            in_input_order = torch.empty_like(values)
            in_input_order[:, self.perm.long()] = values
            values = in_input_order
        return values.to(dtype)

    # ---- sharding --------------------------------------------------------------------------------------------------

    @without_default_device
    def shard(self, dim: Literal[0, 1], rank: int, world: int) -> QuantizedWeight:
        """This rank's tensor-parallel shard.

        Rank r has [size * r // world, size * (r + 1) // world) of the dimension. Any boundary is valid, also inside a scale
        block or a byte of codes; an act-order permutation is sharded by input columns. Concatenating the shards' dequantized
        weights along `dim` gives the dequantized weight, bit for bit.

        Args:
            dim: 0 shards N (column parallel), 1 shards K (row parallel; only rank 0 keeps the bias).
            rank: This rank, 0 <= rank < world.
            world: Number of ranks, at most the size of the dimension.

        Returns:
            The shard; see `narrow` on memory.

        Raises:
            WeightError: For an impossible dim, rank or world.
        """
        size = self._size(dim)
        if not 0 <= rank < world or world > size:
            raise WeightError("cannot shard", found=f"rank {rank} of {world} over {size}", expected="0 <= rank < world <= size")
        part = self.narrow(dim, size * rank // world, size * (rank + 1) // world)
        return part.with_bias(None) if dim == 1 and rank > 0 and part.bias is not None else part

    @without_default_device
    def narrow(self, dim: Literal[0, 1], start: int, stop: int) -> QuantizedWeight:
        """The rows or input columns [start, stop).

        Tensors are views, which keep the whole weight's memory alive until the result is packed or copied. These are copies: the
        codes where `start` is inside a byte; codes, scales and zero points of an act-order or ragged weight along K; scales where
        `start` is inside a super-block, in float32 where it is also inside a scale block.

        Args:
            dim: 0 for rows (N), 1 for input columns (K).
            start: First row or column.
            stop: Row or column after the last, at most the size of the dimension.

        Raises:
            WeightError: For an empty or impossible range.
        """
        if not 0 <= start < stop <= self._size(dim):
            raise WeightError("cannot narrow", found=f"[{start}, {stop})", expected=f"a range within [0, {self.shape[dim]})")
        take = sharding.narrow_rows if dim == 0 else sharding.narrow_columns
        spec, changes = take(self.spec, self._fields(), start, stop)
        return dataclasses.replace(self, spec=spec, **changes)

    @without_default_device
    def take_rows(self, index: Tensor) -> QuantizedWeight:
        """Reorder or select rows, bias included, for files whose row order is not the model's.

        Args:
            index: int64 [n] rows in any order, each in [0, N).

        Raises:
            WeightError: Where rows share scales (blocks of several rows, but not of all), or an index is out of range.
        """
        spec, changes = sharding.take_rows(self.spec, self._fields(), index)
        return dataclasses.replace(self, spec=spec, **changes)

    def _size(self, dim: int) -> int:
        if dim not in (0, 1):
            raise WeightError("cannot shard along this dimension", found=dim, expected="0 (N, rows) or 1 (K, input columns)")
        return self.shape[dim]


TENSOR_FIELDS = tuple(f.name for f in dataclasses.fields(QuantizedWeight) if f.name not in ("spec", "origin"))
