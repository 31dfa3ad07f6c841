"""Makes tests/tiny.py, tests/command.py and the block writers of tests/formats importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "formats")]
