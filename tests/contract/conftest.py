"""The contract is tested on the valid checkpoints of tests/attacks."""

import sys
from pathlib import Path

for folder in ("attacks", ""):
    sys.path.append(str(Path(__file__).parents[1] / folder))
