"""Regular expressions out of a config, matched against module names in bounded time.

Python's `re` backtracks: `(a+)+$` takes hours on a name of sixty characters. A pattern that could backtrack exponentially is
not given to `re` but simulated as an NFA: a set of positions in the name, held as the bits of an integer, is advanced
through the parsed pattern in about (nodes of the pattern) x (length of the name) steps. Both ways answer the same question,
whether the name matches.
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
_BACKTRACKING_STEPS = 100_000  # of `re` for one name: a millisecond
_SIMULATION_STEPS = 2_000_000  # of the NFA for all patterns and names of a config: a few seconds
_SECONDS = 30.0  # for all patterns and names of a config; those of real models take milliseconds

_SINGLE_CHARACTER = {op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN}
_REPEATS = {op.MAX_REPEAT, op.MIN_REPEAT}


class PatternError(ValueError):
    """Not a regular expression, one with a feature that no module name needs (back-references, …), or one too expensive."""


@dataclass
class MatchBudget:
    """What the patterns of one config have cost so far. file, field: where they come from, for errors."""

    file: Path | None = None
    field: str | None = None
    patterns: int = 0
    steps: int = 0
    seconds: float = 0.0


class Pattern:
    """A regular expression for module names; `match` and `search` say whether it matches, as re.match and re.search do.

    budget: shared by the patterns of one config, so that many bad ones cost no more than one. A name that exceeds it is a
    CheckpointError where the budget has a file, else a PatternError.
    """

    def __init__(self, text: str, budget: MatchBudget | None = None) -> None:
        self.budget = budget or MatchBudget()
        self.budget.patterns += 1
        if self.budget.patterns > MAX_PATTERNS:
            raise PatternError(f"more than {MAX_PATTERNS} patterns")
        if len(text) > MAX_LENGTH:
            raise PatternError(f"{len(text)} characters, more than {MAX_LENGTH}")
        try:
            self._compiled = re.compile(text)
            self._tree = _parser.parse(text)
        except (re.error, OverflowError, RecursionError, MemoryError) as error:
            raise PatternError(str(error) or type(error).__name__) from error
        self.text, self._cost = text, _backtracking_cost(self._tree)

    def match(self, name: str) -> bool:
        """True where the pattern matches at the start of the name."""
        return self._timed(self._compiled.match, name, searching=False)

    def search(self, name: str) -> bool:
        """True where the pattern matches anywhere in the name."""
        return self._timed(self._compiled.search, name, searching=True)

    def _timed(self, backtracking: Callable[[str], object], name: str, *, searching: bool) -> bool:
        begin = time.perf_counter()
        try:
            if self.budget.seconds > _SECONDS:
                raise PatternError(f"matching {self.budget.patterns} patterns takes too long")
            if self._is_cheap(name, searching):
                return backtracking(name) is not None
            starts = (2 << len(name)) - 1 if searching else 1
            return _Simulation(self, name).advance(self._tree, starts) != 0
        except PatternError as error:
            if self.budget.file is None:
                raise
            what = "the config's patterns cannot be matched"
            raise CheckpointError(what, file=self.budget.file, field=self.budget.field, found=error) from error
        finally:
            self.budget.seconds += time.perf_counter() - begin

    def _is_cheap(self, name: str, searching: bool) -> bool:
        """Whether `re` is certain to finish within its step limit."""
        if self._cost is None:
            return False
        factor, exponent = self._cost
        return factor * (len(name) + 1) ** (exponent + searching) <= _BACKTRACKING_STEPS


def _backtracking_cost(tree: Any) -> tuple[int, int] | None:
    """(a, b) where `re` takes at most about a * n**b steps on n characters; None where it could be more."""
    factor, exponent = 1, 0
    for kind, value in tree:
        branches: Iterable[Any] = ()
        if kind in _REPEATS:
            low, high, body = value
            inner = _backtracking_cost(body)
            if inner is None or (high > 1 and (inner != (1, 0) or body.getwidth()[0] == 0)):
                return None  # an alternative, or an empty match, within a repetition: exponential
            factor, exponent = factor * inner[0], exponent + inner[1] + (low != high)
        elif kind is op.SUBPATTERN:
            branches = (value[3],)
        elif kind is op.BRANCH:
            branches, factor = value[1], factor * len(value[1])
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            branches = (value[1],)
        elif kind not in _SINGLE_CHARACTER and kind is not op.AT:
            return None
        for branch in branches:
            inner = _backtracking_cost(branch)
            if inner is None:
                return None
            factor, exponent = factor * inner[0], exponent + inner[1]
        if factor > _BACKTRACKING_STEPS:
            return None
    return factor, exponent


class _Simulation:
    """NFA simulation on one name. A set of positions 0..len(name) is an integer: bit i stands for position i."""

    def __init__(self, pattern: Pattern, name: str) -> None:
        self.name, self.text, self.budget = name, pattern.text, pattern.budget
        self.flags = pattern._compiled.flags
        self.all = (2 << len(name)) - 1
        self.cache: dict[Any, int] = {}

    def advance(self, tree: Any, positions: int) -> int:
        """The positions where a match of `tree` can end that starts at one of `positions`."""
        for kind, value in tree:
            if not positions:
                break
            self.budget.steps += 1
            if self.budget.steps > _SIMULATION_STEPS:
                raise PatternError(f"matching {self.text[:100]!r} takes too long")
            positions = self._node(kind, value, positions)
        return positions

    def _node(self, kind: Any, value: Any, positions: int) -> int:
        if kind in _SINGLE_CHARACTER:
            return (positions & self._accepting(kind, value)) << 1
        if kind is op.SUBPATTERN:
            if value[1] or value[2]:
                raise PatternError("flags for a part of a pattern are not supported")
            return self.advance(value[3], positions)
        if kind is op.BRANCH:
            found = 0
            for branch in value[1]:
                found |= self.advance(branch, positions)
            return found
        if kind in _REPEATS:
            low, high, body = value
            return self._repeat(low, high, body, positions)
        if kind is op.AT:
            return positions & self._anchors(value)
        if kind in (op.ASSERT, op.ASSERT_NOT):
            direction, body = value
            return self._filter(positions, lambda i: self._assertion(direction, body, i) == (kind is op.ASSERT))
        raise PatternError(f"{str(kind).lower()} is not supported in patterns for names")

    def _repeat(self, low: int, high: Any, body: Any, positions: int) -> int:
        # Positions only advance, so nothing new is reached after as many rounds as there are positions.
        for _ in range(min(low, len(self.name) + 2)):
            before, positions = positions, self.advance(body, positions)
            if positions in (0, before):
                break
        reached = fresh = positions
        for _ in range(min(int(high) - low, len(self.name) + 2)):
            fresh = self.advance(body, fresh) & ~reached
            if not fresh:
                break
            reached |= fresh
        return reached

    def _assertion(self, direction: int, body: Any, position: int) -> bool:
        """Whether a look-ahead (direction > 0) or look-behind holds at a position."""
        if direction > 0:
            return self.advance(body, 1 << position) != 0
        width = body.getwidth()[0]  # `re` refuses look-behind of variable width
        return width <= position and bool(self.advance(body, 1 << (position - width)) >> position & 1)

    def _filter(self, positions: int, holds: Callable[[int], bool]) -> int:
        return sum(1 << i for i in range(len(self.name) + 1) if positions >> i & 1 and holds(i))

    def _accepting(self, kind: Any, value: Any) -> int:
        """The positions whose character this node accepts."""
        if kind is op.ANY:
            return self.all >> 1
        key = (kind, id(value) if kind is op.IN else value)  # the tree outlives this object
        if key not in self.cache:
            accepted = {c for c in set(self.name) if self._accepts(kind, value, c)}
            self.cache[key] = sum(1 << i for i, c in enumerate(self.name) if c in accepted)
        return self.cache[key]

    def _accepts(self, kind: Any, value: Any, c: str) -> bool:
        forms = {c, c.lower(), c.upper()} if self.flags & re.IGNORECASE else {c}
        if kind is op.LITERAL:
            return any(ord(form) == value for form in forms if len(form) == 1)
        if kind is op.NOT_LITERAL:
            return not self._accepts(op.LITERAL, value, c)
        inside = any(self._in_set(value, form) for form in forms if len(form) == 1)
        return inside != (value[0][0] is op.NEGATE)

    def _in_set(self, members: Any, c: str) -> bool:
        for kind, value in members:
            if kind is op.LITERAL and ord(c) == value:
                return True
            if kind is op.RANGE and value[0] <= ord(c) <= value[1]:
                return True
            if kind is op.CATEGORY and re.match(_CATEGORIES[value], c, self.flags & re.ASCII):
                return True
        return False

    def _anchors(self, anchor: Any) -> int:
        """The positions where an anchor holds. Names have no line breaks, so all ends are the end of the name."""
        name, last = self.name, len(self.name)
        if anchor in (op.AT_BEGINNING, op.AT_BEGINNING_STRING, op.AT_BEGINNING_LINE):
            return 1
        if anchor in (op.AT_END, op.AT_END_STRING, op.AT_END_LINE):
            return 1 << last
        word = [False, *(re.match(r"\w", c, self.flags & re.ASCII) is not None for c in name), False]
        boundaries = sum(1 << i for i in range(last + 1) if word[i] != word[i + 1])
        if anchor in (op.AT_BOUNDARY, op.AT_UNI_BOUNDARY):
            return boundaries
        if anchor in (op.AT_NON_BOUNDARY, op.AT_UNI_NON_BOUNDARY):
            return self.all & ~boundaries
        raise PatternError(f"{str(anchor).lower()} is not supported in patterns for names")


_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d", op.CATEGORY_NOT_DIGIT: r"\D", op.CATEGORY_SPACE: r"\s", op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w", op.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
