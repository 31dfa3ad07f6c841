"""Prints the tables of docs/measured/h200-quantized-activations.md from the committed results.

python benchmarks/scaled_tables.py
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "h200_quantized_activations.json"
SCHEMES = {"FP8_DYNAMIC": "FP8 per token", "FP8_BLOCK": "FP8 in blocks", "W8A8": "W8A8"}
LINES = {
    "us": "",
    "sustained_us": ", sustained",
    "torch product": ": torch, product",
    "torch product sustained": ": torch, sustained",
}


def cell(value: float) -> str:
    return f"{value:.1f}" if value < 60 else f"{value:.0f}"


def main() -> None:
    rows = json.loads(RESULTS.read_text())["results"]
    batches = sorted({row["m"] for row in rows})
    for n, k in dict.fromkeys((row["n"], row["k"]) for row in rows):
        print(f"\n| {n}×{k} | " + " | ".join(("M=" if m == 1 else "") + str(m) for m in batches) + " |")
        print("|---" * (len(batches) + 1) + "|")
        found = {(row["scheme"], row["m"]): row for row in rows if (row["n"], row["k"]) == (n, k)}
        print("| limit | " + " | ".join(cell(found["FP8_DYNAMIC", m]["limit_us"]) for m in batches) + " |")
        for scheme, name in SCHEMES.items():
            for key, label in LINES.items():
                print(f"| {name}{label} | " + " | ".join(cell(found[scheme, m][key]) for m in batches) + " |")


if __name__ == "__main__":
    main()
