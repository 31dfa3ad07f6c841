"""Fixtures of more than one test file."""

import pytest

from bitline import native


@pytest.fixture(params=native.isas() or native.LEVELS[:1])
def level(request):
    """The native core at every vector level that this machine has, one after the other."""
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)
