"""The attacks build whole models with tests/tiny.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
