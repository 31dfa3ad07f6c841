"""Prints the tables of docs/measured/h200-quantized-activations.md from the committed results.

python benchmarks/scaled_tables.py

The results are flat rows, or a report of `bitline bench --batch benchmarks/grids/h200_activations.batch`.
"""

from __future__ import annotations

import json
from pathlib import Path

from _rows import rows_of

RESULTS = Path(__file__).parent / "results"
SCHEMES = {"FP8_DYNAMIC": "FP8 per token", "FP8_BLOCK": "FP8 in blocks", "W8A8": "W8A8"}
COLUMNS = {"GluonHopperScaledMMLinearKernel": "us"} | {
    f"torch {kind} product": "torch product" for kind in ("row-wise", "block", "int8")
}
LINES = {
    "us": "",
    "sustained_us": ", sustained",
    "torch product": ": torch, product",
    "torch product sustained": ": torch, sustained",
}


def cell(value: float) -> str:
    return f"{value:.1f}" if value < 60 else f"{value:.0f}"


def main() -> None:
    rows = rows_of(RESULTS / "h200_quantized_activations.json", COLUMNS)
    batches = sorted({row["m"] for row in rows})
    for n, k in dict.fromkeys((row["n"], row["k"]) for row in rows):
        print(f"\n| {n}×{k} | " + " | ".join(("M=" if m == 1 else "") + str(m) for m in batches) + " |")
        print("|---" * (len(batches) + 1) + "|")
        found = {(row["scheme"], row["m"]): row for row in rows if (row["n"], row["k"]) == (n, k)}
        print("| limit | " + " | ".join(cell(found["FP8_DYNAMIC", m]["limit_us"]) for m in batches) + " |")
        for scheme, name in SCHEMES.items():
            for key, label in LINES.items():
                times = [found[scheme, m].get(key) for m in batches]
                if any(times):
                    print(f"| {name}{label} | " + " | ".join(cell(us) if us else "" for us in times) + " |")
    large_m()


def large_m() -> None:
    """The fastest tiles of both orientations beside the products of codes alone."""
    print("\n| scheme, shape, M | W as operand A | x as operand A | quantization alone | torch, product | DeepGEMM, product |")
    print("|---|---|---|---|---|---|")
    for row in json.loads((RESULTS / "h200_large_m_configs.json").read_text())["results"]:
        cells = [
            min((times for name, times in row["configs"].items() if name.startswith(kind)), key=lambda times: times[0])
            for kind in ("Wgmma", "LargeM")
        ]
        cells.append([row["quantize_us"]])
        cells += [
            [row[key] for key in (peer, f"{peer} sustained") if key in row] for peer in ("torch product", "DeepGEMM product")
        ]
        name = f"{SCHEMES[row['scheme']]}, {row['n']}×{row['k']}, {row['m']}"
        print(f"| {name} | " + " | ".join(" / ".join(map(cell, times)) for times in cells) + " |")


if __name__ == "__main__":
    main()
