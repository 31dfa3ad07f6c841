"""The canonical weight: what every format reader produces and every kernel packs from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from bitline import bitstream, native
from bitline.errors import InputError, WeightError
from bitline.types import LinearSpec, ScalarType

_FLOAT_VIEWS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """One linear layer's quantized weight, frozen and validated. Stored columns are in `perm` order.

    codes: uint8 [N, ceil(K*bits/8)], each row a little-endian bit stream along K (rows may be strided).
    scale: [grid] in the checkpoint's own dtype (float8_e8m0fnu for MX, float8_e4m3fn for NVFP4, uint8 or int8 where
        scale2 makes it a number).
    zero: uint8 [grid], zero points in code units. offset: [grid], added after scaling, in the weight's own
        units and scale's dtype.
    scale2, offset2: a coarser factor of scale and of offset on the grid of spec.scale2_block (float64 [1, 1] for
        NVFP4's global scale, so that a file that stores its reciprocal is still decoded exactly).
    perm: int32 [K], stored column j is input column perm[j]. group_index: int32 [K], non-decreasing; the scale column
        of stored column j, where groups are not regular.
    input_scale, input_zero: scalars of a static activation scheme. input_multiplier: [K], a factor of each input column,
        applied before the input is quantized and no part of `dequantize`. bias: [N].
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

    def __post_init__(self) -> None:
        self._check_structure()
        if self.codes.device.type != "meta":
            self._check_values()

    # ---- validation ------------------------------------------------------------------------------------------------

    def _check_structure(self) -> None:
        s = self.spec
        self._expect("codes", self.codes, (s.n, bitstream.row_bytes(s.k, s.weight.bits)), torch.uint8)
        grid: tuple[int, int] = s.grid
        if s.ragged and s.scale2_block is not None:
            raise self._error("scale2", "present", "none: groups of unequal size have one level of scales")
        if s.ragged != (self.group_index is not None):
            raise self._error("group_index", "present" if self.group_index is not None else "absent", f"ragged={s.ragged}")
        if self.group_index is not None:
            grid = (s.grid[0], self.scale.shape[-1] if self.scale.dim() == 2 else 0)
        self._expect("scale", self.scale, grid, s.scale_dtype)
        present = {"none": (False, False), "int": (True, False), "float": (False, True)}[s.zero]
        for name, tensor, wanted in (("zero", self.zero, present[0]), ("offset", self.offset, present[1])):
            if (tensor is not None) != wanted:
                raise self._error(name, "absent" if wanted else "present", f"zero={s.zero!r} says otherwise")
        if self.zero is not None:
            self._expect("zero", self.zero, grid, torch.uint8)
        if self.offset is not None:
            self._expect("offset", self.offset, grid, s.scale_dtype)
        if (self.scale2 is None) != (s.scale2_block is None):
            raise self._error("scale2", "absent" if self.scale2 is None else "present", f"block {s.scale2_block}")
        if self.scale2 is not None and s.scale2_block is not None:
            self._expect("scale2", self.scale2, self._grid2())
            for size, fine, cut, coarse in zip(self.shape, s.block, s.block_offset, s.scale2_block, strict=True):
                if coarse < size and (coarse % fine or cut):
                    raise self._error("scale2", f"blocks {s.scale2_block} over blocks {s.block}", "whole blocks of scale in each")
        if self.offset2 is not None:
            if self.offset is None:
                raise self._error("offset2", "present", "an offset to multiply")
            self._expect("offset2", self.offset2, self._grid2())
        if s.act_order != (self.perm is not None):
            raise self._error("perm", "absent" if self.perm is None else "present", f"act_order={s.act_order}")
        for name, index in (("perm", self.perm), ("group_index", self.group_index)):
            if index is not None:
                self._expect(name, index, (s.k,), torch.int32)
        if s.act is not None and not s.act.dynamic and self.input_scale is None:
            raise self._error("input_scale", "absent", "a static activation scheme carries one")
        for name, scalar in (("input_scale", self.input_scale), ("input_zero", self.input_zero)):
            if scalar is not None and scalar.numel() != 1:
                raise self._error(name, f"shape {list(scalar.shape)}", "one number")
        if (self.input_multiplier is not None) != s.input_multiplier:
            found = "absent" if self.input_multiplier is None else "present"
            raise self._error("input_multiplier", found, f"input_multiplier={s.input_multiplier}")
        if self.input_multiplier is not None:
            self._expect("input_multiplier", self.input_multiplier, (s.k,))
        if (self.bias is not None) != s.bias:
            raise self._error("bias", "absent" if self.bias is None else "present", f"bias={s.bias}")
        if self.bias is not None:
            self._expect("bias", self.bias, (s.n,))

    def _check_values(self) -> None:
        s = self.spec
        for name in ("scale", "scale2", "offset", "offset2", "input_scale", "input_multiplier", "bias"):
            tensor = getattr(self, name)
            if tensor is None or not tensor.dtype.is_floating_point or tensor.dtype == torch.float8_e8m0fnu:
                continue  # E8M0's one NaN is a legal shared scale (OCP MX 1.0, 5.4.1) and has to reach the output
            if native.all_finite(tensor):
                continue
            bad = ~torch.isfinite(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
            if bad.any():
                at = [int(i) for i in bad.nonzero()[0]]
                raise self._error(name, f"{int(bad.sum())} NaN or infinite values, the first at {at}", "finite values")
        if self.input_scale is not None and not float(self.input_scale) > 0:
            raise self._error("input_scale", float(self.input_scale), "a positive number")
        if self.zero is not None and int(self.zero.max()) >= 1 << s.weight.bits:
            raise self._error("zero", f"up to {int(self.zero.max())}", f"0..{(1 << s.weight.bits) - 1}")
        if self.perm is not None and not _is_permutation(self.perm.long()):
            raise self._error("perm", "repeated or missing columns", f"a permutation of 0..{s.k - 1}")
        if self.group_index is not None:
            index, groups = self.group_index, self.scale.shape[1]
            if bool((index[1:] < index[:-1]).any()) or int(index[0]) < 0 or int(index[-1]) >= groups:
                raise self._error("group_index", "decreasing or out of range", f"non-decreasing within 0..{groups - 1}")

    def _expect(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        if tuple(tensor.shape) != tuple(shape):
            raise self._error(name, f"shape {list(tensor.shape)}", f"shape {list(shape)}")
        if dtype is not None and tensor.dtype != dtype:
            raise self._error(name, f"dtype {tensor.dtype}", f"dtype {dtype}")

    def _error(self, name: str, found: object, expected: object) -> WeightError:
        return WeightError(
            f"the weight's {name} does not fit its spec {self.spec}", field=name, tensor=self.origin or name,
            found=found, expected=expected,
        )  # fmt: skip

    def _grid2(self) -> tuple[int, int]:
        assert self.spec.scale2_block is not None
        return self.spec.replace(block=self.spec.scale2_block, block_offset=(0, 0)).grid

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.spec.n, self.spec.k

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is present, by field name."""
        return {f.name: v for f in dataclasses.fields(self) if isinstance(v := getattr(self, f.name), Tensor)}

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors().values())

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """A copy on another device; itself where it is there already. No dtype ever changes."""
        if self.device == torch.device(device):
            return self
        moved: dict[str, Any] = {name: t.to(device) for name, t in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def with_bias(self, bias: Tensor | None) -> QuantizedWeight:
        """The same weight with another bias, or none."""
        return dataclasses.replace(self, spec=self.spec.replace(bias=bias is not None), bias=bias)

    def with_act_dtype(self, dtype: torch.dtype) -> QuantizedWeight:
        """The same weight for inputs of another dtype, a torch.dtype."""
        if not isinstance(dtype, torch.dtype):
            raise InputError("an input dtype is a torch.dtype", found=repr(dtype), expected="torch.bfloat16, say")
        return dataclasses.replace(self, spec=self.spec.replace(act_dtype=dtype))

    def without_input_multiplier(self) -> QuantizedWeight:
        """The weight alone, for a caller that multiplies the input itself."""
        if self.input_multiplier is None:
            return self
        return dataclasses.replace(self, spec=self.spec.replace(input_multiplier=False), input_multiplier=None)

    def scaled_input(self, x: Tensor) -> Tensor:
        """x [..., K] times input_multiplier, in float32 and rounded once to x's dtype; x itself where there is none."""
        return x if self.input_multiplier is None else (x.float() * self.input_multiplier.float()).to(x.dtype)

    def unpacked(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """Raw codes, one per byte, uint8 [n, K], columns as stored."""
        return bitstream.unpack(self.codes[rows], self.spec.weight.bits, self.spec.k)

    def scales(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scales with the coarser factor multiplied in, on the scale grid. Exact in float32 for every known format."""
        return self._folded(self.scale, self.scale2).to(dtype)

    def offsets(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """What is added after scaling, in the weight's units, on the scale grid; None where zero is not "float"."""
        return None if self.offset is None else self._folded(self.offset, self.offset2).to(dtype)

    def _folded(self, fine: Tensor, coarse: Tensor | None, rows: Tensor | None = None) -> Tensor:
        """`fine * coarse` in float32 for some rows (int64) of the scale grid, by default all of them."""
        if rows is not None:
            fine = _select(fine, 0, rows)
        if coarse is None:
            return fine.float()
        if rows is None:
            rows = torch.arange(fine.shape[0], device=fine.device)
        (bn, bk), (on, ok) = self.spec.block, self.spec.block_offset
        cn, ck = self.spec.scale2_block or (1, 1)
        # The coarse cell of a fine cell is found through the first row and column that the fine cell covers here.
        index_n = (rows * bn - on).clamp_(min=0) // cn
        index_k = (torch.arange(fine.shape[1], device=fine.device) * bk - ok).clamp_(min=0) // ck
        factor = coarse.index_select(0, index_n).index_select(1, index_k)
        wide = torch.float64 if coarse.dtype == torch.float64 else torch.float32
        return (fine.to(wide) * factor.to(wide)).float()

    def column_groups(self) -> Tensor:
        """int64 [K]: the scale column of each stored column."""
        if self.group_index is not None:
            return self.group_index.long()
        start = self.spec.block_offset[1]
        return torch.arange(start, start + self.spec.k, device=self.device) // self.spec.block[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the codes stand for, [N, K] in input column order: the reference semantics of every kernel.

        Computed in float32 and rounded once to `dtype`.
        """
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        step = bitstream.rows_per_chunk(self.spec.k)
        for r in range(0, self.spec.n, step):
            out[r : r + step] = self.dequantize_rows(slice(r, min(r + step, self.spec.n)), dtype)
        return out

    def dequantize_rows(self, rows: slice | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows of `dequantize`: a slice, or int64 indices [n] (an embedding look-up)."""
        s = self.spec
        # index_select, since a plain index would take a negative row from the end
        codes = self.codes.index_select(0, rows) if isinstance(rows, Tensor) else self.codes[rows]
        values = decode(codes, s.weight, s.k)
        index = torch.arange(s.n, device=self.device)[rows]
        row = (index + s.block_offset[0]) // s.block[0]
        values = self._affine(values, row)
        if self.perm is not None:
            ordered = torch.empty_like(values)
            ordered[:, self.perm.long()] = values
            values = ordered
        return values.to(dtype)

    def _affine(self, values: Tensor, row: Tensor) -> Tensor:
        """Apply zero, scale and offset in place; one scale row per weight row is materialised, never one per weight."""
        s = self.spec
        scale = self._folded(self.scale, self.scale2, row)
        zero = None if self.zero is None else self.zero.index_select(0, row).float()
        offset = None if self.offset is None else self._folded(self.offset, self.offset2, row)
        bk = s.block[1]
        if not s.ragged and s.block_offset[1] == 0 and s.k % bk == 0:
            grouped = values.view(values.shape[0], s.k // bk, bk)
            expand = lambda t: t.unsqueeze(-1)
        else:
            grouped, columns = values, self.column_groups()
            expand = lambda t: t.index_select(1, columns)
        if zero is not None:
            grouped.sub_(expand(zero))
        grouped.mul_(expand(scale))
        if offset is not None:
            grouped.add_(expand(offset))
        return values

    # ---- cutting ---------------------------------------------------------------------------------------------------

    def shard(self, dim: Literal[0, 1], rank: int, world: int) -> QuantizedWeight:
        """This rank's part of the weight along dim 0 (N, column parallel) or 1 (K, row parallel).

        Any boundary is legal: a scale block, an MX block or a byte of codes that straddles two ranks is handled here,
        and an act-order permutation is cut by the input columns that the rank sees. Along K only rank 0 keeps the bias.
        Concatenating (dim 0) or column-concatenating (dim 1) the shards' dequantized weights gives the whole, to the bit.
        Parts are as equal as they can be: rank r has [size * r // world, size * (r + 1) // world). See `narrow` on memory.
        """
        size = self._size(dim)
        if not 0 <= rank < world or world > size:
            raise WeightError("cannot shard", found=f"rank {rank} of {world} over {size}", expected="0 <= rank < world <= size")
        part = self.narrow(dim, size * rank // world, size * (rank + 1) // world)
        return part.with_bias(None) if dim == 1 and rank > 0 and part.bias is not None else part

    def narrow(self, dim: Literal[0, 1], start: int, stop: int) -> QuantizedWeight:
        """Rows (dim 0) or input columns (dim 1) [start, stop).

        Every tensor is a view, which keeps the whole alive until it is packed or copied, except: codes of a cut inside a
        byte; codes, scales and zeros where columns are in another order or groups are ragged; and scales whose second
        scale is cut, which are in float32 where the cut is also inside a block of the first.
        """
        if not 0 <= start < stop <= self._size(dim):
            raise WeightError("cannot cut", found=f"[{start}, {stop})", expected=f"a part of [0, {self.shape[dim]})")
        return self._narrow_rows(start, stop) if dim == 0 else self._narrow_columns(start, stop)

    def take_rows(self, index: Tensor) -> QuantizedWeight:
        """Rows `index` (int64 [n], any order, bias included), for a file whose rows are not in the model's order.

        A WeightError where some rows share scales (blocks of several rows, but not of all) or an index is outside [0, N).
        """
        s, coarse = self.spec, self.spec.scale2_block
        if 1 != s.block[0] < s.n or (coarse is not None and 1 != coarse[0] < s.n):
            raise WeightError("cannot reorder rows that share scales", found=s.scheme, expected="a scale for each row")
        if index.dim() != 1 or index.numel() == 0 or int(index.min()) < 0 or int(index.max()) >= s.n:
            raise WeightError("rows to take are out of range", found=f"shape {list(index.shape)}", expected=f"1-D, 0..{s.n - 1}")
        n = index.numel()
        names = ["codes", "bias"]
        if s.block[0] == 1:
            names += ["scale", "zero", "offset"]
        if coarse is not None and coarse[0] == 1:
            names += ["scale2", "offset2"]
        rows: dict[str, Any] = {name: _select(t, 0, index) for name in names if (t := getattr(self, name)) is not None}
        if coarse is not None and coarse[0] != 1:
            coarse = (n, coarse[1])
        block = (1 if s.block[0] == 1 else n, s.block[1])
        return dataclasses.replace(self, spec=s.replace(n=n, block=block, scale2_block=coarse), **rows)

    def _size(self, dim: int) -> int:
        if dim not in (0, 1):
            raise WeightError("cannot cut along this dimension", found=dim, expected="0 (N, output rows) or 1 (K, input columns)")
        return self.shape[dim]

    def _narrow_rows(self, start: int, stop: int) -> QuantizedWeight:
        s = self.spec
        first, offset = divmod(start + s.block_offset[0], s.block[0])
        last = (stop - 1 + s.block_offset[0]) // s.block[0]
        changes = self._cut_grids(0, start, stop, first, last)
        return dataclasses.replace(
            self,
            spec=s.replace(n=stop - start, block=s.block, block_offset=(offset, s.block_offset[1]), **changes.pop("spec")),
            codes=self.codes[start:stop],
            bias=None if self.bias is None else self.bias[start:stop],
            **changes,
        )

    def _narrow_columns(self, start: int, stop: int) -> QuantizedWeight:
        s = self.spec
        if self.perm is not None or self.group_index is not None:
            return self._narrow_ordered(start, stop)
        first, offset = divmod(start + s.block_offset[1], s.block[1])
        last = (stop - 1 + s.block_offset[1]) // s.block[1]
        changes = self._cut_grids(1, start, stop, first, last)
        return dataclasses.replace(
            self,
            spec=s.replace(k=stop - start, block=s.block, block_offset=(s.block_offset[0], offset), **changes.pop("spec")),
            codes=bitstream.narrow(self.codes, s.weight.bits, start, stop)[:, : bitstream.row_bytes(stop - start, s.weight.bits)],
            input_multiplier=None if self.input_multiplier is None else self.input_multiplier[start:stop],
            **changes,
        )

    def _narrow_ordered(self, start: int, stop: int) -> QuantizedWeight:
        """Cut input columns out of a permuted weight: the stored order stays, groups lose members (and may vanish)."""
        s = self.spec
        perm = self.perm.long() if self.perm is not None else torch.arange(s.k, device=self.device)
        kept = ((perm >= start) & (perm < stop)).nonzero().squeeze(1)
        used, groups, sizes = (
            self.column_groups().index_select(0, kept).unique_consecutive(return_inverse=True, return_counts=True)
        )
        block, first, ragged = _regular(sizes.tolist(), s.block[1])
        new_perm = perm.index_select(0, kept) - start
        trivial = torch.equal(new_perm, torch.arange(stop - start, device=self.device))
        pick = lambda t: None if t is None else _select(t, 1, used)
        scale, offset = (self.scales(), self.offsets()) if self.scale2 is not None else (self.scale, self.offset)
        return dataclasses.replace(
            self,
            spec=s.replace(
                k=stop - start, block=(s.block[0], block), block_offset=(s.block_offset[0], first), ragged=ragged,
                act_order=not trivial, scale_dtype=scale.dtype, scale2_block=None,
            ),
            codes=bitstream.take(self.codes, s.weight.bits, s.k, kept),
            scale=_select(scale, 1, used), zero=pick(self.zero), offset=pick(offset), scale2=None, offset2=None,
            perm=None if trivial else new_perm.int(), group_index=groups.int() if ragged else None,
            input_multiplier=None if self.input_multiplier is None else self.input_multiplier[start:stop],
        )  # fmt: skip

    def _cut_grids(self, dim: int, start: int, stop: int, first: int, last: int) -> dict[str, Any]:
        """Cut scale, zero and offset to the blocks [first, last], and the second scale to its own blocks.

        A block of the second scale that is cut is first split into smaller ones, which takes more of them; where they
        would not consist of whole blocks of the first, both scales are multiplied out in float32, as `dequantize` does.
        """
        cut: dict[str, Any] = {"spec": {}}
        for name in ("scale", "zero", "offset"):
            tensor = getattr(self, name)
            cut[name] = None if tensor is None else tensor.narrow(dim, first, last - first + 1)
        if self.scale2 is None or self.spec.scale2_block is None:
            return cut
        size = list(self.spec.scale2_block)
        parts = math.gcd(size[dim], start) if size[dim] < self.shape[dim] else size[dim]
        if parts == size[dim] >= self.shape[dim]:
            size[dim] = stop - start
        elif parts % self.spec.block[dim] == 0:
            cells = torch.arange(start // parts, -(-stop // parts), device=self.device) // (size[dim] // parts)
            for name in ("scale2", "offset2"):
                tensor = getattr(self, name)
                if tensor is not None and parts == size[dim]:
                    cut[name] = tensor.narrow(dim, int(start // parts), len(cells))
                elif tensor is not None:
                    cut[name] = tensor.index_select(dim, cells)
            size[dim] = min(parts, stop - start)
        else:
            folded, offset = self.scales(), self.offsets()
            cut["scale"] = folded.narrow(dim, first, last - first + 1)
            cut["offset"] = None if offset is None else offset.narrow(dim, first, last - first + 1)
            cut["scale2"] = cut["offset2"] = None
            cut["spec"] = {"scale2_block": None, "scale_dtype": torch.float32}
            return cut
        cut["spec"] = {"scale2_block": (size[0], size[1])}
        return cut


def _regular(sizes: list[int], block: int) -> tuple[int, int, bool]:
    """(block, columns missing from the first, ragged) of groups of these sizes; regular where all but the ends are full."""
    if len(sizes) == 1:
        return sizes[0], 0, False
    if max(sizes) <= block and all(size == block for size in sizes[1:-1]):
        return block, block - sizes[0], False
    return min(block, sum(sizes)), 0, True


def _is_permutation(index: Tensor) -> bool:
    """True where int64 [K] holds each of 0..K-1 once."""
    if int(index.min()) < 0 or int(index.max()) >= index.numel():
        return False
    seen = torch.zeros(index.numel(), dtype=torch.bool, device=index.device)
    seen[index] = True
    return bool(seen.all())


def _select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """index_select that also takes one-byte floats, which torch cannot index."""
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        return tensor.view(torch.uint8).index_select(dim, index).view(tensor.dtype)
    return tensor.index_select(dim, index)


def decode(codes: Tensor, scalar: ScalarType, k: int) -> Tensor:
    """Packed rows to the numbers their codes stand for (before zero, scale and offset), float32 [n, k], freshly owned."""
    if scalar.name in _FLOAT_VIEWS:
        return _decode_fp8(codes[:, :k].contiguous(), scalar)
    if scalar.bits == 4 and scalar.kind != "int":
        return _decode_pairs(codes, scalar, k)
    raw = bitstream.unpack(codes, scalar.bits, k)
    if scalar.name == "int8":
        return raw.contiguous().view(torch.int8).float()
    if scalar.kind == "int":
        half = 1 << (scalar.bits - 1)
        values = (raw ^ half if scalar.signed else raw).float()
        zero = half if scalar.signed else scalar.bias
        return values.sub_(zero) if zero else values
    table = torch.tensor(scalar.values(), dtype=torch.float32, device=codes.device)
    return table.index_select(0, raw.reshape(-1).int()).view(raw.shape)


def _decode_pairs(codes: Tensor, scalar: ScalarType, k: int) -> Tensor:
    """Two 4-bit codes at a time: a byte selects the pair of float32 that it stands for, as one 8-byte word."""
    one = torch.tensor(scalar.values(), dtype=torch.float32, device=codes.device)
    pairs = torch.stack((one.repeat(16), one.repeat_interleave(16)), 1).view(torch.int64).squeeze(1)
    words = pairs.index_select(0, codes.reshape(-1).int())
    return words.view(torch.float32).view(codes.shape[0], 2 * codes.shape[1])[:, :k].contiguous()


def _decode_fp8(raw: Tensor, scalar: ScalarType) -> Tensor:
    """FP8 bytes to float32. A CPU's cast goes one number at a time; the same bits, moved into place, are 15 times faster."""
    native = raw.view(_FLOAT_VIEWS[scalar.name])
    # The largest magnitudes, and minus zero of the FNUZ types, stand for NaN or infinity: those go the slow way.
    special = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}.get(scalar.name, 0)
    if raw.device.type != "cpu" or not raw.numel() or int((raw & 0x7F).max()) >= special:
        return native.float()
    wide = raw.view(torch.int8).int()
    wide.bitwise_left_shift_(23 - scalar.mantissa).bitwise_and_((0x7F << (23 - scalar.mantissa)) - (1 << 31))
    return wide.view(torch.float32).mul_(2.0 ** (128 - (1 << (scalar.exponent - 1))))
