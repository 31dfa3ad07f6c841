"""Prints the tables of docs/measured/h200-w4a16.md and how many results meet which target, from the committed results.

python benchmarks/hopper_tables.py

The results are flat rows, or a report of `bitline bench --batch benchmarks/grids/h200_w4a16.batch --sustained`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _rows import rows_of

RESULTS = Path(__file__).parent / "results" / "h200_hopper.json"
BATCHES = (1, 8, 16, 24, 64, 96, 128, 256, 300, 512, 1000, 1024, 4096)
SCHEME_BATCHES = (1, 8, 16, 64, 256, 1024)
LAYERS = ((4096, 4096), (28672, 4096), (8192, 8192), (4096, 14336), (8192, 28672), (57344, 8192))
LINES = {
    "Bitline W4A16": "us", "humming W4": "humming", "cuBLAS bf16": "cuBLAS bf16", "Bitline, sustained": "sustained_us",
    "humming, sustained": "humming sustained", "cuBLAS, sustained": "cuBLAS bf16 sustained",
}  # fmt: skip


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 60 else f"{value:.0f}"


def shapes(rows: list[dict[str, Any]]) -> None:
    """A block of table rows per layer."""
    print("| | " + " | ".join(("M=" if m == 1 else "") + str(m) for m in BATCHES) + " |")
    print("|---" * (len(BATCHES) + 1) + "|")
    for n, k in LAYERS:
        found = {row["m"]: row for row in rows if (row["n"], row["k"]) == (n, k)}
        for label, key in {f"**{n}×{k}**: limit": "limit_us", **LINES}.items():
            print(f"| {label} | " + " | ".join(cell(found.get(m, {}).get(key)) for m in BATCHES) + " |")


def schemes(rows: list[dict[str, Any]], n: int, k: int) -> None:
    """A table row per scheme, humming's time in brackets where it was timed; † marks results of an earlier build."""
    print(f"\n| {n}×{k} | " + " | ".join(("M=" if m == 1 else "") + str(m) for m in SCHEME_BATCHES) + " |")
    print("|---" * (len(SCHEME_BATCHES) + 1) + "|")
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        found = {row["m"]: row for row in rows if (row["scheme"], row["n"], row["k"]) == (scheme, n, k)}
        if found:
            cells = []
            for row in (found[m] for m in SCHEME_BATCHES if m in found):
                cells.append(cell(row["us"]) + (f" ({cell(row['humming'])})" if row.get("humming") else ""))
            earlier = any("commit" in row for row in found.values())
            print(f"| {scheme}{' †' if earlier else ''} | " + " | ".join(cells) + " |")


def ratios(label: str, rows: Iterable[dict[str, Any]], ratio: Callable[[dict[str, Any]], float | None], target: float) -> None:
    """How many results are at or below the target, and the range of the ratio."""
    known = sorted((r, row["n"], row["k"], row["m"]) for row in rows if (r := ratio(row)) is not None)
    if known:
        met = sum(r <= target for r, *_ in known)
        low, high = known[0], known[-1]
        spread = f"{low[0]:.2f} to {high[0]:.2f} ({high[1]}x{high[2]}, M={high[3]})"
        print(f"{label}, at most {target}: {met} of {len(known)}, {spread}")


def over(*keys: str) -> Callable[[dict[str, Any]], float | None]:
    """Our time over the fastest of others."""

    def ratio(row: dict[str, Any]) -> float | None:
        mine = row["sustained_us"] if "sustained" in keys[0] else row["us"]
        least = min((row[key] for key in keys if key in row), default=None)
        return None if least is None else mine / least

    return ratio


def targets(rows: list[dict[str, Any]]) -> None:
    def of(low: int, high: int, least: float = 0, most: float = 1e9) -> list[dict[str, Any]]:
        return [row for row in rows if low <= row["m"] <= high and least <= row["n"] * row["k"] / 2e6 < most]

    ratios("M=1-8, >= 30 MB: limit", of(1, 8, 30), over("limit_us"), 1.10)
    ratios("M=1-8, < 30 MB: limit", of(1, 8, 0, 30), over("limit_us"), 1.25)
    ratios("M=1-8: humming", of(1, 8), over("humming"), 0.85)
    ratios("M=9-16, >= 30 MB: limit", of(9, 16, 30), over("limit_us"), 1.25)
    ratios("M=9-16, < 30 MB: limit", of(9, 16, 0, 30), over("limit_us"), 1.25)
    ratios("M=9-16: humming", of(9, 16), over("humming"), 0.85)
    ratios("M=17-64: humming", of(17, 64), over("humming"), 0.75)
    ratios("M=65-128: humming", of(65, 128), over("humming"), 0.90)
    ratios("M=1-128: cuBLAS", of(1, 128), over("cuBLAS bf16"), 1.0)
    ratios("M=256: the better", of(256, 256), over("humming", "cuBLAS bf16"), 0.90)
    ratios("M=300, 512: the better", of(300, 512), over("humming", "cuBLAS bf16"), 0.97)
    for target in (0.95, 1.0):
        ratios("M>=1000: cuBLAS, sustained", of(1000, 4096), over("cuBLAS bf16 sustained"), target)
    steps = []
    for n, k in {(row["n"], row["k"]) for row in rows}:
        line = sorted((row["m"], row["us"]) for row in rows if (row["n"], row["k"]) == (n, k))
        for (_, a), (then, b) in itertools.pairwise(line):
            if then <= 128:
                steps.append({"n": n, "k": k, "m": then, "us": b, "before": a})
    ratios("a step of M up to 128", steps, over("before"), 1.3)


def main() -> None:
    rows = rows_of(RESULTS, {"GluonHopperLinearKernel": "us", "HummingLinearKernel": "humming"})
    plain = [row for row in rows if row["scheme"] == "W4A16 g128"]
    shapes(plain)
    schemes(rows, 28672, 4096)
    schemes(rows, 4096, 4096)
    print()
    targets(plain)


if __name__ == "__main__":
    main()
