"""The packed weight of the native CPU kernels: its layout, and how a canonical weight is written into it.

One uint8 tensor: a header, the codes in blocks of 32 output rows, scales and offsets, an optional column map, and look-up tables
of what each code stands for. csrc/packed_weight.h defines it; one layout serves every M, dtype and compute type.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import memory, native
from bitline.host import without_default_device
from bitline.types import ActSpec, LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

BLOCK_N = 32  # output rows of a block
K_BLOCK = {2: 16, 3: 32, 4: 8, 5: 32, 6: 16, 8: 4}  # columns of a K block, by bits
MAX_GROUP_K = 512  # columns that one float32 accumulator sums; longer groups are split into equal ones of the same scale
RAGGED_GROUP_K = 32  # columns that share a scale where a weight's groups are ragged
MAGIC = 0x32304D4D45474C42
HEADER_BYTES = 256
# enum ScaleType: how scales or offsets are stored.
F32, BF16, F16, U8, I8, E4M3, ZERO_POINT = range(1, 8)
STORAGE_DTYPE = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16, U8: torch.uint8, I8: torch.int8,
                  E4M3: torch.float8_e4m3fn, ZERO_POINT: torch.int8}  # fmt: skip
_ONE_LEVEL = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float8_e8m0fnu: BF16, torch.float8_e4m3fn: BF16}
_TWO_LEVEL = {torch.uint8: U8, torch.int8: I8, torch.float8_e4m3fn: E4M3}  # times a float32 super-block or global scale
ACT_QUANT = {"int8": 1, "float8_e4m3fn": 3}  # enum ActQuant
GROUP_QUANT = {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3, "float4_e2m1": 4, "float6_e2m3": 5, "float6_e3m2": 6}
GROUP_SCALE = {"float": 0, "e8m0": 1, "e4m3": 2, "e5m3": 3}


@dataclass(frozen=True)
class PackedLayout:
    """The shape of a packed weight. Names as in csrc/packed_weight.h."""

    n: int
    bits: int  # of a packed code
    group_k: int  # columns of a group, padded to whole K blocks
    num_groups: int
    has_column_map: bool
    scale_type: int
    offset_type: int  # 0: no offsets
    groups_per_super_scale: int

    @property
    def k_packed(self) -> int:
        """Columns with padding."""
        return self.group_k * self.num_groups

    @property
    def n_packed(self) -> int:
        """Output rows with padding."""
        return self.n + -self.n % BLOCK_N

    def section_bytes(self) -> dict[str, int]:
        """Size of each section, in their order."""
        scales = self.n_packed * self.num_groups
        super_scales = self.n_packed * -(-self.num_groups // self.groups_per_super_scale) * 4
        return {
            "header": HEADER_BYTES,
            "codes": self.n_packed * self.k_packed * self.bits // 8,
            "scales": scales * STORAGE_DTYPE[self.scale_type].itemsize,
            "offsets": scales * STORAGE_DTYPE[self.offset_type].itemsize if self.offset_type else 0,
            "super_scales": super_scales if self.scale_type in (U8, I8, E4M3) else 0,
            "super_offsets": super_scales if self.offset_type in (U8, I8, E4M3) else 0,
            "column_map": 4 * self.k_packed if self.has_column_map else 0,
            "lut_bf16": 512,
            "lut_f32": 4 << self.bits,
        }

    def section_offsets(self) -> tuple[dict[str, int], int]:
        """Byte offset of each section, 64-byte aligned, 0 for an absent one; and the total size."""
        end, offsets = 0, {}
        for name, size in self.section_bytes().items():
            offsets[name] = end if size else 0
            end += size + -size % 64
        return offsets, end


def _group_splits(spec: LinearSpec) -> int:
    """Equal packed groups that each group is split into."""
    return 1 if spec.ragged else -(-min(spec.block[1], spec.k) // MAX_GROUP_K)


def layout_of(spec: LinearSpec, num_groups: int | None = None) -> PackedLayout:
    """The layout of a spec. num_groups: packed groups of a ragged weight, by default an estimate."""
    splits = _group_splits(spec)
    columns = RAGGED_GROUP_K if spec.ragged else -(-min(spec.block[1], spec.k) // splits)
    at_least = {1: 2, 7: 8}.get(spec.weight.bits, spec.weight.bits)
    # The fewest bits after padding to whole K blocks: short groups may be smaller with wider codes of a shorter K block.
    bits = min((b for b in K_BLOCK if b >= at_least), key=lambda b: (-(-columns // K_BLOCK[b]) * K_BLOCK[b] * b, b))
    group_k = -(-columns // K_BLOCK[bits]) * K_BLOCK[bits]
    count = spec.grid[1] * splits if not spec.ragged else num_groups or spec.k // RAGGED_GROUP_K + spec.grid[1]
    # A column map is needed for padding between groups; padding behind the last one needs none.
    contiguous = not spec.ragged and (spec.grid[1] == 1 or (group_k * splits == spec.block[1] and spec.block_offset[1] == 0))
    per_super_scale = _groups_per_super_scale(spec)
    if per_super_scale:
        scale_type = _TWO_LEVEL.get(spec.scale_dtype, F32)
    else:
        scale_type = F32 if spec.scale2_block else _ONE_LEVEL.get(spec.scale_dtype, F32)
    float_offset = scale_type if scale_type in (U8, I8) else _ONE_LEVEL.get(spec.scale_dtype, F32)
    offset_type = {"none": 0, "int": ZERO_POINT, "float": float_offset}[spec.zero]
    return PackedLayout(
        spec.n, bits, group_k, count, spec.act_order or not contiguous, scale_type, offset_type, per_super_scale or 1
    )


def _groups_per_super_scale(spec: LinearSpec) -> int:
    """Packed groups along K that share a super-block or global scale, where scales are kept in two levels; else 0."""
    super_block = spec.scale2_block
    if super_block is None or spec.scale_dtype not in _TWO_LEVEL or spec.ragged or spec.block_offset != (0, 0):
        return 0
    if super_block[1] >= spec.k:
        return spec.grid[1] * _group_splits(spec)
    return super_block[1] // spec.block[1] * _group_splits(spec) if super_block[1] % spec.block[1] == 0 else 0


@without_default_device
def pack(weight: QuantizedWeight, batch_invariant: bool = False) -> Tensor:
    """A weight as one uint8 tensor. batch_invariant: a row's result must not depend on M. Needs the native core."""
    spec = weight.spec
    core = native.core()
    assert core is not None, "is_supported refuses a machine without the native core"
    columns, scale_columns = _column_map(weight)
    layout = layout_of(spec, len(scale_columns))
    offsets, size = layout.section_offsets()
    out = memory.empty(size, dtype=torch.uint8)
    section = lambda name, dtype: out[offsets[name] : offsets[name] + layout.section_bytes()[name]].view(dtype)
    out[offsets["codes"] + layout.section_bytes()["codes"] :] = 0  # alignment gaps, and entries that tables do not fill
    if columns is not None:  # of x: codes are gathered by their stored column
        x_columns = columns if weight.perm is None else weight.perm[columns.clamp(min=0).long()].where(columns >= 0, -1)
        section("column_map", torch.int32).copy_(x_columns)
    _pack_scales(core, weight, layout, scale_columns, section)
    lut_f32, lut_bf16, inexact = _lookup_tables(spec.weight, _implicit_zero(spec), layout.bits)
    section("lut_f32", torch.float32).copy_(lut_f32)
    section("lut_bf16", torch.int16)[: len(lut_bf16)] = lut_bf16
    header = bytearray(_header(weight, layout, offsets, size, inexact, batch_invariant))
    out[:HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
    _pack_codes(core, weight, columns, out)
    return out


def _pack_codes(core: native.Core, weight: QuantizedWeight, columns: Tensor | None, out: Tensor) -> None:
    """columns: the stored column of each packed column, or None, as _column_map returns it."""
    spec = weight.spec
    flip = 1 << (spec.weight.bits - 1) if spec.weight.signed else 0  # two's complement to offset binary
    in_order = columns is None or torch.equal(columns[: spec.k], torch.arange(spec.k, dtype=torch.int32))  # then only padding
    codes = weight.codes if weight.codes.stride(1) == 1 else weight.codes.contiguous()
    failed = core.gemm_pack_codes(
        codes.data_ptr(), codes.stride(0), spec.weight.bits, flip,
        None if columns is None or in_order else columns.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory to pack a weight")


def _column_map(weight: QuantizedWeight) -> tuple[Tensor | None, Tensor]:
    """int32 [k_packed], the stored column of each packed column, -1 for padding, or None where they are the same; and int64
    [num_groups], the column of the scale grid of each packed group.
    """
    spec = weight.spec
    layout = layout_of(spec)
    if not layout.has_column_map:
        return None, torch.repeat_interleave(torch.arange(spec.grid[1]), _group_splits(spec))
    group = weight.column_groups()
    if not spec.ragged:
        within = (torch.arange(spec.k) + spec.block_offset[1]) % spec.block[1]
        within[group == 0] -= spec.block_offset[1]
        packed_column = group * (layout.group_k * _group_splits(spec)) + within
        scale_columns = torch.repeat_interleave(torch.arange(spec.grid[1]), _group_splits(spec))
    else:  # each ragged group is padded to whole packed groups
        counts = torch.bincount(group, minlength=int(weight.scale.shape[1]))
        packed_groups = (counts + RAGGED_GROUP_K - 1) // RAGGED_GROUP_K
        first = torch.cumsum(packed_groups, 0) - packed_groups
        within = torch.arange(spec.k) - (torch.cumsum(counts, 0) - counts)[group]
        packed_column = (first[group] + within // RAGGED_GROUP_K) * layout.group_k + within % RAGGED_GROUP_K
        scale_columns = torch.repeat_interleave(torch.arange(len(packed_groups)), packed_groups)
    columns = torch.full((len(scale_columns) * layout.group_k,), -1, dtype=torch.int32)
    columns[packed_column] = torch.arange(spec.k, dtype=torch.int32)
    return columns, scale_columns


def _pack_scales(
    core: native.Core,
    weight: QuantizedWeight,
    layout: PackedLayout,
    scale_columns: Tensor,
    section: Callable[[str, torch.dtype], Tensor],
) -> None:
    """Scales and offsets of both levels as [N block][group][32]."""
    spec = weight.spec
    every_column = torch.arange(max(layout.num_groups, 1))

    def write(name: str, scale_type: int, grid: Tensor, rows_per_scale: int = spec.block[0],
              row_offset: int = spec.block_offset[0], grid_columns: Tensor = scale_columns) -> None:  # fmt: skip
        """grid: on the scale grid, each row for `rows_per_scale` rows of the weight; its columns `grid_columns`."""
        values, to = grid.to(STORAGE_DTYPE[scale_type]).contiguous(), section(name, torch.uint8)
        core.gemm_pack_scales(
            values.data_ptr(), values.shape[1], values.itemsize, spec.n, rows_per_scale, row_offset, grid_columns.data_ptr(),
            len(grid_columns), layout.n_packed, to.data_ptr(),
        )  # fmt: skip

    def write_super(name: str, grid: Tensor) -> None:
        assert spec.scale2_block is not None
        write(name, F32, grid, spec.scale2_block[0], 0, every_column[: grid.shape[1]])

    two_level = layout.scale_type in (U8, I8, E4M3)
    write("scales", layout.scale_type, weight.scale if two_level or weight.scale2 is None else weight.scales())
    if two_level:
        assert weight.scale2 is not None
        write_super("super_scales", weight.scale2)
    if layout.offset_type == ZERO_POINT:
        assert weight.zero is not None
        write("offsets", ZERO_POINT, (weight.zero - _implicit_zero(spec)).view(torch.int8))  # modulo 256
    elif layout.offset_type in (U8, I8):
        assert weight.offset is not None and weight.scale2 is not None
        write("offsets", layout.offset_type, weight.offset)
        write_super("super_offsets", torch.ones(1, 1).expand(weight.scale2.shape) if weight.offset2 is None else weight.offset2)
    elif layout.offset_type:
        offsets = weight.offset if weight.offset2 is None else weight.offsets()
        assert offsets is not None
        write("offsets", layout.offset_type, offsets)


def _implicit_zero(spec: LinearSpec) -> int:
    """The zero point that integer codes are relative to: the type's bias; half its range where zero points are explicit."""
    kind = spec.weight
    if kind.signed or spec.zero == "int":
        return 1 << (kind.bits - 1)
    return kind.bias


@functools.cache
def _lookup_tables(kind: ScalarType, implicit_zero: int, bits: int) -> tuple[Tensor, Tensor, bool]:
    """What a packed code stands for, 0 where the type has no such code: float32 [2**bits]; bfloat16 bits as int16, in the order
    of csrc/variants/gemm_avx512_dequant.h; and whether bfloat16 rounds a value.

    That order: 32 entries up to 5 bits, shorter tables repeated; 64 for 6 bits; for 8 bits all low bytes and then all high bytes.
    """
    values = torch.zeros(1 << bits)
    if kind.kind == "int":
        values[: 1 << kind.bits] = torch.arange(1 << kind.bits).float() - implicit_zero
    else:
        values[: 1 << kind.bits] = torch.tensor(kind.values(), dtype=torch.float64).float()
    rounded = values.bfloat16()
    halves = rounded.view(torch.int16)
    if len(values) == 256:
        halves = halves.view(torch.uint8).view(256, 2).t().reshape(-1).view(torch.int16)
    else:
        halves = halves.repeat(max(1, 32 // len(values)))
    return values, halves, not torch.equal(rounded.float().nan_to_num(), values.nan_to_num())


def _header(
    weight: QuantizedWeight, layout: PackedLayout, offsets: dict[str, int], size: int, inexact: bool, batch_invariant: bool
) -> bytes:
    """csrc/packed_weight.h: PackedHeader."""
    spec = weight.spec
    granularity = group_quant = group_scale = group_k = 0
    act_quant, (scale, zero, limit), global_scale = 0, _static_parameters(weight), 1.0
    if (act := spec.act) is not None and quantizes_activations(act):
        if act.granularity == "group":
            group_quant, group_scale, group_k = GROUP_QUANT[act.dtype.name], GROUP_SCALE[act.scale], act.group_size
            global_scale = 1.0 if weight.input_scale is None else float(weight.input_scale)
        else:
            act_quant = ACT_QUANT[act.dtype.name] + (not act.symmetric)
            granularity = 2 if not act.dynamic else 1 if act.granularity == "tensor" else 0
    integers = (
        MAGIC, size, spec.n, spec.k, layout.k_packed, layout.bits, layout.num_groups, layout.group_k,
        int(spec.weight.kind == "int"), _implicit_zero(spec), layout.scale_type, layout.offset_type,
        layout.groups_per_super_scale, *(offsets[name] for name in list(offsets)[1:]), act_quant, granularity,
    )  # fmt: skip
    # Groups that share a scale because a longer one was split.
    row_scales = not spec.ragged and spec.grid[1] == 1 and layout.scale_type not in (U8, I8, E4M3)
    flags = int(inexact), int(batch_invariant), int(row_scales)
    groups = group_quant, group_scale, group_k, global_scale
    return struct.pack("<23qfifi5qf", *integers, scale, zero, limit, *flags, *groups).ljust(HEADER_BYTES, b"\0")


def _static_parameters(weight: QuantizedWeight) -> tuple[float, int, float]:
    """Scale and zero point of static activations, 0 for dynamic ones, and the bound of dynamic scales."""
    act = weight.spec.act
    if act is None:
        return 0.0, 0, math.inf
    scale = float(weight.input_scale) if weight.input_scale is not None and not act.dynamic else 0.0
    zero = int(weight.input_zero) if weight.input_zero is not None and not act.symmetric and not act.dynamic else 0
    return scale, zero, act.limit or math.inf


@functools.cache
def multiplies_codes(act: ActSpec | None) -> bool:
    """Whether the kernel multiplies the codes of quantized activations: int8 and E4M3 per token or per tensor."""
    return act is not None and act.dtype.name in ACT_QUANT and act.granularity != "group" and act.scale == "float" and (
        act.symmetric or act.dtype.kind == "int"
    )  # fmt: skip


@functools.cache
def quantizes_activations(act: ActSpec | None) -> bool:
    """Whether the kernel itself does what the scheme asks of activations: nothing, codes that it multiplies, or groups of columns
    that it replaces by the values of their codes.
    """
    if act is None or multiplies_codes(act):
        return True
    if act.granularity != "group" or not act.dynamic or not act.symmetric or act.dtype.name not in GROUP_QUANT:
        return False
    return act.dtype.bits == 8 if act.scale == "float" else act.dtype.kind == "float"
