"""The packed form of the weight-only Triton kernels: words of codes, tables of scales, a column order where there is one."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.kernels.base import Packed
from bitline.types import LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

WORDS = 16  # int32 words of one row and chunk; the device code's layout (gemm_device.py)
_SPAN = 32  # the fewest columns that share a scale in the packed form, where it is no fine one
ENTRIES = 16  # of a table of values
# bits of a code -> (its bits in the words, where a field has 2, 4 or 8, and those above them, which lie beside the words)
_FIELDS = {1: (2, 0), 2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 7: (8, 0), 8: (8, 0)}


@dataclass(frozen=True)
class Layout:
    """What the packed form of a spec looks like.

    code: the type whose codes are packed: the spec's own, or E4M3 for 6-bit floats, all of which it has. bits: of a field of
    the words; high: bits of a code above these. table: codes are places in a table of at most 16 values.
    regular: columns keep their order, and group boundaries fall on multiples of 32 once `shift` empty columns, left
    by a tensor-parallel cut inside a group, are put back. Otherwise each group is padded to a multiple of 32 columns
    (16 for fine scales) and x is gathered. group: columns per scale, 0 where one scale serves a row. span: columns whose sum is
    scaled at a time. middle: the number subtracted from every code before the product. adjust: middle minus the type's own bias.
    fine: columns of a one-byte scale that multiplies the numbers themselves, 0 where there is none; `scale` is then the factor
    of a row. power: fine scales are E8M0.
    """

    code: ScalarType
    bits: int
    high: int
    table: bool
    chunk: int
    regular: bool
    shift: int
    group: int
    span: int
    middle: int
    adjust: int
    fine: int
    power: bool

    @property
    def unit(self) -> int:
        """Columns that a group is padded to a multiple of, where groups are not regular."""
        return self.fine or _SPAN


@functools.lru_cache(maxsize=4096)
def layout_of(spec: LinearSpec) -> Layout:
    """The layout of a spec that the kernels take."""
    code = types.float8_e4m3fn if spec.weight.kind == "float" and spec.weight.bits == 6 else spec.weight
    integer, table = code.kind == "int", code.kind == "table"
    width, high = _FIELDS[code.bits] if integer else (max(2, 1 << (code.bits - 1).bit_length()), 0)
    chunk = 32 * WORDS // width
    half = 1 << (code.bits - 1)
    middle = (half if code.signed or spec.zero == "int" else code.bias) if integer else 0
    bias = (half if code.signed else code.bias) if integer else 0
    columns = spec.block[1]
    channel = not spec.ragged and columns >= spec.k
    power = spec.scale_dtype == torch.float8_e8m0fnu
    one_byte = power or (spec.scale_dtype == torch.float8_e4m3fn and code is types.float4_e2m1)
    coarse = spec.scale2_block is None or spec.scale2_block[1] >= spec.k
    fine = 0
    if one_byte and coarse and not channel and code.kind == "float":
        fine = 32 if columns == 32 and not spec.ragged else 16 if spec.ragged or columns % _SPAN else 0
    regular = channel or (not spec.ragged and columns % (fine or _SPAN) == 0 and (not fine or columns == fine))
    group = 0 if channel or fine else columns if regular else _SPAN
    shift = spec.block_offset[1] if regular and not channel else 0
    # Sums in float32 alone stay short: a chain of hundreds of additions loses against torch's, which adds up in a tree.
    span = _SPAN if spec.act_dtype == torch.float32 else chunk if group == 0 else math.gcd(chunk, group)
    return Layout(code, width, high, table, chunk, regular, shift, group, span, middle, middle - bias, fine, power)


def pack(weight: QuantizedWeight) -> Packed:
    """codes int32 [chunks, N, 16]; scale, zero, offset [groups, N]; side; perm int32 [packed K]. Absent ones are empty.

    side: fine scales int32 or int16 [chunks, N, 32 // layout.fine], a byte for each 32 columns of the chunk; or the codes' high
    bits int16 or uint8 [chunks, N, 16], of word j's low half and then of its high half, field after field; or a table int16
    [3, 16]: the bits of its values as a 16-bit input has them, and the low and the high ones of float32.
    """
    spec, layout = weight.spec, layout_of(weight.spec)
    position, perm, picked, chunks = _columns(weight, layout)
    codes, side = _pack_codes(weight, layout, position, chunks)
    row = (torch.arange(spec.n, device=weight.device) + spec.block_offset[0]) // spec.block[0]
    absent = torch.empty(0, device=weight.device)
    folded = weight.scale2 is not None
    if layout.fine:
        scale, side = _fine(weight, layout, row, picked, chunks)
    else:
        scale = _table(weight.scales() if folded else weight.scale, row, picked)
    if layout.table:
        side = _entries(spec).to(weight.device)
    offset = weight.offsets() if folded else weight.offset
    return {
        "codes": codes,
        "scale": _poisoned(scale, weight),
        "zero": absent if weight.zero is None else _table(weight.zero, row, picked),
        "offset": absent if offset is None else _table(offset, row, picked),
        "side": side,
        "perm": absent.int() if perm is None else perm,
    }


def packed_bytes(spec: LinearSpec) -> int:
    """Bytes of the packed tensors; of groups of unequal size, the least that they can take."""
    layout, block = layout_of(spec), spec.block[1]
    columns = spec.k + layout.shift
    if not layout.regular and not spec.ragged:
        columns = -(-spec.k // block) * -(-block // layout.unit) * layout.unit
    columns = -(-columns // layout.chunk) * layout.chunk
    groups = 1 if layout.group == 0 else -(-columns // layout.group)
    scale = 4 if layout.fine or spec.scale2_block is not None or spec.scale_dtype.itemsize == 1 else spec.scale_dtype.itemsize
    per_group = scale * (2 if spec.zero == "float" else 1) + (1 if spec.zero == "int" else 0)
    fine = columns // layout.fine * spec.n if layout.fine else 0
    perm = 4 * columns if spec.act_order or not layout.regular else 0
    table = 6 * ENTRIES if layout.table else 0
    return columns * spec.n * (layout.bits + layout.high) // 8 + groups * spec.n * per_group + fine + perm + table


def _columns(weight: QuantizedWeight, layout: Layout) -> tuple[Tensor | slice, Tensor | None, Tensor | None, int]:
    """Where stored columns go: (positions, perm or None, scale column of each packed group or None, chunks)."""
    k, device = weight.spec.k, weight.device
    source = weight.perm if weight.perm is not None else torch.arange(k, dtype=torch.int32, device=device)
    if layout.regular:
        position: Tensor | slice = slice(layout.shift, layout.shift + k)
        total, picked = layout.shift + k, None
        if weight.perm is None:
            return position, None, None, -(-total // layout.chunk)
    else:
        unit = layout.unit
        group = weight.column_groups()
        used, member, count = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
        padded = (count + unit - 1) // unit * unit
        start = padded.cumsum(0) - padded
        within = torch.arange(k, device=device) - (count.cumsum(0) - count)[member]
        position, total = start[member] + within, int(padded.sum())
        picked = used.repeat_interleave(padded // unit)
    chunks = -(-total // layout.chunk)
    perm = torch.full((chunks * layout.chunk,), k, dtype=torch.int32, device=device)
    perm[position] = source
    if picked is not None:
        picked = torch.nn.functional.pad(picked, (0, chunks * layout.chunk // layout.unit - picked.numel()))
    return position, perm, picked, chunks


def _table(table: Tensor, row: Tensor, picked: Tensor | None) -> Tensor:
    """[row blocks, groups] to [groups, N]; 16- and 32-bit floats and zero points keep their dtype."""
    if table.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.uint8):
        table = table.float()
    if picked is not None:
        table = table.index_select(1, picked)
    return table.t().index_select(1, row).contiguous()


def _pack_codes(weight: QuantizedWeight, layout: Layout, position: Tensor | slice, chunks: int) -> tuple[Tensor, Tensor]:
    """Codes re-laid a run of rows at a time, and their high bits: see `pack`."""
    s, width, fields = weight.spec, layout.bits, 16 // layout.bits
    recoded = None if layout.code is s.weight else _recoded(s.weight, layout.code).to(weight.device)
    out = torch.empty(chunks, s.n, WORDS, dtype=torch.int32, device=weight.device)
    kind = torch.int16 if layout.high * fields == 8 else torch.uint8
    side = torch.empty(
        (chunks, s.n, WORDS) if layout.high else (0,), dtype=kind if layout.high else torch.float32, device=out.device
    )
    step = bitstream.rows_per_chunk(8 * s.k)
    for r in range(0, s.n, step):
        codes = bitstream.unpack(weight.codes[r : r + step], s.weight.bits, s.k)
        if recoded is not None:
            codes = recoded[codes.int()]
        if s.weight.signed:
            codes = codes ^ (1 << (layout.code.bits - 1))
        rows = codes.shape[0]
        placed = torch.zeros(rows, chunks * layout.chunk, dtype=torch.uint8, device=weight.device)
        placed[:, position] = codes
        parts = placed.view(rows, chunks, fields, WORDS, 2)
        words = torch.zeros(rows, chunks, WORDS, dtype=torch.int32, device=weight.device)
        above = torch.zeros_like(words)
        for f in range(fields):
            for half in (0, 1):
                part = parts[:, :, f, :, half].int()
                words |= (part & ((1 << width) - 1)) << (f * width + 16 * half)
                if layout.high:
                    above |= (part >> width) << (layout.high * (f + fields * half))
        out[:, r : r + rows] = words.transpose(0, 1)
        if layout.high:
            side[:, r : r + rows] = above.transpose(0, 1).to(kind)
    return out, side


def _entries(spec: LinearSpec) -> Tensor:
    """The table of a type: see `pack`."""
    values = torch.tensor(spec.weight.values() + (0.0,) * (ENTRIES - (1 << spec.weight.bits)))
    near = values.to(spec.act_dtype if spec.act_dtype.itemsize == 2 else torch.bfloat16)
    return torch.cat((near.view(torch.int16).view(1, ENTRIES), values.view(torch.int16).view(ENTRIES, 2).t()))


@functools.cache
def _recoded(narrow: ScalarType, wide: ScalarType) -> Tensor:
    """The code in `wide` of each of `narrow`'s values, uint8 [2**bits]; it has them all, zeros of both signs too."""
    sign = 1 << (wide.bits - 1)
    magnitude = {value: code for code, value in enumerate(wide.values()[:sign])}
    half = 1 << (narrow.bits - 1)
    plain = [magnitude[value] for value in narrow.values()[:half]]
    return torch.tensor(plain + [code | sign for code in plain], dtype=torch.uint8)


def exponent_bias(code: ScalarType) -> int:
    """What is subtracted from a minifloat's exponent field."""
    return code.bias or (1 << (code.exponent - 1)) - 1


def _fine(
    weight: QuantizedWeight, layout: Layout, row: Tensor, picked: Tensor | None, chunks: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(factor of each row float32 [1, N], fine scales).

    E4M3 scales stay as they are. E8M0 ones are counted from the largest of their row, which becomes 1 (or, under a float16
    input, as large as no weight overflows with), so that products in 16 bits are exact: what lies below their range is smaller
    than the row's largest scale by a factor of 2**126 (2**14 for E5M2 under float16, 2**21 for E4M3, 2**27 for E2M1).
    """
    s, half = weight.spec, weight.spec.act_dtype == torch.float16
    table = weight.scale.view(torch.uint8)
    factor = torch.ones(table.shape[0], 1, dtype=torch.float64, device=table.device)
    if layout.power:
        top = int(math.log2(65504 / layout.code.max())) if half else 0
        bad = table == 255  # E8M0's NaN
        largest = table.masked_fill(bad, 0).amax(1, keepdim=True).int()
        factor = torch.ldexp(factor, largest - 127 - top).masked_fill(bad.any(1, keepdim=True), math.nan)
        one = (15 if half else 127) + top
        table = (table.int() - largest + one).clamp_(min=0).masked_fill(bad, 0).to(torch.uint8)
    if weight.scale2 is not None and s.scale2_block is not None:
        coarse = (torch.arange(table.shape[0], device=table.device) * s.block[0] - s.block_offset[0]).clamp_(min=0)
        factor = factor * weight.scale2[:, :1].double().index_select(0, coarse // s.scale2_block[0])
    spans = chunks * layout.chunk // layout.fine
    if picked is not None:
        table = table.index_select(1, picked)
    table = torch.nn.functional.pad(table[:, :spans], (0, max(0, spans - table.shape[1])))
    fields, parts = layout.chunk // 32, 32 // layout.fine
    order = table.index_select(0, row).view(s.n, chunks, fields, parts).permute(1, 0, 3, 2).reshape(-1)
    words = order.view(torch.int32 if fields == 4 else torch.int16).view(chunks, s.n, parts)
    return factor.float().index_select(0, row).t().contiguous(), words


def _poisoned(scale: Tensor, weight: QuantizedWeight) -> Tensor:
    """Codes for NaN and infinity are decoded as numbers: a row that has one gets scales of NaN, so that its outputs are NaN."""
    t = weight.spec.weight
    infinite = torch.tensor([not math.isfinite(v) for v in t.values()], device=weight.device)
    if t.kind != "float" or t.bits < 8 or not bool(infinite.any()):
        return scale
    bad = torch.cat([infinite[part.int()].any(1) for part in weight.codes[:, : weight.spec.k].split(1024)])
    return scale.masked_fill(bad, math.nan) if bool(bad.any()) else scale
