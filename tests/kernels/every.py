"""Compilation of some variants instead of all."""

import itertools
from types import SimpleNamespace


def every(step, compile):
    """`compile` at every `step`-th call; at the others an empty namespace instead of a kernel."""
    calls = itertools.count()
    return lambda *args: SimpleNamespace() if next(calls) % step else compile(*args)
