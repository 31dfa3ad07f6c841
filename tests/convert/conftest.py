"""Conversions start from the attacks' checkpoints and from tests/tiny.py's models too."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "attacks")]
