"""Parameters that know what their dimensions mean, and load the slice of a checkpoint's tensor that a rank needs.

`input_dim` runs along in_features, `output_dim` along out_features; along `packed_dim` one element holds `packed_factor`
codes. Sizes and offsets that loaders are given count weights, not elements: a parameter knows its own unit. Nothing is
rounded: a scale takes the checkpoint's dtype where its own cannot hold every value, everything else refuses that.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bitline.errors import InputError

_SHARDS = {"q": 0, "k": 1, "v": 2}


class BitlineParameter(Parameter):
    """A frozen parameter on one of `tp_size` ranks. By itself it loads whole tensors."""

    tp_rank: int
    tp_size: int
    weight_loader: Any
    _widens = False
    _loaded = False
    _sharing: tuple[int | str, ...] = ()

    def __new__(cls, data: Tensor, *_: Any, **__: Any) -> BitlineParameter:
        """Parameter's own, without a gradient."""
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, weight_loader: Any = None, tp_rank: int = 0, tp_size: int = 1) -> None:
        if not 0 <= tp_rank < tp_size:
            raise InputError("no such rank", found=f"{tp_rank} of {tp_size}")
        self.tp_rank, self.tp_size, self.weight_loader = tp_rank, tp_size, weight_loader

    def _copy(self, part: Tensor, dim: int = 0, first: int = 0, count: int | None = None) -> None:
        """Take a tensor, as a whole or as `count` elements from `first` on along `dim`."""
        place = lambda: self.data if count is None else self.data.narrow(dim, first, count)
        if part.numel() == place().numel() == 1:
            part = part.reshape(place().shape)
        if part.shape != place().shape:
            raise InputError("a checkpoint's tensor does not fit its parameter", found=f"{list(part.shape)} of {part.dtype}",
                             expected=f"{list(place().shape)}")  # fmt: skip
        if part.dtype.itemsize == 1 and self.data.dtype.itemsize == 1 and torch.uint8 in (part.dtype, self.data.dtype):
            part = part if torch.int8 in (part.dtype, self.data.dtype) else part.view(self.data.dtype)  # E8M0 and its bytes
        if not _holds(self.data.dtype, part.dtype):
            if not self._widens or not part.is_floating_point() or not self.data.is_floating_point():
                raise InputError("a checkpoint's tensor would be rounded by its parameter", found=part.dtype,
                                 expected=self.data.dtype, fix="make the parameter in the checkpoint's dtype")  # fmt: skip
            self.data = self.data.to(_wider(self.data.dtype, part.dtype) if self._loaded else part.dtype)
        place().copy_(part)
        self._loaded = True

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        """The whole tensor: it has no output dimension to cut."""
        self._copy(loaded_weight)

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """The whole tensor: it has no input dimension to cut."""
        self._copy(loaded_weight)

    def load_merged_column_weight(self, loaded_weight: Tensor, *, shard_id: int | str = 0, **_: Any) -> None:
        """The whole tensor, which fused layers share; an InputError where another one of them had other values."""
        if shard_id in self._sharing:  # it is loaded again
            self._sharing = ()
        if self._sharing and not torch.equal(self.data, loaded_weight.to(self.data).reshape(self.data.shape)):
            raise InputError(
                "fused layers share this parameter, and theirs differ", found=f"{self._sharing[0]!r} and {shard_id!r}",
                expected="equal tensors, such as one order of columns",
                fix="run the layers apart; a PerTensorScaleParameter has one number for each",
            )  # fmt: skip
        self._copy(loaded_weight)
        self._sharing = (*self._sharing, shard_id)

    def load_qkv_weight(self, loaded_weight: Tensor, *, shard_id: int | str = 0, **_: Any) -> None:
        """See load_merged_column_weight."""
        BitlineParameter.load_merged_column_weight(self, loaded_weight, shard_id=shard_id)


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Has `dtype` every value of `other`?"""
    if dtype == other:
        return True
    if dtype.is_floating_point != other.is_floating_point or (other.is_floating_point and other.itemsize == 1):
        return False
    return torch.promote_types(dtype, other) == dtype


def _wider(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if _holds(one, other) else other if _holds(other, one) else torch.float32


class _Cut(BitlineParameter):
    """Cutting along one dimension by weights. unit: weights per element there, as a fraction (3-bit words hold 32/3).

    codes: an element cannot be shared by two ranks. Scales can: the part then starts inside its first block, and
    `block_offset` says by how many weights.
    """

    def _unit(self, dim: int) -> Fraction:
        return Fraction(1)

    def _is_codes(self, dim: int) -> bool:
        return True

    def _elements(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        unit = self._unit(dim)
        first, last = start / unit, stop / unit
        if self._is_codes(dim) and (first.denominator != 1 or last.denominator != 1):
            raise InputError("a cut falls inside a packed word", found=f"weights [{start}, {stop})",
                             expected=f"multiples of {unit}",
                             fix="cut the canonical weight (QuantizedWeight.shard), which may be cut anywhere")  # fmt: skip
        return first.__floor__(), last.__ceil__()

    def _rank_part(self, loaded: Tensor, dim: int | None, index: int, count: int, total: int | None = None) -> Tensor:
        """Part `index` of `count` of a tensor that stands for `total` weights along `dim`; all of it where it has no such dim."""
        if dim is None:
            return loaded
        whole = self._weights(loaded, dim) if total is None else total
        start, stop = whole * index // count, whole * (index + 1) // count
        first, last = self._elements(dim, start, stop)
        self._note_offset(dim, start - int(first * self._unit(dim)))
        return loaded.narrow(dim, first, last - first)

    def _weights(self, loaded: Tensor, dim: int) -> int:
        return int(loaded.shape[dim] * self._unit(dim))

    def _note_offset(self, dim: int, offset: int) -> None:
        pass


class RowParameter(_Cut):
    """One that is cut along in_features: g_idx, a static input scale per column."""

    def __init__(self, data: Tensor, input_dim: int | None = 0, **more: Any) -> None:
        self.input_dim = input_dim
        super().__init__(data, **more)

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """This rank's columns."""
        self._copy(self._rank_part(loaded_weight, self.input_dim, self.tp_rank, self.tp_size))


class _Column(_Cut):
    output_dim: int

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        """This rank's rows."""
        self._copy(self._rank_part(loaded_weight, self.output_dim, self.tp_rank, self.tp_size))

    def load_merged_column_weight(self, loaded_weight: Tensor, *, shard_offset: int, shard_size: int, **_: Any) -> None:  # type: ignore[override]
        """This rank's rows of one of several fused layers; offset and size, in weights, of its place in this parameter."""
        self._place(loaded_weight, shard_offset, shard_size, self.tp_rank, self.tp_size)

    def load_qkv_weight(  # type: ignore[override]
        self, loaded_weight: Tensor, *, shard_id: str, shard_offset: int, shard_size: int, num_heads: int = 1, **_: Any
    ) -> None:
        """This rank's rows of q, k or v. num_heads: ranks that hold a copy of the same key and value heads."""
        if shard_id not in _SHARDS:
            raise InputError("no such part of a fused attention layer", found=repr(shard_id), expected="q, k or v")
        replicas = 1 if shard_id == "q" else num_heads
        if self.tp_size % replicas:
            raise InputError("heads cannot be replicated so", found=f"{replicas} copies on {self.tp_size} ranks")
        self._place(loaded_weight, shard_offset, shard_size, self.tp_rank // replicas, self.tp_size // replicas)

    def _place(self, loaded: Tensor, offset: int, size: int, index: int, count: int) -> None:
        unit = self._unit(self.output_dim)
        if loaded.shape[self.output_dim] != (size * count / unit).__ceil__():
            raise InputError("a fused layer's tensor has another size than its place", expected=f"{size * count} rows",
                             found=f"{self._weights(loaded, self.output_dim)} rows")  # fmt: skip
        if (offset / unit).denominator != 1:
            raise InputError("a fused layer begins inside a packed word", found=f"row {offset}", expected=f"a multiple of {unit}",
                             fix="load the layers apart, or fuse the canonical weights")  # fmt: skip
        part = self._rank_part(loaded, self.output_dim, index, count, size * count if count > 1 else None)
        self._copy(part, self.output_dim, int(offset / unit), part.shape[self.output_dim])


class ChannelScaleParameter(_Column):
    """One scale for each row."""

    _widens = True

    def __init__(self, data: Tensor, output_dim: int = 0, **more: Any) -> None:
        self.output_dim = output_dim
        super().__init__(data, **more)


class ModelWeightParameter(RowParameter, _Column):
    """An unpacked weight, cut along either dimension; input_dim=None: every rank gets all of in_features."""

    def __init__(self, data: Tensor, input_dim: int | None = 1, output_dim: int = 0, **more: Any) -> None:
        self.output_dim = output_dim
        super().__init__(data, input_dim=input_dim, **more)


class PackedParameter(ModelWeightParameter):
    """Codes packed into words along `packed_dim`, `packed_factor` of them a word (a Fraction for 3, 5, 6 and 7 bits).

    group_size: of zero points, the columns that one is for (-1: all of them). A group that two ranks share goes to both.
    """

    def __init__(
        self,
        data: Tensor,
        packed_dim: int,
        packed_factor: int | Fraction,
        input_dim: int | None = 1,
        output_dim: int = 0,
        group_size: int = 0,
        **more: Any,
    ) -> None:
        self.packed_dim, self.packed_factor = packed_dim, Fraction(packed_factor)
        self.group_size = group_size
        super().__init__(data, input_dim=None if group_size == -1 else input_dim, output_dim=output_dim, **more)

    def _unit(self, dim: int) -> Fraction:
        if dim == self.packed_dim:
            return self.packed_factor
        return Fraction(self.group_size if dim == self.input_dim and self.group_size > 0 else 1)

    def _is_codes(self, dim: int) -> bool:
        return dim == self.packed_dim or dim != self.input_dim or not self.group_size


class BlockScaleParameter(ModelWeightParameter):
    """Scales of blocks of (rows, columns). A rank that starts inside a block gets its scale too: see `block_offset`.

    Where fused layers begin or end inside blocks, `block` becomes as many rows as all of them are multiples of, and scales
    are repeated.
    """

    _widens = True

    def __init__(self, data: Tensor, block: tuple[int, int], input_dim: int | None = 1, output_dim: int = 0, **more: Any) -> None:
        self.block, self._stored = block, block
        self.block_offset = [0, 0]
        super().__init__(data, input_dim=input_dim, output_dim=output_dim, **more)

    def load_column_parallel_weight(self, loaded_weight: Tensor, size: int | None = None) -> None:
        """This rank's rows. size: rows of the whole weight, where its last block is not full."""
        self._copy(self._rank_part(loaded_weight, self.output_dim, self.tp_rank, self.tp_size, size))

    def load_row_parallel_weight(self, loaded_weight: Tensor, size: int | None = None) -> None:
        """This rank's columns. size: columns of the whole weight, where its last block is not full."""
        self._copy(self._rank_part(loaded_weight, self.input_dim, self.tp_rank, self.tp_size, size))

    def _place(self, loaded: Tensor, offset: int, size: int, index: int, count: int) -> None:
        dim, rows = self.output_dim, self._stored[0]
        if loaded.shape[dim] != -(-size * count // rows):
            raise InputError("a fused layer's scales have another size than its place",
                             found=f"{loaded.shape[dim]} blocks of {rows}", expected=f"{-(-size * count // rows)}")  # fmt: skip
        step = math.gcd(self.block[0], offset, size, size * index)
        if step != self.block[0]:
            self.data = self.data.repeat_interleave(self.block[0] // step, dim)
            self.block = (step, self.block[1])
        part = loaded.repeat_interleave(rows // step, dim) if step != rows else loaded
        self._copy(part.narrow(dim, size * index // step, size // step), dim, offset // step, size // step)

    def _unit(self, dim: int) -> Fraction:
        return Fraction(self.block[0] if dim == self.output_dim else self.block[1])

    def _is_codes(self, dim: int) -> bool:
        return False

    def _note_offset(self, dim: int, offset: int) -> None:
        self.block_offset[0 if dim == self.output_dim else 1] = offset


class GroupScaleParameter(BlockScaleParameter):
    """Scales of groups of columns; without a group size one for a whole row, which every rank then gets."""

    def __init__(self, data: Tensor, group_size: int = -1, input_dim: int | None = 1, output_dim: int = 0, **more: Any) -> None:
        self.group_size = group_size
        super().__init__(data, block=(1, max(group_size, 1)), input_dim=input_dim, output_dim=output_dim, **more)

    def load_row_parallel_weight(self, loaded_weight: Tensor, size: int | None = None) -> None:
        """The groups that this rank's columns are in."""
        if self.group_size == -1:
            self._copy(loaded_weight)
        else:
            super().load_row_parallel_weight(loaded_weight, size)


class PerTensorScaleParameter(BitlineParameter):
    """One number for each of the layers that are fused in this one, [layers]."""

    _widens = True

    def load_merged_column_weight(self, loaded_weight: Tensor, *, shard_id: int | str, **_: Any) -> None:  # type: ignore[override]
        """The number of the layer `shard_id`: its place among the fused ones, or q, k or v."""
        index = _SHARDS.get(shard_id, shard_id) if isinstance(shard_id, str) else shard_id
        if not isinstance(index, int) or not 0 <= index < self.data.numel():
            raise InputError("no such part of a fused layer", found=repr(shard_id),
                             expected=f"q, k or v, or a number below {self.data.numel()}")  # fmt: skip
        if loaded_weight.numel() != 1:
            raise InputError("a scale of a fused layer is one number", found=list(loaded_weight.shape), expected="one number")
        if self.data.dim() != 1:
            self.data = self.data.view(-1)
        self._copy(loaded_weight, 0, index, 1)

    load_qkv_weight = load_merged_column_weight  # type: ignore[assignment]


def permute_param_layout_(param: Any, input_dim: int, output_dim: int, packed_dim: int | None = None) -> Any:
    """Permute a parameter's dimensions to the named ones, in place, as a view of the same data.

    A dimension that the parameter does not name is the other one of a matrix. An InputError where the codes would have
    to be packed along another dimension.
    """
    here_in, here_out = getattr(param, "input_dim", None), getattr(param, "output_dim", None)
    if param.data.dim() == 2:
        here_in = 1 - here_out if here_in is None and here_out is not None else here_in
        here_out = 1 - here_in if here_out is None and here_in is not None else here_out
    if here_in is None or here_out is None:
        raise InputError("a parameter that names no dimension cannot be permuted", found=type(param).__name__)
    if {input_dim, output_dim} - set(range(param.data.dim())) or input_dim == output_dim:
        raise InputError("no such dimensions of the parameter", found=f"input_dim {input_dim}, output_dim {output_dim}",
                         expected=f"two of the {param.data.dim()}")  # fmt: skip
    packed = getattr(param, "packed_dim", None)
    if packed_dim is not None:
        wanted = {input_dim: here_in, output_dim: here_out}.get(packed_dim)
        if packed is None or wanted != packed:
            raise InputError("packing along another dimension is no permutation", found=f"packed along {packed}",
                             expected=f"along {packed_dim}",
                             fix="read the layer into a QuantizedWeight and pack that")  # fmt: skip
    rest = [d for d in range(param.data.dim()) if d not in (here_in, here_out)]
    order = [-1] * param.data.dim()
    order[input_dim], order[output_dim] = here_in, here_out
    for at, dim in enumerate(order):
        if dim == -1:
            order[at] = rest.pop(0)
    param.data = param.data.permute(*order)
    param.input_dim, param.output_dim = input_dim, output_dim
    if packed is not None:
        param.packed_dim = order.index(packed)
    return param
