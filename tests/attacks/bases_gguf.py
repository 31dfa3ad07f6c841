"""A valid GGUF file of every supported type: random blocks, redrawn where a value is not finite."""

from __future__ import annotations

import functools

import numpy as np
from bases import TYPE_F32, entry, gguf_bytes, pair
from oracle_gguf import NUMBERS, dequantize
from oracle_gguf import TYPES as KNOWN

from bitline.formats.gguf.blocks import BLOCKS

N, K = 6, 256
NAME = "blk.0.ffn_up"
PAIRS = [pair("general.architecture", 8, "llama"), pair("general.name", 8, "a"), pair("numbers", 9, (4, [1, 2, 3]))]
TYPES = tuple(BLOCKS)


def rows(kind: str, n: int = N, k: int = K, seed: int = 0) -> bytes:
    """n rows of k weights whose values are all finite."""
    _, block, size = KNOWN[NUMBERS[kind]]
    rng = np.random.default_rng(seed)
    out = rng.integers(0, 256, (n * k // block, size), dtype=np.uint8)
    while len(bad := np.flatnonzero(~np.isfinite(dequantize(out, kind)).all(1))):
        out[bad] = rng.integers(0, 256, (len(bad), size), dtype=np.uint8)
    return out.tobytes()


@functools.cache
def file(kind: str) -> tuple[bytes, int]:
    """A file with a matrix of this type and its bias, and where its data begins."""
    data = rows(kind)
    data += bytes(-len(data) % 32)
    bias = np.linspace(-1, 1, N, dtype=np.float32).tobytes()
    entries = [
        entry(f"{NAME}.weight", [K, N], NUMBERS[kind], 0),
        entry(f"{NAME}.bias", [N], TYPE_F32, len(data)),
    ]
    raw = gguf_bytes(PAIRS, entries, data + bias)
    return raw, len(raw) - len(data + bias)
