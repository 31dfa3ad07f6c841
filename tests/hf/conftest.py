"""Makes the builders of small models importable; transformers' doors are open during each test of this folder."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "moe"), str(TESTS / "formats"), str(Path(__file__).parent)]


@pytest.fixture(autouse=True)
def installed():
    import bitline.hf

    bitline.hf.install()
    yield
    bitline.hf.uninstall()
