"""The numbers of docs/formats.md's contract."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "formats.md"


def must(*numbers: int) -> pytest.MarkDecorator:
    """Mark a test of these sentences of the contract."""
    return pytest.mark.must(*numbers)


def sentences() -> dict[int, str]:
    """The sentences of the section "The contract" by number."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("\n## The contract\n")[2].partition("\n## ")[0]
    found = re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", section, flags=re.MULTILINE)
    return {int(number): " ".join(text.split()) for number, text in found}
