"""vLLM's layer parameters: each knows its dimensions, and loads this rank's shard of a checkpoint tensor.

`input_dim` is in_features, `output_dim` out_features; along `packed_dim` an element holds `packed_factor` codes. The loaders take
sizes and offsets in weights (unpacked), not elements. Values are never rounded: a scale parameter takes the checkpoint's dtype
where its own cannot represent every value, and every other parameter raises an InputError.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bitline.errors import InputError

_QKV_INDEX = {"q": 0, "k": 1, "v": 2}


class BitlineParameter(Parameter):
    """Base class: a parameter without gradient on one of `tp_size` ranks, which loads whole tensors.

    Args:
        data: The initial tensor, of this rank's shape.
        weight_loader: Kept as an attribute for the engine.
        tp_rank: This rank.
        tp_size: Number of tensor-parallel ranks.
    """

    tp_rank: int
    tp_size: int
    weight_loader: Any
    _may_widen = False  # take the checkpoint's dtype where this one would round
    _loaded = False
    _shared_by: tuple[int | str, ...] = ()  # shard_ids of the fused layers that have loaded it

    def __new__(cls, data: Tensor, *_: Any, **__: Any) -> BitlineParameter:
        """As torch.nn.Parameter with requires_grad=False."""
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, weight_loader: Any = None, tp_rank: int = 0, tp_size: int = 1) -> None:
        if not 0 <= tp_rank < tp_size:
            raise InputError("tp_rank out of range", found=f"{tp_rank} of {tp_size}")
        self.tp_rank, self.tp_size, self.weight_loader = tp_rank, tp_size, weight_loader

    def _copy(self, source: Tensor, dim: int = 0, first: int = 0, count: int | None = None) -> None:
        """Copy `source` into the parameter, or into its elements [first, first + count) along `dim`."""
        target = lambda: self.data if count is None else self.data.narrow(dim, first, count)
        if source.numel() == target().numel() == 1:
            source = source.reshape(target().shape)
        if source.shape != target().shape:
            raise InputError("a checkpoint's tensor does not fit its parameter", found=f"{list(source.shape)} of {source.dtype}",
                             expected=f"{list(target().shape)}")  # fmt: skip
        dtypes = (source.dtype, self.data.dtype)
        if all(d.itemsize == 1 for d in dtypes) and torch.uint8 in dtypes and torch.int8 not in dtypes:
            source = source.view(self.data.dtype)  # E8M0 or FP8 and its bytes
        if not _represents(self.data.dtype, source.dtype):
            if not self._may_widen or not source.is_floating_point() or not self.data.is_floating_point():
                raise InputError("a checkpoint's tensor would be rounded by its parameter", found=source.dtype,
                                 expected=self.data.dtype, fix="make the parameter in the checkpoint's dtype")  # fmt: skip
            self.data = self.data.to(_common_dtype(self.data.dtype, source.dtype) if self._loaded else source.dtype)
        target().copy_(source)
        self._loaded = True

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        """Load the whole tensor: it has no output dimension to shard."""
        self._copy(loaded_weight)

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """Load the whole tensor: it has no input dimension to shard."""
        self._copy(loaded_weight)

    def load_merged_column_weight(self, loaded_weight: Tensor, *, shard_id: int | str = 0, **_: Any) -> None:
        """Load the whole tensor, which fused layers share. An InputError where another one of them has loaded other values."""
        if shard_id in self._shared_by:  # the layer is reloaded
            self._shared_by = ()
        if self._shared_by and not torch.equal(self.data, loaded_weight.to(self.data).reshape(self.data.shape)):
            raise InputError(
                "fused layers share this parameter, and their tensors differ",
                found=f"{self._shared_by[0]!r} and {shard_id!r}", expected="equal tensors, such as one g_idx",
                fix="do not fuse the layers; a PerTensorScaleParameter has one scale for each",
            )  # fmt: skip
        self._copy(loaded_weight)
        self._shared_by = (*self._shared_by, shard_id)

    def load_qkv_weight(self, loaded_weight: Tensor, *, shard_id: int | str = 0, **_: Any) -> None:
        """As load_merged_column_weight."""
        BitlineParameter.load_merged_column_weight(self, loaded_weight, shard_id=shard_id)


def _represents(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` represents every value of `other`."""
    if dtype == other:
        return True
    if dtype.is_floating_point != other.is_floating_point or (other.is_floating_point and other.itemsize == 1):
        return False
    return torch.promote_types(dtype, other) == dtype


def _common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The narrowest of `a`, `b` and float32 that represents both."""
    return a if _represents(a, b) else b if _represents(b, a) else torch.float32


class _ShardedParameter(BitlineParameter):
    """A parameter that is sharded along a dimension at a boundary counted in weights.

    One element stands for `_weights_per_element` weights: packed_factor codes (a fraction: an int32 holds 32/3 of 3 bits), or the
    columns of a scale block. Packed codes cannot be split between ranks. Scales can be on both: the shard then starts inside its
    first block, and `block_offset` has the number of weights that are on the other rank.
    """

    def _weights_per_element(self, dim: int) -> Fraction:
        return Fraction(1)

    def _is_indivisible(self, dim: int) -> bool:
        return True

    def _element_range(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        """The elements that hold the weights [start, stop)."""
        unit = self._weights_per_element(dim)
        first, last = start / unit, stop / unit
        if self._is_indivisible(dim) and (first.denominator != 1 or last.denominator != 1):
            raise InputError("a shard boundary falls inside a packed int32", found=f"weights [{start}, {stop})",
                             expected=f"multiples of {unit}", fix=_SHARD_CANONICAL)  # fmt: skip
        return first.__floor__(), last.__ceil__()

    def _shard(self, loaded: Tensor, dim: int | None, index: int, count: int, total: int | None = None) -> Tensor:
        """Shard `index` of `count` of a tensor of `total` weights along `dim`; the whole tensor where dim is None."""
        if dim is None:
            return loaded
        size = self._num_weights(loaded, dim) if total is None else total
        start, stop = size * index // count, size * (index + 1) // count
        first, last = self._element_range(dim, start, stop)
        self._set_block_offset(dim, start - int(first * self._weights_per_element(dim)))
        return loaded.narrow(dim, first, last - first)

    def _num_weights(self, loaded: Tensor, dim: int) -> int:
        return int(loaded.shape[dim] * self._weights_per_element(dim))

    def _set_block_offset(self, dim: int, offset: int) -> None:
        pass


_SHARD_CANONICAL = "shard the canonical weight, which can be sharded anywhere (QuantizedWeight.shard)"


class RowParameter(_ShardedParameter):
    """Sharded along in_features: g_idx, a static input scale per column.

    Args:
        data: The initial tensor, of this rank's shape.
        input_dim: Dimension of in_features; None: every rank loads the whole tensor.
        **more: See BitlineParameter.
    """

    def __init__(self, data: Tensor, input_dim: int | None = 0, **more: Any) -> None:
        self.input_dim = input_dim
        super().__init__(data, **more)

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """Load this rank's shard along in_features."""
        self._copy(self._shard(loaded_weight, self.input_dim, self.tp_rank, self.tp_size))


class _ColumnParallelParameter(_ShardedParameter):
    output_dim: int

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        """Load this rank's shard along out_features."""
        self._copy(self._shard(loaded_weight, self.output_dim, self.tp_rank, self.tp_size))

    def load_merged_column_weight(self, loaded_weight: Tensor, *, shard_offset: int, shard_size: int, **_: Any) -> None:  # type: ignore[override]
        """Load this rank's shard of one fused layer. shard_offset, shard_size: its rows in this parameter, in weights."""
        self._load_fused(loaded_weight, shard_offset, shard_size, self.tp_rank, self.tp_size)

    def load_qkv_weight(  # type: ignore[override]
        self, loaded_weight: Tensor, *, shard_id: str, shard_offset: int, shard_size: int, num_heads: int = 1, **_: Any
    ) -> None:
        """Load this rank's shard of q, k or v. num_heads: number of ranks that replicate each key and value head."""
        if shard_id not in _QKV_INDEX:
            raise InputError("unknown shard_id of a fused QKV layer", found=repr(shard_id), expected="q, k or v")
        replicas = 1 if shard_id == "q" else num_heads
        if self.tp_size % replicas:
            raise InputError("tp_size is not a multiple of the KV head replicas", found=f"{replicas} on {self.tp_size} ranks")
        self._load_fused(loaded_weight, shard_offset, shard_size, self.tp_rank // replicas, self.tp_size // replicas)

    def _load_fused(self, loaded: Tensor, offset: int, size: int, index: int, count: int) -> None:
        """Copy shard `index` of `count`, `size` weights, to `offset` in this parameter."""
        unit = self._weights_per_element(self.output_dim)
        if loaded.shape[self.output_dim] != (size * count / unit).__ceil__():
            raise InputError("a fused layer's tensor has another size than its slices", expected=f"{size * count} rows",
                             found=f"{self._num_weights(loaded, self.output_dim)} rows")  # fmt: skip
        if (offset / unit).denominator != 1:
            raise InputError("a fused layer begins inside a packed int32", found=f"row {offset}", expected=f"multiples of {unit}",
                             fix="do not fuse the layers, or fuse the canonical weights")  # fmt: skip
        shard = self._shard(loaded, self.output_dim, index, count, size * count if count > 1 else None)
        self._copy(shard, self.output_dim, int(offset / unit), shard.shape[self.output_dim])


class ChannelScaleParameter(_ColumnParallelParameter):
    """One scale per output channel.

    Args:
        data: The initial tensor, [N] or [N, 1].
        output_dim: Dimension of out_features.
        **more: See BitlineParameter.
    """

    _may_widen = True

    def __init__(self, data: Tensor, output_dim: int = 0, **more: Any) -> None:
        self.output_dim = output_dim
        super().__init__(data, **more)


class ModelWeightParameter(RowParameter, _ColumnParallelParameter):
    """An unpacked weight, sharded along either dimension.

    Args:
        data: The initial tensor, of this rank's shape.
        input_dim: Dimension of in_features; None: not sharded along it.
        output_dim: Dimension of out_features.
        **more: See BitlineParameter.
    """

    def __init__(self, data: Tensor, input_dim: int | None = 1, output_dim: int = 0, **more: Any) -> None:
        self.output_dim = output_dim
        super().__init__(data, input_dim=input_dim, **more)


class PackedParameter(ModelWeightParameter):
    """Codes packed along a dimension: weights, or zero points.

    Args:
        data: The initial tensor, int32 or uint8, of this rank's shape.
        packed_dim: Dimension along which an element holds several codes.
        packed_factor: Codes per element, a Fraction for 3, 5, 6 and 7 bits.
        input_dim: Dimension of in_features; None: not sharded along it.
        output_dim: Dimension of out_features.
        group_size: For zero points, the columns per zero point (-1: all of them); 0 for weights. A group that two ranks share is
            loaded by both.
        **more: See BitlineParameter.
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

    def _weights_per_element(self, dim: int) -> Fraction:
        if dim == self.packed_dim:
            return self.packed_factor
        return Fraction(self.group_size if dim == self.input_dim and self.group_size > 0 else 1)

    def _is_indivisible(self, dim: int) -> bool:
        return dim == self.packed_dim or dim != self.input_dim or not self.group_size


class BlockScaleParameter(ModelWeightParameter):
    """Block scales. A rank that starts inside a block loads its scale too; `block_offset` has the rows and columns before it.

    Where fused layers begin or end inside blocks, the scales are repeated for smaller blocks that all of them consist of, and
    `block` changes to those.

    Args:
        data: The initial tensor, of this rank's shape.
        block: Rows and columns of a scale block.
        input_dim: Dimension of in_features; None: not sharded along it.
        output_dim: Dimension of out_features.
        **more: See BitlineParameter.
    """

    _may_widen = True

    def __init__(self, data: Tensor, block: tuple[int, int], input_dim: int | None = 1, output_dim: int = 0, **more: Any) -> None:
        self.block, self._checkpoint_block = block, block
        self.block_offset = [0, 0]
        super().__init__(data, input_dim=input_dim, output_dim=output_dim, **more)

    def load_column_parallel_weight(self, loaded_weight: Tensor, size: int | None = None) -> None:
        """Load this rank's shard along out_features. size: rows of the whole weight, where its last block is not full."""
        self._copy(self._shard(loaded_weight, self.output_dim, self.tp_rank, self.tp_size, size))

    def load_row_parallel_weight(self, loaded_weight: Tensor, size: int | None = None) -> None:
        """Load this rank's shard along in_features. size: columns of the whole weight, where its last block is not full."""
        self._copy(self._shard(loaded_weight, self.input_dim, self.tp_rank, self.tp_size, size))

    def _load_fused(self, loaded: Tensor, offset: int, size: int, index: int, count: int) -> None:
        dim, rows = self.output_dim, self._checkpoint_block[0]
        if loaded.shape[dim] != -(-size * count // rows):
            raise InputError("a fused layer's scales have another size than its slices",
                             found=f"{loaded.shape[dim]} blocks of {rows}", expected=f"{-(-size * count // rows)}")  # fmt: skip
        split = math.gcd(self.block[0], offset, size, size * index)
        if split != self.block[0]:
            self.data = self.data.repeat_interleave(self.block[0] // split, dim)
            self.block = (split, self.block[1])
        scales = loaded.repeat_interleave(rows // split, dim) if split != rows else loaded
        self._copy(scales.narrow(dim, size * index // split, size // split), dim, offset // split, size // split)

    def _weights_per_element(self, dim: int) -> Fraction:
        return Fraction(self.block[0] if dim == self.output_dim else self.block[1])

    def _is_indivisible(self, dim: int) -> bool:
        return False

    def _set_block_offset(self, dim: int, offset: int) -> None:
        self.block_offset[0 if dim == self.output_dim else 1] = offset


class GroupScaleParameter(BlockScaleParameter):
    """Group scales.

    Args:
        data: The initial tensor, of this rank's shape.
        group_size: Columns per scale; -1: one scale per row, which every rank of a row-parallel layer loads.
        input_dim: Dimension of in_features; None: not sharded along it.
        output_dim: Dimension of out_features.
        **more: See BitlineParameter.
    """

    def __init__(self, data: Tensor, group_size: int = -1, input_dim: int | None = 1, output_dim: int = 0, **more: Any) -> None:
        self.group_size = group_size
        super().__init__(data, block=(1, max(group_size, 1)), input_dim=input_dim, output_dim=output_dim, **more)

    def load_row_parallel_weight(self, loaded_weight: Tensor, size: int | None = None) -> None:
        """Load the scales of the groups that this rank's columns are in. size: see BlockScaleParameter."""
        if self.group_size == -1:
            self._copy(loaded_weight)
        else:
            super().load_row_parallel_weight(loaded_weight, size)


class PerTensorScaleParameter(BitlineParameter):
    """One scale for each fused layer.

    Args:
        data: The initial tensor, [number of fused layers].
        weight_loader: Kept as an attribute for the engine.
        tp_rank: This rank.
        tp_size: Number of tensor-parallel ranks.
    """

    _may_widen = True

    def load_merged_column_weight(self, loaded_weight: Tensor, *, shard_id: int | str, **_: Any) -> None:  # type: ignore[override]
        """Load the scale of one fused layer. shard_id: its index among them, or q, k or v."""
        index = _QKV_INDEX.get(shard_id, shard_id) if isinstance(shard_id, str) else shard_id
        if not isinstance(index, int) or not 0 <= index < self.data.numel():
            raise InputError("unknown shard_id of a fused layer", found=repr(shard_id),
                             expected=f"q, k or v, or a number below {self.data.numel()}")  # fmt: skip
        if loaded_weight.numel() != 1:
            raise InputError("a fused layer's scale is one number", found=list(loaded_weight.shape), expected="one number")
        if self.data.dim() != 1:
            self.data = self.data.view(-1)
        self._copy(loaded_weight, 0, index, 1)

    load_qkv_weight = load_merged_column_weight  # type: ignore[assignment]


def permute_param_layout_(param: Any, input_dim: int, output_dim: int, packed_dim: int | None = None) -> Any:
    """Permute a parameter's dimensions in place, to a strided view of the same data.

    Args:
        param: A parameter with input_dim and output_dim; a matrix needs one of them.
        input_dim: The position that in_features gets.
        output_dim: The position that out_features gets.
        packed_dim: The position that the packed dimension has to get; not checked where None.

    Returns:
        The parameter.

    Raises:
        InputError: Where the parameter names no dimension, the positions do not exist, or `packed_dim` would need repacking.
    """
    ndim = param.data.dim()
    old_input, old_output = getattr(param, "input_dim", None), getattr(param, "output_dim", None)
    if ndim == 2:
        old_input = 1 - old_output if old_input is None and old_output is not None else old_input
        old_output = 1 - old_input if old_output is None and old_input is not None else old_output
    if old_input is None or old_output is None:
        raise InputError("a parameter that names no dimension cannot be permuted", found=type(param).__name__)
    if {input_dim, output_dim} - set(range(ndim)) or input_dim == output_dim:
        raise InputError("no such dimensions of the parameter", found=f"input_dim {input_dim}, output_dim {output_dim}",
                         expected=f"two of the {ndim}")  # fmt: skip
    old_packed = getattr(param, "packed_dim", None)
    if packed_dim is not None:
        wanted = {input_dim: old_input, output_dim: old_output}.get(packed_dim)
        if old_packed is None or wanted != old_packed:
            raise InputError("packing along another dimension is not a permutation", found=f"packed along {old_packed}",
                             expected=f"along {packed_dim}",
                             fix="read the layer into a QuantizedWeight and pack that")  # fmt: skip
    remaining = [d for d in range(ndim) if d not in (old_input, old_output)]
    order = [-1] * ndim
    order[input_dim], order[output_dim] = old_input, old_output
    for position, dim in enumerate(order):
        if dim == -1:
            order[position] = remaining.pop(0)
    param.data = param.data.permute(*order)
    param.input_dim, param.output_dim = input_dim, output_dim
    if old_packed is not None:
        param.packed_dim = order.index(old_packed)
    return param
