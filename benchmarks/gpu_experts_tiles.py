"""Tiles of the portable experts kernel on a GPU: each projection's configurations in turn, the other's fixed.

    python benchmarks/gpu_experts_tiles.py [--shape 128x768x2048x8,…] [--m 1,4,…] --out FILE

For each tile of pairs first the configurations of the first projection, then with its best those of the second; sorted by expert,
and up to 64 pairs also without. `us` is the whole layer in a captured graph (see gpu_experts.py), null where it does not compile.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _machine import machine
from _measure import replay_us
from gpu_experts import SHAPES, calls_of, experts_of

from bitline.kernels.triton import experts
from bitline.kernels.triton.heuristics import GemmConfig

# (k_slices, tile_n, tile_m, num_warps, num_stages)
CONFIGS = [
    (8, 16, 8, 8, 3), (4, 32, 8, 4, 3), (4, 32, 8, 4, 4), (2, 64, 8, 4, 3), (2, 64, 8, 4, 4), (1, 128, 8, 4, 3), (1, 64, 8, 2, 4),
    (4, 64, 8, 8, 3), (2, 32, 8, 2, 4), (1, 64, 16, 2, 3), (1, 64, 16, 4, 4), (1, 128, 16, 4, 3), (1, 128, 16, 4, 4),
    (2, 64, 16, 4, 3), (4, 32, 16, 4, 3), (1, 128, 16, 8, 4), (1, 128, 32, 4, 3), (1, 64, 32, 4, 3), (1, 64, 32, 4, 4),
    (1, 128, 32, 8, 3), (1, 128, 32, 4, 4), (1, 128, 64, 4, 3), (1, 128, 64, 8, 3), (1, 64, 64, 4, 4), (1, 128, 64, 4, 4),
    (1, 256, 64, 8, 3), (1, 128, 128, 8, 3), (1, 64, 128, 4, 3), (1, 128, 128, 8, 4), (1, 256, 128, 8, 3),
]  # fmt: skip
Config = tuple[int, ...]


def layer_us(layer: Any, x: torch.Tensor, routes: Any, is_sorted: bool, up: Config, down: Config) -> float | None:
    """The layer's time with these configurations; None where one does not compile or fit."""
    load = experts.Load(up[2], is_sorted, (False, False))
    experts._plans.clear()
    experts._plans_of_pairs.clear()
    with (
        mock.patch.object(experts, "load_of", lambda *_: load),
        mock.patch.object(experts, "gemm_configs", lambda *_: (GemmConfig(*up), GemmConfig(*down))),
    ):
        try:
            return replay_us([lambda r=r: layer(x, *r) for r in routes], 4, 3)
        except Exception as error:  # note it and go on
            print(up, down, type(error).__name__, str(error)[:80])
            return None


def tiles_of(layer: Any, x: torch.Tensor, routes: Any, pairs_per_expert: float, facts: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    pairs = routes[0][0].numel()
    for is_sorted in (False, True) if pairs <= experts.MAX_UNSORTED else (True,):
        tiles = [t for t in (8, 16, 32, 64, 128) if pairs_per_expert / 2.5 <= t <= max(8, 6 * pairs_per_expert)]
        for tile in tiles or [128] if is_sorted else [8]:
            configs = [config for config in CONFIGS if config[2] == tile]
            best = configs[0]
            for which in ("up", "down"):
                found = []
                for config in configs:
                    pair = (config, best) if which == "up" else (best, config)
                    us = layer_us(layer, x, routes, is_sorted, *pair)
                    found.append({**facts, "sorted": is_sorted, "which": which, "config": config, "us": us})
                rows += found
                if which == "up":
                    best = min(found, key=lambda row: row["us"] or 1e9)["config"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=",".join(SHAPES))
    parser.add_argument("--m", default="1,4,16,64,256,1024,4096")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for text in arguments.shape.split(","):
        shape = tuple(map(int, text.split("x")))
        layer = experts_of("W4A16", *shape[:3], "TritonW4A16")
        for m in map(int, arguments.m.split(",")):
            calls = calls_of(layer, shape, m, (2, 12))
            facts = {"shape": text, "m": m, "touched_experts": calls.touched_experts, "limit_us": calls.limit_us}
            rows += tiles_of(layer, calls.x, calls.routes, m * shape[3] / calls.touched_experts, facts)
            print(text, m, min(row["us"] for row in rows if row["shape"] == text and row["m"] == m and row["us"]), flush=True)
            arguments.out.write_text(json.dumps({"machine": machine("cuda"), "results": rows}, indent=1) + "\n")
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
