"""Where weights are cut over ranks: pure functions of sizes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from bitline.errors import InputError


@dataclass(frozen=True)
class Cut:
    """A rank's part of a matrix [N, K].

    Attributes:
        dim: 0 for rows (column parallel), 1 for columns (row parallel).
        ranges: [start, stop) of the rank's rows or columns, one after the other.
        size: N or K of the whole matrix.
        parts: Rows or columns of each rank.
    """

    dim: Literal[0, 1]
    ranges: tuple[tuple[int, int], ...]
    size: int
    parts: tuple[int, ...]

    def splits_groups(self, group_size: int) -> bool:
        """Whether a boundary between ranks is inside a group of columns."""
        return any(at % group_size for at in itertools.accumulate(self.parts[:-1]))


@dataclass(frozen=True)
class HeadCut:
    """A rank's attention heads.

    Attributes:
        query: [start, stop) of the query heads.
        kv: [start, stop) of the key-value heads; where there are more ranks than of these, ranks share one.
        group: Query heads of the rank that share one of its key-value heads.
    """

    query: tuple[int, int]
    kv: tuple[int, int]
    group: int


@dataclass(frozen=True)
class ExpertRange:
    """A rank's experts under expert parallelism.

    Attributes:
        start, stop: [start, stop) of the experts' numbers.
        total: Experts of the module on all ranks.
        step: Between numbers: 1, but where an engine deals its experts out in turn.
    """

    start: int
    stop: int
    total: int
    step: int = 1

    def __len__(self) -> int:
        return len(self.numbers())

    def numbers(self) -> range:
        """The experts' numbers."""
        return range(self.start, self.stop, self.step)


def boundaries(size: int, world: int, align: int = 1) -> list[int]:
    """0..size in `world` parts: multiples of `align` where that leaves every rank one, else anywhere.

    Raises:
        InputError: For more ranks than units.
    """
    if size < world:
        raise InputError("more ranks than there is to cut", found=f"{world} ranks", expected=f"at most {size}")
    units = size // align
    if units < world:
        align, units = 1, size
    return [units * rank // world * align for rank in range(world)] + [size]


def expert_range(total: int, rank: int, world: int) -> ExpertRange:
    """A rank's whole experts: consecutive ones, at most one more than another rank has.

    Raises:
        InputError: For more ranks than experts.
    """
    if total < world:
        raise InputError("more ranks than experts", found=f"{world} ranks", expected=f"at most {total}, the experts of a layer",
                         fix="without expert parallelism each expert's channels are cut")  # fmt: skip
    at = boundaries(total, world)
    return ExpertRange(at[rank], at[rank + 1], total)


def head_cut(num_heads: int, num_kv_heads: int, rank: int, world: int) -> HeadCut:
    """A rank's heads: whole key-value heads with their query heads, or a part of one key-value head's query heads.

    Raises:
        InputError: For more ranks than query heads, or query heads that key-value heads do not divide.
    """
    if num_heads % num_kv_heads or world > num_heads:
        found = f"{num_heads} heads, {num_kv_heads} key-value heads, {world} ranks"
        raise InputError("attention heads cannot be cut", found=found,
                         expected="a multiple of the key-value heads, and at most one rank a head")  # fmt: skip
    group = num_heads // num_kv_heads
    if num_kv_heads >= world:
        at = boundaries(num_kv_heads, world)
        return HeadCut((at[rank] * group, at[rank + 1] * group), (at[rank], at[rank + 1]), group)
    head = rank * num_kv_heads // world
    sharing = [r for r in range(world) if r * num_kv_heads // world == head]
    at = boundaries(group, len(sharing))
    i = rank - sharing[0]
    return HeadCut((head * group + at[i], head * group + at[i + 1]), (head, head + 1), at[i + 1] - at[i])
