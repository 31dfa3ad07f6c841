"""Makes tests/tiny.py and the checkpoints of tests/attacks importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "attacks")]
