"""The packed layout of the Triton weight-only kernels: int32 codes by K block, scales by group, auxiliary bits, column order.

Codes are int32 [k_blocks, N, 16]; a K block is 512 / low_bits columns. int32 j of a row holds, in field f of its low half (bits
f * low_bits) and of its high half (16 bits further up), the codes of columns 32 f + 2 j and 32 f + 2 j + 1 of the block.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline import bitstream, types
from bitline.host import without_default_device
from bitline.kernels.base import Packed
from bitline.types import LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

INT32_PER_BLOCK = 16  # packed int32 of one row in one K block
_MIN_GROUP = 32  # the fewest columns per group scale in the packed layout; the columns of one field
LUT_SIZE = 16
# bits of a code -> (bits in the packed int32, whose fields have 2, 4 or 8; bits above these, in a plane of their own)
_BIT_PLANES = {1: (2, 0), 2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 7: (8, 0), 8: (8, 0)}


@dataclass(frozen=True)
class PackedLayout:
    """How the weight of a spec is packed.

    code_type: the type that is packed: the spec's own, or E4M3 for 6-bit floats, whose values it contains.
    low_bits, high_bits: bits of a code in the packed int32, and in the high-bit plane. lut: codes index a table of 16 values.
    block_k: columns of a K block.
    aligned: columns keep their order, and group boundaries fall on multiples of 32 columns after `k_offset` columns of padding
    that complete a group split by tensor parallelism. Otherwise each group is padded to a multiple of `group_align`, and x is
    gathered.
    scale_block_k: columns per group scale, 0 for per-channel scales. promote_k: columns accumulated before the partial
    accumulator is scaled and added to the float32 result.
    implicit_zero: subtracted from every code before the MMA. zero_base: implicit_zero minus the type's own bias.
    sf_vec_size: columns per one-byte block scale that multiplies the dequantized weights themselves (MX, NVFP4), 0 without;
    `scale` is then a factor per row. sf_e8m0: these scales are E8M0, else E4M3.
    """

    code_type: ScalarType
    low_bits: int
    high_bits: int
    lut: bool
    block_k: int
    aligned: bool
    k_offset: int
    scale_block_k: int
    promote_k: int
    implicit_zero: int
    zero_base: int
    sf_vec_size: int
    sf_e8m0: bool

    @property
    def group_align(self) -> int:
        """The multiple of columns that groups are padded to where they are not aligned."""
        return self.sf_vec_size or _MIN_GROUP


@functools.lru_cache(maxsize=4096)
def layout_of(spec: LinearSpec) -> PackedLayout:
    """The layout of a spec that the kernels take."""
    code = types.float8_e4m3fn if spec.weight.kind == "float" and spec.weight.bits == 6 else spec.weight
    integer = code.kind == "int"
    low_bits, high_bits = _BIT_PLANES[code.bits] if integer else (max(2, 1 << (code.bits - 1).bit_length()), 0)
    block_k = 32 * INT32_PER_BLOCK // low_bits
    half = 1 << (code.bits - 1)
    implicit_zero = (half if code.signed or spec.zero == "int" else code.bias) if integer else 0
    bias = (half if code.signed else code.bias) if integer else 0
    columns = spec.block[1]
    per_channel = not spec.ragged and columns >= spec.k
    sf_vec_size = 0 if per_channel else _sf_vec_size(spec, code)
    aligned = per_channel or (
        not spec.ragged and columns % (sf_vec_size or _MIN_GROUP) == 0 and (not sf_vec_size or columns == sf_vec_size)
    )
    scale_block_k = 0 if per_channel or sf_vec_size else columns if aligned else _MIN_GROUP
    # With float32 inputs the chain of additions stays short: torch's matmul reduces in a tree, and hundreds of sequential
    # additions would be less accurate than it.
    promote_k = _MIN_GROUP
    if spec.act_dtype != torch.float32:
        promote_k = block_k if scale_block_k == 0 else math.gcd(block_k, scale_block_k)
    return PackedLayout(
        code_type=code,
        low_bits=low_bits,
        high_bits=high_bits,
        lut=code.kind == "table",
        block_k=block_k,
        aligned=aligned,
        k_offset=spec.block_offset[1] if aligned and not per_channel else 0,
        scale_block_k=scale_block_k,
        promote_k=promote_k,
        implicit_zero=implicit_zero,
        zero_base=implicit_zero - bias,
        sf_vec_size=sf_vec_size,
        sf_e8m0=spec.scale_dtype == torch.float8_e8m0fnu,
    )


def _sf_vec_size(spec: LinearSpec, code: ScalarType) -> int:
    """16 or 32 where scales stay bytes and multiply the dequantized weights in registers, else 0.

    E8M0 scales, and E4M3 scales of E2M1 weights: these products are exact in 16 bits. Second-level scales must not change along
    K.
    """
    one_byte = spec.scale_dtype == torch.float8_e8m0fnu or (spec.scale_dtype == torch.float8_e4m3fn and code is types.float4_e2m1)
    if not one_byte or code.kind != "float" or not (spec.scale2_block is None or spec.scale2_block[1] >= spec.k):
        return 0
    columns = spec.block[1]
    if columns == 32 and not spec.ragged:
        return 32
    return 16 if spec.ragged or columns % _MIN_GROUP else 0


@without_default_device
def pack(weight: QuantizedWeight) -> Packed:
    """codes int32 [k_blocks, N, 16]; scale, zero, offset [groups, N]; aux; perm int32 [packed K]. Absent ones are empty.

    aux is one of
    - block scales int32 or int16 [k_blocks, N, 32 // sf_vec_size], one byte for each 32 columns of the block;
    - the codes' high bits int16 or uint8 [k_blocks, N, 16]: those of int32 j's low half, then of its high half, field by field;
    - a LUT int16 [3, 16]: the bits of its values in the 16-bit input dtype, and the low and the high halves of float32.
    """
    spec, layout = weight.spec, layout_of(weight.spec)
    columns = _packed_columns(weight, layout)
    codes, aux = _pack_codes(weight, layout, columns)
    row = (torch.arange(spec.n, device=weight.device) + spec.block_offset[0]) // spec.block[0]
    absent = torch.empty(0, device=weight.device)
    two_level = weight.scale2 is not None
    if layout.sf_vec_size:
        scale, aux = _pack_block_scales(weight, layout, row, columns)
    else:
        scale = _by_group(weight.scales() if two_level else weight.scale, row, columns.group)
    if layout.lut:
        aux = _lut(spec).to(weight.device)
    offset = weight.offsets() if two_level else weight.offset
    return {
        "codes": codes,
        "scale": _nan_for_nonfinite_codes(scale, weight),
        "zero": absent if weight.zero is None else _by_group(weight.zero, row, columns.group),
        "offset": absent if offset is None else _by_group(offset, row, columns.group),
        "aux": aux,
        "perm": absent.int() if columns.perm is None else columns.perm,
    }


def packed_bytes(spec: LinearSpec) -> int:
    """Bytes of the packed tensors; a lower bound for groups of unequal size."""
    layout, block = layout_of(spec), spec.block[1]
    columns = spec.k + layout.k_offset
    if not layout.aligned and not spec.ragged:
        columns = -(-spec.k // block) * -(-block // layout.group_align) * layout.group_align
    columns = -(-columns // layout.block_k) * layout.block_k
    groups = 1 if layout.scale_block_k == 0 else -(-columns // layout.scale_block_k)
    widened = layout.sf_vec_size or spec.scale2_block is not None or spec.scale_dtype.itemsize == 1
    scale = 4 if widened else spec.scale_dtype.itemsize
    per_group = scale * (2 if spec.zero == "float" else 1) + (1 if spec.zero == "int" else 0)
    block_scales = columns // layout.sf_vec_size * spec.n if layout.sf_vec_size else 0
    perm = 4 * columns if spec.act_order or not layout.aligned else 0
    lut = 6 * LUT_SIZE if layout.lut else 0
    codes = columns * spec.n * (layout.low_bits + layout.high_bits) // 8
    return codes + groups * spec.n * per_group + block_scales + perm + lut


@dataclass(frozen=True)
class _PackedColumns:
    """Where the weight's columns go.

    position: the packed column of each stored one. perm: the column of x of each packed column, K for padding; None where the
    order is x's own. group: the scale column of each packed group; None where groups are aligned.
    """

    position: Tensor | slice
    perm: Tensor | None
    group: Tensor | None
    k_blocks: int


def _packed_columns(weight: QuantizedWeight, layout: PackedLayout) -> _PackedColumns:
    k, device = weight.spec.k, weight.device
    source = weight.perm if weight.perm is not None else torch.arange(k, dtype=torch.int32, device=device)
    scale_column = None
    if layout.aligned:
        position: Tensor | slice = slice(layout.k_offset, layout.k_offset + k)
        total = layout.k_offset + k
        if weight.perm is None:
            return _PackedColumns(position, None, None, -(-total // layout.block_k))
    else:
        align = layout.group_align
        group = weight.column_groups()
        used, member, count = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
        padded = (count + align - 1) // align * align
        start = padded.cumsum(0) - padded
        within = torch.arange(k, device=device) - (count.cumsum(0) - count)[member]
        position, total = start[member] + within, int(padded.sum())
        scale_column = used.repeat_interleave(padded // align)
    k_blocks = -(-total // layout.block_k)
    perm = torch.full((k_blocks * layout.block_k,), k, dtype=torch.int32, device=device)
    perm[position] = source
    if scale_column is not None:
        scale_column = pad(scale_column, (0, k_blocks * layout.block_k // layout.group_align - scale_column.numel()))
    return _PackedColumns(position, perm, scale_column, k_blocks)


def _by_group(table: Tensor, row: Tensor, scale_column: Tensor | None) -> Tensor:
    """[row blocks, groups] to [groups, N]; 16- and 32-bit floats and zero points keep their dtype."""
    if table.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.uint8):
        table = table.float()
    if scale_column is not None:
        table = table.index_select(1, scale_column)
    return table.t().index_select(1, row).contiguous()


def _pack_codes(weight: QuantizedWeight, layout: PackedLayout, columns: _PackedColumns) -> tuple[Tensor, Tensor]:
    """(codes, high-bit plane): see `pack`. Works on a chunk of rows at a time."""
    s, k_blocks, fields = weight.spec, columns.k_blocks, 16 // layout.low_bits
    recode = None if layout.code_type is s.weight else _recode_table(s.weight, layout.code_type).to(weight.device)
    out = torch.empty(k_blocks, s.n, INT32_PER_BLOCK, dtype=torch.int32, device=weight.device)
    high_dtype = torch.int16 if layout.high_bits * fields == 8 else torch.uint8
    high_plane = torch.empty(
        (k_blocks, s.n, INT32_PER_BLOCK) if layout.high_bits else (0,),
        dtype=high_dtype if layout.high_bits else torch.float32,
        device=out.device,
    )
    step = bitstream.rows_per_chunk(8 * s.k)
    for r in range(0, s.n, step):
        codes = bitstream.unpack(weight.codes[r : r + step], s.weight.bits, s.k)
        if recode is not None:
            codes = recode[codes.int()]
        if s.weight.signed:
            codes = codes ^ (1 << (layout.code_type.bits - 1))
        rows = codes.shape[0]
        padded = torch.zeros(rows, k_blocks * layout.block_k, dtype=torch.uint8, device=weight.device)
        padded[:, columns.position] = codes
        low, high = _pack_int32(padded.view(rows, k_blocks, fields, INT32_PER_BLOCK, 2), layout)
        out[:, r : r + rows] = low.transpose(0, 1)
        if layout.high_bits:
            high_plane[:, r : r + rows] = high.transpose(0, 1).to(high_dtype)
    return out, high_plane


def _pack_int32(codes: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Codes uint8 [rows, k_blocks, fields, 16, 2] to (low bits, high bits), int32 [rows, k_blocks, 16] each."""
    rows, k_blocks, fields = codes.shape[:3]
    width = layout.low_bits
    low = torch.zeros(rows, k_blocks, INT32_PER_BLOCK, dtype=torch.int32, device=codes.device)
    high = torch.zeros_like(low)
    for f in range(fields):
        for half in (0, 1):
            part = codes[:, :, f, :, half].int()
            low |= (part & ((1 << width) - 1)) << (f * width + 16 * half)
            if layout.high_bits:
                high |= (part >> width) << (layout.high_bits * (f + fields * half))
    return low, high


def _lut(spec: LinearSpec) -> Tensor:
    """The lookup table of a type: see `pack`."""
    values = torch.tensor(spec.weight.values() + (0.0,) * (LUT_SIZE - (1 << spec.weight.bits)))
    rounded = values.to(spec.act_dtype if spec.act_dtype.itemsize == 2 else torch.bfloat16)
    return torch.cat((rounded.view(torch.int16).view(1, LUT_SIZE), values.view(torch.int16).view(LUT_SIZE, 2).t()))


@functools.cache
def _recode_table(source: ScalarType, target: ScalarType) -> Tensor:
    """uint8 [2**bits]: the code in `target` of each code of `source`. `target` has all its values, zeros of both signs too."""
    sign = 1 << (target.bits - 1)
    magnitude = {value: code for code, value in enumerate(target.values()[:sign])}
    half = 1 << (source.bits - 1)
    positive = [magnitude[value] for value in source.values()[:half]]
    return torch.tensor(positive + [code | sign for code in positive], dtype=torch.uint8)


def exponent_bias(code: ScalarType) -> int:
    """The exponent bias of a minifloat."""
    return code.bias or (1 << (code.exponent - 1)) - 1


def _pack_block_scales(
    weight: QuantizedWeight, layout: PackedLayout, row: Tensor, columns: _PackedColumns
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(factor of each row float32 [1, N], one-byte block scales).

    E4M3 scales stay as they are. E8M0 scales are rebased to the largest of their row, which becomes 1 (for float16 inputs, the
    largest power of two with which no weight overflows), so that 16-bit multiplication is exact: a scale that underflows then is
    smaller than the row's largest by a factor of 2**126 (float16: 2**14 for E5M2, 2**21 for E4M3, 2**27 for E2M1).
    """
    s, half = weight.spec, weight.spec.act_dtype == torch.float16
    table = weight.scale.view(torch.uint8)
    factor = torch.ones(table.shape[0], 1, dtype=torch.float64, device=table.device)
    if layout.sf_e8m0:
        headroom = int(math.log2(65504 / layout.code_type.max())) if half else 0
        nan = table == 255
        largest = table.masked_fill(nan, 0).amax(1, keepdim=True).int()
        factor = torch.ldexp(factor, largest - 127 - headroom).masked_fill(nan.any(1, keepdim=True), math.nan)
        one = (15 if half else 127) + headroom
        table = (table.int() - largest + one).clamp_(min=0).masked_fill(nan, 0).to(torch.uint8)
    if weight.scale2 is not None and s.scale2_block is not None:
        first_row = (torch.arange(table.shape[0], device=table.device) * s.block[0] - s.block_offset[0]).clamp_(min=0)
        factor = factor * weight.scale2[:, :1].double().index_select(0, first_row // s.scale2_block[0])
    scales_per_row = columns.k_blocks * layout.block_k // layout.sf_vec_size
    if columns.group is not None:
        table = table.index_select(1, columns.group)
    table = pad(table[:, :scales_per_row], (0, max(0, scales_per_row - table.shape[1])))
    fields, per_field = layout.block_k // 32, 32 // layout.sf_vec_size
    order = table.index_select(0, row).view(s.n, columns.k_blocks, fields, per_field).permute(1, 0, 3, 2).reshape(-1)
    scales = order.view(torch.int32 if fields == 4 else torch.int16).view(columns.k_blocks, s.n, per_field)
    return factor.float().index_select(0, row).t().contiguous(), scales


def _nan_for_nonfinite_codes(scale: Tensor, weight: QuantizedWeight) -> Tensor:
    """The device code reads codes of NaN and infinity as numbers, so a row that has one gets NaN scales and NaN outputs."""
    t = weight.spec.weight
    nonfinite = torch.tensor([not math.isfinite(v) for v in t.values()], device=weight.device)
    if t.kind != "float" or t.bits < 8 or not bool(nonfinite.any()):
        return scale
    bad = torch.cat([nonfinite[part.int()].any(1) for part in weight.codes[:, : weight.spec.k].split(1024)])
    return scale.masked_fill(bad, math.nan) if bool(bad.any()) else scale
