"""The packed weight of the native CPU kernels: where everything lies in it, and how a canonical weight is written into it.

One uint8 tensor holds a header (`Meta` in csrc/gemm.h), the codes in blocks of 32 rows, their scales and offsets beside the
header's offsets, and the table of what each code stands for. One layout serves decode, prefill and int8 inputs.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import memory, native
from bitline.types import ActSpec, LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

ROWS = 32  # of a block
STEP = {2: 16, 3: 32, 4: 8, 5: 32, 6: 16, 8: 4}  # columns that one group of code vectors holds
LONGEST = 512  # columns summed one after another; a longer group is cut into equal ones of the same scale
CHUNK = 32  # packed columns that share a scale where groups are ragged
MAGIC = 0x32304D4D45474C42
HEADER = 256
# csrc/gemm.h: enum Stream. A stream's kind: its number, the dtype it is stored in.
F32, BF16, F16, U8, I8, E4M3, ZERO = range(1, 8)
_STORED = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16, U8: torch.uint8, I8: torch.int8,
           E4M3: torch.float8_e4m3fn, ZERO: torch.int8}  # fmt: skip
_PLAIN = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float8_e8m0fnu: BF16, torch.float8_e4m3fn: BF16}
_FINE = {torch.uint8: U8, torch.int8: I8, torch.float8_e4m3fn: E4M3}
ACTS = {"int8": 1, "float8_e4m3fn": 3}  # csrc/gemm.h: enum Act


@dataclass(frozen=True)
class Layout:
    """The shape of a packed weight: `groups` runs of `run` columns, codes of `width` bits; streams as numbered above."""

    n: int
    width: int
    run: int
    groups: int
    mapped: bool
    scale: int
    offset: int
    ratio: int  # groups that share a coarse scale

    @property
    def kp(self) -> int:
        """Columns as packed."""
        return self.run * self.groups

    @property
    def rows(self) -> int:
        """Rows as packed."""
        return self.n + -self.n % ROWS

    def sections(self) -> dict[str, int]:
        """Bytes of each part, in their order."""
        cells = self.rows * self.groups
        coarse = self.rows * -(-self.groups // self.ratio) * 4
        return {
            "header": HEADER,
            "codes": self.rows * self.kp * self.width // 8,
            "scales": cells * _STORED[self.scale].itemsize,
            "offsets": cells * _STORED[self.offset].itemsize if self.offset else 0,
            "coarse_scales": coarse if self.scale in (U8, I8, E4M3) else 0,
            "coarse_offsets": coarse if self.offset in (U8, I8, E4M3) else 0,
            "map": 4 * self.kp if self.mapped else 0,
            "table16": 512,
            "table32": 4 << self.width,
        }

    def places(self) -> tuple[dict[str, int], int]:
        """Where each part begins, 0 for an absent one, and the size of all."""
        at, found = 0, {}
        for name, size in self.sections().items():
            found[name] = at if size else 0
            at += size + -size % 64
        return found, at


def _cuts(spec: LinearSpec) -> int:
    """Equal parts that each group is cut into."""
    return 1 if spec.ragged else -(-min(spec.block[1], spec.k) // LONGEST)


def layout(spec: LinearSpec, groups: int | None = None) -> Layout:
    """The layout of a spec. groups: how many chunks a ragged weight has, by default an estimate."""
    cuts = _cuts(spec)
    columns = CHUNK if spec.ragged else -(-min(spec.block[1], spec.k) // cuts)
    exact = {1: 2, 7: 8}.get(spec.weight.bits, spec.weight.bits)
    width = min((w for w in STEP if w >= exact), key=lambda w: (-(-columns // STEP[w]) * STEP[w] * w, w))
    run = -(-columns // STEP[width]) * STEP[width]
    count = spec.grid[1] * cuts if not spec.ragged else groups or spec.k // CHUNK + spec.grid[1]
    # Columns lie where they were unless groups need padding between them; padding after the last needs no map.
    whole = not spec.ragged and (spec.grid[1] == 1 or (run * cuts == spec.block[1] and spec.block_offset[1] == 0))
    ratio = _ratio(spec)
    fine = ratio > 0
    scale = _FINE.get(spec.scale_dtype, F32) if fine else F32 if spec.scale2_block else _PLAIN.get(spec.scale_dtype, F32)
    offset = {"none": 0, "int": ZERO, "float": scale if scale in (U8, I8) else _PLAIN.get(spec.scale_dtype, F32)}[spec.zero]
    return Layout(spec.n, width, run, count, spec.act_order or not whole, scale, offset, ratio or 1)


def _ratio(spec: LinearSpec) -> int:
    """Groups along K that share a coarse scale, where scales are kept in two levels; else 0."""
    coarse = spec.scale2_block
    if coarse is None or spec.scale_dtype not in _FINE or spec.ragged or spec.block_offset != (0, 0):
        return 0
    if coarse[1] >= spec.k:
        return spec.grid[1] * _cuts(spec)
    return coarse[1] // spec.block[1] * _cuts(spec) if coarse[1] % spec.block[1] == 0 else 0


def pack(weight: QuantizedWeight, invariant: bool = False) -> Tensor:
    """A weight as one uint8 tensor. invariant: results of a row must not depend on how many rows there are. The native core must
    be there.
    """
    spec = weight.spec
    core = native.core()
    assert core is not None, "is_supported refuses a machine without the native core"
    columns, picks = _columns(weight)
    plan = layout(spec, len(picks))
    places, size = plan.places()
    out = memory.empty(size, dtype=torch.uint8)
    part = lambda name, dtype: out[places[name] : places[name] + plan.sections()[name]].view(dtype)
    out[places["codes"] + plan.sections()["codes"] :] = 0  # gaps, and what tables do not fill
    if columns is not None:  # codes are taken by stored column, the input by its own
        own = columns if weight.perm is None else weight.perm[columns.clamp(min=0).long()].where(columns >= 0, -1)
        part("map", torch.int32).copy_(own)
    _streams(core, weight, plan, picks, part)
    values, halves, rounded = _tables(spec.weight, _center(spec), plan.width)
    part("table32", torch.float32).copy_(values)
    part("table16", torch.int16)[: len(halves)] = halves
    out[:HEADER] = torch.frombuffer(bytearray(_header(weight, plan, places, size, rounded, invariant)), dtype=torch.uint8)
    flip = 1 << (spec.weight.bits - 1) if spec.weight.signed else 0
    same = columns is None or torch.equal(columns[: spec.k], torch.arange(spec.k, dtype=torch.int32))  # and padding after them
    codes = weight.codes if weight.codes.stride(1) == 1 else weight.codes.contiguous()
    failed = core.gemm_pack_rows(
        codes.data_ptr(), codes.stride(0), spec.weight.bits, flip, None if columns is None or same else columns.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory to pack a weight in")
    return out


def _columns(weight: QuantizedWeight) -> tuple[Tensor | None, Tensor]:
    """int32 [kp], the stored column of each packed one, -1 for padding, or None where columns lie where they were; and int64
    [groups], the scale column of each group.
    """
    spec = weight.spec
    plan = layout(spec)
    if not plan.mapped:
        return None, torch.repeat_interleave(torch.arange(spec.grid[1]), _cuts(spec))
    group = weight.column_groups()
    if not spec.ragged:
        within = (torch.arange(spec.k) + spec.block_offset[1]) % spec.block[1]
        within[group == 0] -= spec.block_offset[1]
        slot = group * (plan.run * _cuts(spec)) + within
        picks = torch.repeat_interleave(torch.arange(spec.grid[1]), _cuts(spec))
    else:
        counts = torch.bincount(group, minlength=int(weight.scale.shape[1]))
        chunks = (counts + CHUNK - 1) // CHUNK
        first = torch.cumsum(chunks, 0) - chunks
        within = torch.arange(spec.k) - (torch.cumsum(counts, 0) - counts)[group]
        slot = (first[group] + within // CHUNK) * plan.run + within % CHUNK
        picks = torch.repeat_interleave(torch.arange(len(chunks)), chunks)
    columns = torch.full((len(picks) * plan.run,), -1, dtype=torch.int32)
    columns[slot] = torch.arange(spec.k, dtype=torch.int32)
    return columns, picks


def _streams(core: native.Core, weight: QuantizedWeight, plan: Layout, picks: Tensor, part) -> None:  # type: ignore[no-untyped-def]
    """Scales and offsets, coarse ones too, as [block][group][32]."""
    spec = weight.spec
    every = torch.arange(max(plan.groups, 1))

    def put(name: str, kind: int, grid: Tensor, each: int = spec.block[0], offset: int = spec.block_offset[0],
            pick: Tensor = picks) -> None:  # fmt: skip
        """grid: on the scale grid, rows for `each` rows of the weight; columns `pick` of it."""
        values, to = grid.to(_STORED[kind]).contiguous(), part(name, torch.uint8)
        core.gemm_pack_scales(
            values.data_ptr(), values.shape[1], values.itemsize, spec.n, each, offset, pick.data_ptr(), len(pick), plan.rows,
            to.data_ptr(),
        )  # fmt: skip

    def put_coarse(name: str, grid: Tensor) -> None:
        assert spec.scale2_block is not None
        put(name, F32, grid, spec.scale2_block[0], 0, every[: grid.shape[1]])

    fine = plan.scale in (U8, I8, E4M3)
    put("scales", plan.scale, weight.scale if fine or weight.scale2 is None else weight.scales())
    if fine:
        assert weight.scale2 is not None
        put_coarse("coarse_scales", weight.scale2)
    if plan.offset == ZERO:
        assert weight.zero is not None
        put("offsets", ZERO, (weight.zero - _center(spec)).view(torch.int8))  # modulo 256, as the difference is
    elif plan.offset in (U8, I8):
        assert weight.offset is not None and weight.scale2 is not None
        put("offsets", plan.offset, weight.offset)
        put_coarse("coarse_offsets", torch.ones(1, 1).expand(weight.scale2.shape) if weight.offset2 is None else weight.offset2)
    elif plan.offset:
        offsets = weight.offset if weight.offset2 is None else weight.offsets()
        assert offsets is not None
        put("offsets", plan.offset, offsets)


def _center(spec: LinearSpec) -> int:
    """What an integer code is counted from: its type's bias, or the middle where there are zero points."""
    kind = spec.weight
    if kind.signed or spec.zero == "int":
        return 1 << (kind.bits - 1)
    return kind.bias


@functools.cache
def _tables(kind: ScalarType, center: int, width: int) -> tuple[Tensor, Tensor, bool]:
    """What a packed code stands for, 0 where a type has no such code: float32 [2**width]; the bits of bfloat16 as decoders hold
    them, int16; and whether a value is rounded there.

    Decoders hold 32 entries, shorter tables repeated; 64; or for 256 codes all low bytes and then all high ones.
    """
    values = torch.zeros(1 << width)
    if kind.kind == "int":
        values[: 1 << kind.bits] = torch.arange(1 << kind.bits).float() - center
    else:
        values[: 1 << kind.bits] = torch.tensor(kind.values(), dtype=torch.float64).float()
    near = values.bfloat16()
    halves = near.view(torch.int16)
    if len(values) == 256:
        halves = halves.view(torch.uint8).view(256, 2).t().reshape(-1).view(torch.int16)
    else:
        halves = halves.repeat(max(1, 32 // len(values)))
    return values, halves, not torch.equal(near.float().nan_to_num(), values.nan_to_num())


def _header(weight: QuantizedWeight, plan: Layout, places: dict[str, int], size: int, rounded: bool, invariant: bool) -> bytes:
    spec = weight.spec
    act = spec.act if folds_act(spec.act) else None
    kind = reach = 0
    scale, zero, limit = 0.0, 0, math.inf
    if act is not None:
        kind = ACTS[act.dtype.name] + (not act.symmetric)
        reach = 2 if not act.dynamic else 1 if act.granularity == "tensor" else 0
        scale = float(weight.input_scale) if weight.input_scale is not None and not act.dynamic else 0.0
        zero = int(weight.input_zero) if weight.input_zero is not None and not act.symmetric and not act.dynamic else 0
        limit = act.limit or math.inf
    numbers = (
        MAGIC, size, spec.n, spec.k, plan.kp, plan.width, plan.groups, plan.run, int(spec.weight.kind == "int"), _center(spec),
        plan.scale, plan.offset, plan.ratio, *(places[name] for name in list(places)[1:]), kind, reach,
    )  # fmt: skip
    return struct.pack("<23qfifiq", *numbers, scale, zero, limit, int(rounded), int(invariant)).ljust(HEADER, b"\0")


@functools.cache
def folds_act(act: ActSpec | None) -> bool:
    """True where the kernel quantizes the input by itself: int8 and E4M3 with one scale for each row or for all."""
    if act is None:
        return True
    return act.dtype.name in ACTS and act.granularity != "group" and act.scale == "float" and (
        act.symmetric or act.dtype.kind == "int"
    )  # fmt: skip
