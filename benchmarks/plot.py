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
    """SmolLM2-135M on a CPU: decode speed, time to first token, memory."""
    report = load("cpu_end_to_end")
    run = next(r for r in report["runs"] if r["dtype"] == "bfloat16")
    speed, memory = run["speed"], run["memory_bytes"]
    panels = (
        ("decode, tokens/s", [speed[w]["decode_tokens_per_second"] for w in ("ours", "theirs")], "{:.0f}"),
        ("time to first token, ms", [speed[w]["first_token_ms"] for w in ("ours", "theirs")], "{:.0f}"),
        ("weights, MB", [memory[w] / 1e6 for w in ("ours", "theirs")], "{:.0f}"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), layout="constrained")
    for axis, (title, values, form) in zip(axes, panels, strict=True):
        bars = axis.bar(["Bitline\nQ4_1", "transformers\nbf16"], values, color=[OURS, THEIRS], width=0.6)
        axis.bar_label(bars, [form.format(v) for v in values])
        axis.set_title(title, fontsize=10)
        axis.set_ylim(0, max(values) * 1.2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", labelsize=8)
    name = f"{report['machine']['threads']} cores of an {report['machine']['name']}"
    figure.suptitle(f"SmolLM2-135M-Instruct on {name}, torch {report['machine']['versions']['torch']}", fontsize=10)
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
