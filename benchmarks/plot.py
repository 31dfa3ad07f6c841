"""Draws docs/img/*.png from benchmarks/results/*.json; nothing in a plot is typed in by hand.

python benchmarks/plot.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
OURS, THEIRS, THIRD, LIMIT = "#1f5fbf", "#9aa3ad", "#d08a2e", "#444444"


def load(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def save(figure: Any, name: str) -> None:
    folder = ROOT / "docs" / "img"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": ""})
    plt.close(figure)


def end_to_end() -> None:
    """Whole models on a CPU: decode speed, time to first token, memory."""
    engines = {"bitline": ("Bitline", OURS), "transformers": ("transformers\nbf16", THEIRS), "llama.cpp": ("llama.cpp", THIRD)}
    models = (("cpu_decode_smollm2", "SmolLM2-135M, Q4_1"), ("cpu_decode_llama_1b", "Llama of 1.2 billion weights, W4A16"))
    figure, axes = plt.subplots(2, 3, figsize=(9, 4.6), layout="constrained")
    for row, (file, model) in zip(axes, models, strict=True):
        report = load(file)
        short, long = report["rows"]
        panels = (
            ("decode, tokens/s", [short[e]["decode"] for e in engines]),
            (f"first token of {long['prompt_tokens']}, ms", [long[e]["first_token_ms"] for e in engines]),
            ("weights, MB", [report["engines"][e]["weights"] / 1e6 for e in engines]),
        )
        for axis, (title, values) in zip(row, panels, strict=True):
            bars = axis.bar([n for n, _ in engines.values()], values, color=[c for _, c in engines.values()], width=0.6)
            axis.bar_label(bars, [f"{v:.0f}" for v in values])
            axis.set_title(title, fontsize=10)
            axis.set_ylim(0, max(values) * 1.2)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(axis="both", labelsize=8)
        row[0].set_ylabel(model, fontsize=8)
    machine = report["machine"]
    name = f"{machine['threads']} cores of an {machine['name']}"
    figure.suptitle(f"{name}, torch {machine['versions']['torch']}", fontsize=10)
    save(figure, "cpu_end_to_end")


def hopper() -> None:
    """W4A16 g128 on an H200: time over the limit, for ours and the peers."""
    report = load("h200_hopper")
    rows = [r for r in report["results"] if r.get("scheme") == "W4A16 g128" and r.get("cuBLAS bf16")]
    shapes = [(4096, 4096), (28672, 4096), (4096, 14336), (1024, 4096)]
    figure, axes = plt.subplots(1, len(shapes), figsize=(3.2 * len(shapes), 3.1), layout="constrained", sharey=True)
    for axis, (n, k) in zip(axes, shapes, strict=True):
        chosen = sorted((r for r in rows if (r["n"], r["k"]) == (n, k)), key=lambda r: r["m"])
        lines = (
            ("us", "Bitline", OURS, "o-"),
            ("humming", "humming", THIRD, "s--"),
            ("cuBLAS bf16", "cuBLAS bf16", THEIRS, "^--"),
        )
        for key, label, colour, style in lines:
            points = [(r["m"], r[key] / r["limit_us"]) for r in chosen if r.get(key)]
            axis.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4, linewidth=1.4)
        axis.axhline(1, color=LIMIT, linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{n}×{k}", fontsize=10)
        axis.set_xlabel("M, rows of the input")
        axis.set_ylim(0, 4.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("time / limit of the card")
    axes[0].legend(fontsize=7, frameon=False)
    figure.suptitle("W4A16, groups of 128, bf16, on an NVIDIA H200 (lower is better, 1 is the limit)", fontsize=10)
    save(figure, "h200_w4a16")


if __name__ == "__main__":
    end_to_end()
    hopper()
