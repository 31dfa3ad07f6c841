"""Makes the other folders' makers of models importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("", "hf", "moe", "formats", "parallel")]
