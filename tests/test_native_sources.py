"""What the native core's sources may use."""

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "csrc"
SOURCES = sorted(path for path in CORE.rglob("*") if path.suffix in (".h", ".cpp"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.relative_to(CORE).as_posix())
def test_only_c_headers_are_included(source):
    """Wheels link no C++ library, whose version would have to be there: its headers, without `.h`, are not found for them."""
    included = re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)", source.read_text(), re.MULTILINE)
    assert [header for header in included if not header.endswith(".h")] == []
