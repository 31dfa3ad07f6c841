"""The matrix of attacks for GGUF: every kind of invalid value for a matrix of every ggml type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bases_gguf
from bases import TYPE_F32, entry, gguf_bytes
from matrix import Case
from oracle_gguf import NUMBERS
from outcomes import replace_file

_N, _K = bases_gguf.N, bases_gguf.K
_W = f"{bases_gguf.NAME}.weight"


def attacks(kind: str) -> Iterator[Case]:
    """Attacks on a matrix of one ggml type."""
    data, number = bases_gguf.rows(kind), NUMBERS[kind]
    padded = data + bytes(-len(data) % 32)
    second = entry("b", [_K, _N], number, len(padded))

    def case(name: str, entries: list[bytes], content: bytes = data, refused: bool = True) -> Case:
        def build(folder: Path) -> Path:
            replace_file(folder / "model.gguf", gguf_bytes(bases_gguf.PAIRS, entries, content))
            return folder / "model.gguf"

        return Case(f"gguf-{kind}/{name}", build, refused)

    yield case("valid", [entry(_W, [_K, _N], number, 0)], refused=False)
    for what, dims in {
        "columns-0": [0, _N], "rows-0": [_K, 0], "columns-2^40": [1 << 40, _N], "rows-2^40": [_K, 1 << 40], "2^62": [1 << 62, 4],
        "2^63": [1 << 63, 2], "wraps": [1 << 32, 1 << 32], "none": [], "half-a-block": [_K - 1, _N],
        "rows-one-more": [_K, _N + 1], "vector": [_K], "stack": [_K, 2, 3], "deep": [_K, 1, 1, 6],
    }.items():  # fmt: skip
        yield case(f"dims-{what}", [entry(_W, dims, number, 0)], refused=what not in ("vector", "stack", "deep"))
    for other in (*range(43), 99, 1 << 31):
        if other != number:
            yield case(f"type-{other}", [entry(_W, [_K, _N], other, 0)], refused=False)
    for what, offset in {"misaligned": 8, "2^40": 1 << 40, "2^63": 1 << 63, "2^64-32": (1 << 64) - 32, "one-block": 32}.items():
        yield case(f"offset-{what}", [entry(_W, [_K, _N], number, offset)])
    yield case("overlap", [entry(_W, [_K, _N], number, 0), entry("b", [_K, _N], number, 32)], padded * 2)
    yield case("same-bytes", [entry(_W, [_K, _N], number, 0), entry("b", [_K, _N], number, 0)], padded * 2)
    yield case("name-twice", [entry(_W, [_K, _N], number, 0), entry(_W, [_K, _N], number, len(padded))], padded * 2)
    yield case("two", [entry(_W, [_K, _N], number, 0), second], padded * 2, refused=False)
    for cut in (1, 2, len(data) // 2, len(data)):
        yield case(f"cut-by-{cut}", [entry(_W, [_K, _N], number, 0)], data[:-cut])
    for byte in (0x00, 0x7F, 0x80, 0xFF, 0x7C):
        yield case(f"bytes-{byte:02x}", [entry(_W, [_K, _N], number, 0)], bytes([byte]) * len(data), refused=False)
    for what, dims, type_ in (("long", [_N + 1], TYPE_F32), ("matrix", [1, _N], TYPE_F32), ("integers", [_N], 26)):
        bias = entry(f"{bases_gguf.NAME}.bias", dims, type_, len(padded))
        yield case(f"bias-{what}", [entry(_W, [_K, _N], number, 0), bias], padded + bytes(64))
