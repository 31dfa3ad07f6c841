"""Every config of the Hopper kernels of experts, one projection after the other: what `experts_config` is made from.

    python benchmarks/gpu_experts_configs.py [--shape 128x768x2048x8,…] [--m 1,4,…] --out FILE

Shapes and `limit_us` as in gpu_experts.py, with W4A16, or MXFP4A16 where K is no multiple of 128. For each tile that suits the
pairs of an expert, all configs of the first projection are timed beside one of the second, then all of the second beside the
fastest. `us` is the whole layer in a captured graph; configs that do not fit into shared memory are left out.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _machine import machine
from _measure import replay_us
from gpu_experts import SHAPES, calls_of, experts_of

from bitline.experts import QuantExperts
from bitline.kernels.hopper import experts
from bitline.kernels.hopper.config import SmallMConfig, WgmmaConfig

# n16_per_warp, warps_per_k_slice, num_warps, stages; a gated projection has two tiles of W a warp
GATED = [
    (2, 1, 8, 2), (2, 1, 8, 3), (2, 2, 8, 3), (2, 2, 8, 4), (2, 4, 8, 3), (2, 4, 8, 4), (2, 8, 8, 3), (2, 8, 8, 4), (2, 2, 4, 3),
    (2, 2, 4, 4), (2, 4, 4, 4), (2, 4, 4, 6), (2, 1, 4, 4), (2, 1, 4, 3), (2, 1, 2, 4), (2, 4, 16, 3), (2, 2, 16, 2),
]  # fmt: skip
PLAIN = [
    *GATED, (1, 2, 8, 4), (1, 4, 8, 4), (4, 2, 8, 3), (4, 1, 8, 2), (4, 4, 8, 3), (4, 2, 4, 3), (4, 4, 4, 4), (3, 2, 8, 3),
    (4, 1, 4, 3), (1, 4, 4, 6),
]  # fmt: skip
FIRST_PLAIN = (2, 4, 8, 3)
# n64_per_warpgroup, k_blocks_per_stage, raster_group_n, pingpong
LARGE_GATED = [(2, k, r, False) for k, r in ((1, 8), (2, 8), (2, 2), (2, 32))]
LARGE_PLAIN = [(n, k, 8, p) for n in (1, 2) for k in (1, 2) for p in (False, True) if not p or n == 1]
Config = tuple[Any, ...]


def use(tile: int, is_sorted: bool, large: bool, gated: Config, plain: Config) -> None:
    """Have the next calls take these configs. ValueError, in the call, where one does not fit."""

    def small(_spec: Any, scheme: Any, rows: int, _blocks: float, is_gated: bool, _sms: int) -> SmallMConfig:
        n16, warps_per_k_slice, warps, stages = gated if is_gated else plain
        asked = SmallMConfig(
            n16, warps, stages=stages, warps_per_k_slice=warps_per_k_slice, stage_x=True, pdl_early=stages > 2
        )  # fmt: skip
        if asked.fit_stages(scheme, rows) != asked:
            raise ValueError("shared memory")
        return asked

    def persistent(_spec: Any, scheme: Any, rows: int, _blocks: float, is_gated: bool, sms: int) -> WgmmaConfig:
        n64, k_blocks, raster, pingpong = gated if is_gated else plain
        config = WgmmaConfig(rows, k_blocks, n64_per_warpgroup=n64, num_ctas=sms, raster_group_n=raster, pingpong=pingpong)
        return config.fit_stages(scheme)

    experts._plans.clear()
    module: Any = experts
    module.load_of = lambda *_: (tile, is_sorted, 1.0)
    module.LARGEST_BLOCK = 0 if large else 32
    module.small_m_config, module.persistent_config = small, persistent


def tiles_for(mean: float, pairs: int) -> Iterator[tuple[int, bool, bool]]:
    """(tile, whether pairs are sorted, whether it is the persistent kernel's) worth trying."""
    for tile in (8, 16, 32):
        if mean / 2.5 <= tile <= max(8, 6 * mean):
            if tile == 8 and pairs <= 64:
                yield tile, False, False
            yield tile, True, False
    for tile in (32, 64, 128):
        if mean >= 8 and mean / 4 <= tile <= max(32, 8 * mean):
            yield tile, True, True


def rows_of(layer: QuantExperts, text: str, m: int) -> Iterator[dict[str, Any]]:
    """Timings of one shape and M."""
    shape = tuple(map(int, text.split("x")))
    calls = calls_of(layer, shape, m, (2, 12))
    mean = m * shape[3] / calls.touched_experts
    for tile, is_sorted, large in tiles_for(mean, m * shape[3]):
        gated, plain = (LARGE_GATED, LARGE_PLAIN) if large else (GATED, PLAIN)
        best = FIRST_PLAIN if not large else plain[0]
        for first, second in ((gated, [best]), ([], plain)):
            found: dict[Config, float] = {}
            for up, down in [(u, d) for u in first or [best] for d in second]:
                use(tile, is_sorted, large, up, down)
                try:
                    found[up] = replay_us([lambda r=r: layer(calls.x, *r) for r in calls.routes], 3, 3)
                except ValueError:
                    continue
                yield {"shape": text, "m": m, "pairs_per_expert": mean, "persistent": large, "tile": tile,
                       "sorted": is_sorted, "up": up, "down": down, "us": found[up], "limit_us": calls.limit_us}  # fmt: skip
            best = min(found, key=found.__getitem__) if first and found else best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=",".join(SHAPES))
    parser.add_argument("--m", default="1,2,4,8,16,32,64,128,256,512,1024,4096")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for text in arguments.shape.split(","):
        count, intermediate, hidden, _ = map(int, text.split("x"))
        scheme = "W4A16" if hidden % 128 == intermediate % 128 == 0 else "MXFP4A16"
        layer = experts_of(scheme, count, intermediate, hidden, "GluonHopper")
        for m in map(int, arguments.m.split(",")):
            mine = list(rows_of(layer, text, m))
            best = min(mine, key=lambda r: r["us"])
            print(text, f"M={m}", {k: best[k] for k in ("tile", "sorted", "up", "down", "us", "limit_us")}, flush=True)
            rows += mine
            arguments.out.write_text(json.dumps({"machine": machine("cuda"), "results": rows}) + "\n")
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
