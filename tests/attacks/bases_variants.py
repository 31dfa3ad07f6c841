"""The valid checkpoints of corpus_variants.py as bases of the mutations and the matrix. Importing this file adds them."""

from __future__ import annotations

import json
from typing import Any

from bases import FAMILIES, LAYER, named
from corpus_variants import BASES


def made(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and config of one; torchao's description is in the file's metadata."""
    config, parts, described = BASES[name]()
    tensors: dict[str, Any] = named(parts)
    if described:
        kind = described.pop("_type")
        tensors["__metadata__"] = {f"{LAYER}.weight": json.dumps({"_type": kind, "_data": described})}
    return tensors, config


FAMILIES |= {f"variant_{name}": (lambda name=name: made(name)) for name in BASES}
