"""Which of many parameters `make test` runs; `make test-all` runs all of them. See docs/testing.md."""

import pytest


def thinned(values, step, *, always=()):
    """Parameters of which every `step`-th, and those of `always`, run in `make test`. The others are marked exhaustive."""
    return [
        value if i % step == 0 or value in always else pytest.param(value, marks=pytest.mark.exhaustive)
        for i, value in enumerate(values)
    ]
