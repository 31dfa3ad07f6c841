"""Draws docs/img/*.png from benchmarks/results/*.json; nothing in a plot is typed in by hand.

python benchmarks/plot.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import torch

from bitline.kernels.hopper.layout import pack_codes

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

ROOT = Path(__file__).parents[1]
OURS, THEIRS, THIRD, LIMIT = "#1f5fbf", "#9aa3ad", "#d08a2e", "#444444"
READ, RATE = 4.35e12, 790e12  # bytes/s and FLOP/s in bf16, measured on an H200


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
            (f"time to first token of {long['prompt_tokens']}, ms", [long[e]["first_token_ms"] for e in engines]),
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
    """W4A16, group size 128, on an H200: time over the roofline limit, Bitline and the peers."""
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
        axis.set_xlabel("M (tokens)")
        axis.set_ylim(0, 4.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("time / roofline limit")
    axes[0].legend(fontsize=7, frameon=False)
    figure.suptitle("W4A16, group size 128, bf16, on an NVIDIA H200 (lower is better, 1 is the roofline limit)", fontsize=10)
    save(figure, "h200_w4a16")


def roofline() -> None:
    """All timed W4A16 layers on an H200: throughput over arithmetic intensity, under the roofline of the card."""
    rows = [r for r in load("h200_hopper")["results"] if r.get("scheme") == "W4A16 g128"]
    figure, axis = plt.subplots(figsize=(7, 4.4), layout="constrained")
    series = (
        ("cuBLAS bf16", "cuBLAS bf16 (16-bit weights)", THEIRS, "^", 2.0),
        ("humming", "humming", THIRD, "s", 0.5 + 2 / 128),
        ("us", "Bitline", OURS, "o", 0.5 + 2 / 128),  # codes, and a 16-bit scale for each 128
    )
    for key, label, colour, mark, weight in series:
        points = []
        for row in (r for r in rows if r.get(key)):
            n, k, m = row["n"], row["k"], row["m"]
            operations = 2 * m * n * k
            points.append((operations / (n * k * weight + 2 * m * (n + k)), operations / row[key] / 1e6))
        axis.plot(*zip(*points, strict=True), mark, color=colour, label=label, markersize=3.5, alpha=0.75, linewidth=0)
    edge = RATE / READ
    axis.plot([1, edge, 1e4], [READ / 1e12, RATE / 1e12, RATE / 1e12], color=LIMIT, linewidth=1)
    axis.text(1.3, 2.08 * READ / 1e12, f"{READ / 1e12:.2f} TB/s", rotation=36, fontsize=8, color=LIMIT)
    axis.text(1.2 * edge, 1.12 * RATE / 1e12, f"{RATE / 1e12:.0f} TFLOP/s in bf16", fontsize=8, color=LIMIT)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(0.8, 6e3)
    axis.set_ylim(0.5, 1.5e3)
    axis.set_xlabel("arithmetic intensity, FLOP per byte of weights, inputs and outputs")
    axis.set_ylabel("TFLOP/s")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    shapes = len({(r["n"], r["k"]) for r in rows})
    axis.set_title(f"NVIDIA H200, W4A16, {shapes} layer shapes, M = 1 to {max(r['m'] for r in rows)}", fontsize=10)
    save(figure, "h200_roofline")


def layout() -> None:
    """A packed block of the Hopper kernels, as `pack_codes` makes it: the lane that owns each weight, for either instruction."""
    cell = torch.arange(1024).view(16, 64)
    cell_of = torch.zeros(128, 8, dtype=torch.long)  # int32 and nibble -> cell, from three packings of four bits of its index
    for digit in range(3):
        codes = (cell >> 4 * digit & 15).to(torch.uint8)
        packed = pack_codes(codes[:, ::2] | codes[:, 1::2] << 4, 4, 64, 0).flatten().long()
        cell_of |= (packed[:, None] >> torch.arange(0, 32, 4) & 15) << 4 * digit
    index = torch.empty(1024, dtype=torch.long)  # of the int32 that holds each cell
    index[cell_of.flatten()] = torch.arange(128).repeat_interleave(8)
    index = index.view(16, 64)
    figure, axes = plt.subplots(3, 1, figsize=(11, 7.4), layout="constrained", height_ratios=(4, 4, 1.1))
    lanes = (
        (index % 32, "wgmma: lane 4g+q loads int32 32w+4g+q for k16 step w, columns 16w to 16w+15"),
        (index % 32 // 4 * 4 + index // 32, "mma.sync: lane 4g+q loads int32 32q+4g to 32q+4g+3, columns 16q to 16q+15"),
    )
    for axis, (lane, title) in zip(axes[:2], lanes, strict=True):
        axis.imshow(lane % 4, cmap=ListedColormap(["#cfe0f5", "#f5dfc0", "#d7ecd2", "#eed5e6"]), aspect="auto")
        for row in range(16):
            for column in range(64):
                axis.text(column, row, str(int(lane[row, column])), ha="center", va="center", fontsize=6)
        for column in (15.5, 31.5, 47.5):
            axis.axvline(column, color=LIMIT, linewidth=1)
        axis.axhline(7.5, color=LIMIT, linewidth=1)
        axis.set_xticks(range(0, 64, 8))
        axis.set_yticks(range(0, 16, 4))
        axis.set_title(title + "; numbers are lanes", fontsize=9)
    axis = axes[2]
    for nibble in range(8):
        row, column = divmod(int(cell_of[0, nibble]), 64)
        axis.barh(0, 4, left=28 - 4 * nibble, color="#cfe0f5", edgecolor=LIMIT)
        axis.text(30 - 4 * nibble, 0, f"row {row}\ncolumn {column}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(0, 33, 4), [str(31 - b) if b < 32 else "" for b in range(0, 33, 4)])
    axis.set_yticks([])
    axis.set_xlim(0, 32)
    axis.set_title("packed int32 0, from bit 31 to bit 0", fontsize=9)
    save(figure, "hopper_layout")


if __name__ == "__main__":
    end_to_end()
    hopper()
    roofline()
    layout()
