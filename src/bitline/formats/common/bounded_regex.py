"""Regular expressions out of a config, matched against module names in bounded time.

Python's `re` backtracks: `(a+)+$` takes hours on a name of sixty characters. So an expression that could is not given
to `re`; it is matched here by moving a set of positions through it, which takes about as many steps as the expression
has parts times the name's length. Whether a name matches, which is all that is asked, is the same either way.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from bitline.errors import CheckpointError

MAX_LENGTH = 20_000
MAX_PATTERNS = 10_000
_FAST_STEPS = 100_000  # what `re` may take for one name: a millisecond
_SLOW_STEPS = 2_000_000  # what moving sets may take for all patterns of a config and all names: a few seconds
_SECONDS = 30.0  # what all of it may take; the patterns and names of real models take milliseconds

_SINGLE = {op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN}
_REPEATS = {op.MAX_REPEAT, op.MIN_REPEAT}


class PatternError(ValueError):
    """What is asked of an expression that is none, or one that no module name needs: back-references, atomic groups."""


@dataclass
class MatchBudget:
    """What the patterns of one config have cost so far. file, field: where they are, for errors."""

    file: Path | None = None
    field: str | None = None
    patterns: int = 0
    steps: int = 0
    seconds: float = 0.0


class Pattern:
    """A regular expression for module names. `match` and `search` say whether it fits, as re.match and re.search do.

    effort: shared by the patterns of one config, so that many bad ones are not worse than one. One that no name can be
    matched against soon is a CheckpointError where the effort has a file, else a PatternError.
    """

    def __init__(self, text: str, effort: MatchBudget | None = None) -> None:
        self.effort = effort or MatchBudget()
        self.effort.patterns += 1
        if self.effort.patterns > MAX_PATTERNS:
            raise PatternError(f"more than {MAX_PATTERNS} patterns")
        if len(text) > MAX_LENGTH:
            raise PatternError(f"{len(text)} characters, more than {MAX_LENGTH}")
        try:
            self._compiled = re.compile(text)
            self._tree = _parser.parse(text)
        except (re.error, OverflowError, RecursionError, MemoryError) as error:
            raise PatternError(str(error) or type(error).__name__) from error
        self.text, self._cost = text, _cost(self._tree)

    def match(self, name: str) -> bool:
        """True where the name fits from its start."""
        return self._timed(self._compiled.match, name, 0)

    def search(self, name: str) -> bool:
        """True where any part of the name fits."""
        return self._timed(self._compiled.search, name, 1)

    def _timed(self, quick: Callable[[str], object], name: str, starts: int) -> bool:
        begin = time.perf_counter()
        try:
            if self.effort.seconds > _SECONDS:
                raise PatternError(f"matching {self.effort.patterns} patterns takes too long")
            if self._quick(name, starts):
                return quick(name) is not None
            return _Sets(self, name).move(self._tree, (2 << len(name)) - 1 if starts else 1) != 0
        except PatternError as error:
            if self.effort.file is None:
                raise
            what = "the config's patterns cannot be matched"
            raise CheckpointError(what, file=self.effort.file, field=self.effort.field, found=error) from error
        finally:
            self.effort.seconds += time.perf_counter() - begin

    def _quick(self, name: str, starts: int) -> bool:
        """Whether `re` is certain to be done soon."""
        if self._cost is None:
            return False
        ways, loops = self._cost
        return ways * (len(name) + 1) ** (loops + starts) <= _FAST_STEPS


def _cost(tree: Any) -> tuple[int, int] | None:
    """(a, b) where matching n characters takes `re` at most about a * n**b steps; None where it could be more."""
    ways, loops = 1, 0
    for kind, value in tree:
        parts: Iterable[Any] = ()
        if kind in _REPEATS:
            low, high, body = value
            inner = _cost(body)
            if inner is None or (high > 1 and (inner != (1, 0) or body.getwidth()[0] == 0)):
                return None  # a choice, or nothing at all, within a repetition: this is where the powers come from
            ways, loops = ways * inner[0], loops + inner[1] + (low != high)
        elif kind is op.SUBPATTERN:
            parts = (value[3],)
        elif kind is op.BRANCH:
            parts, ways = value[1], ways * len(value[1])
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            parts = (value[1],)
        elif kind not in _SINGLE and kind is not op.AT:
            return None
        for part in parts:
            inner = _cost(part)
            if inner is None:
                return None
            ways, loops = ways * inner[0], loops + inner[1]
        if ways > _FAST_STEPS:
            return None
    return ways, loops


class _Sets:
    """One name, and sets of positions in it as the bits of an integer."""

    def __init__(self, pattern: Pattern, name: str) -> None:
        self.name, self.text, self.effort = name, pattern.text, pattern.effort
        self.flags = pattern._compiled.flags
        self.all = (2 << len(name)) - 1
        self.known: dict[Any, int] = {}

    def move(self, tree: Any, at: int) -> int:
        """Where a match of `tree` can end that starts at one of the positions `at`."""
        for kind, value in tree:
            if not at:
                break
            self.effort.steps += 1
            if self.effort.steps > _SLOW_STEPS:
                raise PatternError(f"matching {self.text[:100]!r} takes too long")
            at = self._one(kind, value, at)
        return at

    def _one(self, kind: Any, value: Any, at: int) -> int:
        if kind in _SINGLE:
            return (at & self._places(kind, value)) << 1
        if kind is op.SUBPATTERN:
            self._same_flags(value[1], value[2])
            return self.move(value[3], at)
        if kind is op.BRANCH:
            found = 0
            for part in value[1]:
                found |= self.move(part, at)
            return found
        if kind in _REPEATS:
            low, high, body = value
            return self._repeat(low, high, body, at)
        if kind is op.AT:
            return at & self._edges(value)
        if kind in (op.ASSERT, op.ASSERT_NOT):
            direction, body = value
            return self._where(at, lambda i: self._looks(direction, body, i) == (kind is op.ASSERT))
        raise PatternError(f"{str(kind).lower()} is not supported in patterns for names")

    def _repeat(self, low: int, high: Any, body: Any, at: int) -> int:
        # A position never goes back, so after as many rounds as there are positions nothing new can come.
        for _ in range(min(low, len(self.name) + 2)):
            before, at = at, self.move(body, at)
            if at in (0, before):
                break
        reached = fresh = at
        for _ in range(min(int(high) - low, len(self.name) + 2)):
            fresh = self.move(body, fresh) & ~reached
            if not fresh:
                break
            reached |= fresh
        return reached

    def _looks(self, direction: int, body: Any, at: int) -> bool:
        if direction > 0:
            return self.move(body, 1 << at) != 0
        width = body.getwidth()[0]  # `re` has refused what has no one width
        return width <= at and bool(self.move(body, 1 << (at - width)) >> at & 1)

    def _where(self, at: int, holds: Callable[[int], bool]) -> int:
        return sum(1 << i for i in range(len(self.name) + 1) if at >> i & 1 and holds(i))

    def _same_flags(self, add: int, remove: int) -> None:
        if add or remove:
            raise PatternError("flags for a part of a pattern are not supported")

    def _places(self, kind: Any, value: Any) -> int:
        """The positions whose character this part takes."""
        if kind is op.ANY:
            return self.all >> 1
        key = (kind, id(value) if kind is op.IN else value)  # the tree outlives this object
        if key not in self.known:
            taken = {c for c in set(self.name) if self._takes(kind, value, c)}
            self.known[key] = sum(1 << i for i, c in enumerate(self.name) if c in taken)
        return self.known[key]

    def _takes(self, kind: Any, value: Any, c: str) -> bool:
        forms = {c, c.lower(), c.upper()} if self.flags & re.IGNORECASE else {c}
        if kind is op.LITERAL:
            return any(ord(form) == value for form in forms if len(form) == 1)
        if kind is op.NOT_LITERAL:
            return not self._takes(op.LITERAL, value, c)
        inside = any(self._member(value, form) for form in forms if len(form) == 1)
        return inside != (value[0][0] is op.NEGATE)

    def _edges(self, where: Any) -> int:
        """The positions where an anchor holds. Names have no line ends, so every kind of end is the one end."""
        name, last = self.name, len(self.name)
        if where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING, op.AT_BEGINNING_LINE):
            return 1
        if where in (op.AT_END, op.AT_END_STRING, op.AT_END_LINE):
            return 1 << last
        word = [False, *(re.match(r"\w", c, self.flags & re.ASCII) is not None for c in name), False]
        turns = sum(1 << i for i in range(last + 1) if word[i] != word[i + 1])
        if where in (op.AT_BOUNDARY, op.AT_UNI_BOUNDARY):
            return turns
        if where in (op.AT_NON_BOUNDARY, op.AT_UNI_NON_BOUNDARY):
            return self.all & ~turns
        raise PatternError(f"{str(where).lower()} is not supported in patterns for names")

    def _member(self, members: Any, c: str) -> bool:
        for kind, value in members:
            if kind is op.LITERAL and ord(c) == value:
                return True
            if kind is op.RANGE and value[0] <= ord(c) <= value[1]:
                return True
            if kind is op.CATEGORY and re.match(_CATEGORIES[value], c, self.flags & re.ASCII):
                return True
        return False


_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d", op.CATEGORY_NOT_DIGIT: r"\D", op.CATEGORY_SPACE: r"\s", op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w", op.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
