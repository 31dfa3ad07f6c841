"""Which of many parameters `make test` runs; `make test-all` runs all of them. See docs/testing.md."""

import pytest


def thinned(values, step, start=0):
    """Parameters of which every `step`-th, from `start` on, runs in `make test`. The others are marked exhaustive."""
    return [value if i % step == start else pytest.param(value, marks=pytest.mark.exhaustive) for i, value in enumerate(values)]
