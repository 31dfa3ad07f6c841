"""Write the named attacks as checkpoints, each into a folder of its own name: `python write_corpus.py FOLDER [PATTERN]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import bases_gguf
import matrix
import matrix_gguf
from bases import FAMILIES
from corpus import ATTACKS


def main(folder: Path, pattern: str = "") -> None:
    """Those whose names match the pattern."""
    named = {attack.name: attack.build for attack in ATTACKS}
    named |= {case.name: case.build for base in FAMILIES for case in matrix.attacks(base)}
    named |= {case.name: case.build for kind in bases_gguf.TYPES for case in matrix_gguf.attacks(kind)}
    for name, build in named.items():
        if re.search(pattern, name):
            target = folder / name
            target.mkdir(parents=True)
            build(target)
            print(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
