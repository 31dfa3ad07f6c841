"""Bytes of experts that the busiest rank reads for M tokens: each expert's channels cut over ranks, and whole experts. Computed.

    python benchmarks/expert_parallel_bytes.py [--experts 128] [--top-k 8] [--ranks 8] [--m 1,16,64]

Every token's experts are drawn uniformly; an expert is read once, whatever its tokens. The default sizes are Qwen3-30B-A3B's, in
4 bits with scales of groups of 128. The mean of the largest of the ranks is over --draws batches.
"""

from __future__ import annotations

import argparse

import torch

from bitline import types
from bitline.expert_counts import active_experts
from bitline.parallel.cuts import expert_range
from bitline.types import LinearSpec


def busiest(experts: int, top_k: int, ranks: int, tokens: int, draws: int) -> tuple[float, float]:
    """Means over batches: distinct experts of the rank that has most of a batch's, and pairs of token and expert of the one with
    most of those.
    """
    g = torch.Generator().manual_seed(0)
    owner = torch.empty(experts, dtype=torch.long)
    for rank in range(ranks):
        own = expert_range(experts, rank, ranks)
        owner[own.start : own.stop] = rank
    one_hot = torch.nn.functional.one_hot(owner, ranks).float()
    touched = pairs = 0.0
    for _ in range(draws):
        chosen = torch.rand(tokens, experts, generator=g).topk(top_k, 1).indices
        counts = torch.bincount(chosen.flatten(), minlength=experts).float()
        touched += float(((counts > 0).float() @ one_hot).max())
        pairs += float((counts @ one_hot).max())
    return touched / draws, pairs / draws


def main() -> None:
    parser = argparse.ArgumentParser()
    defaults = {"experts": 128, "top-k": 8, "ranks": 8, "hidden": 2048, "intermediate": 768, "draws": 20000}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--m", default="1,16,64")
    a = parser.parse_args()
    shapes = ((2 * a.intermediate, a.hidden), (a.hidden, a.intermediate))
    size = sum(LinearSpec(*shape, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16).weight_bytes() for shape in shapes) / 1e6
    print(f"{size:.2f} MB an expert")
    print("M  experts touched  cut: of a rank, MB  whole: of the busiest rank, MB  ratio  pairs of the busiest rank")
    for m in (int(text) for text in a.m.split(",")):
        active = active_experts(a.experts, a.top_k, m)
        most, pairs = busiest(a.experts, a.top_k, a.ranks, m, a.draws)
        cut = active / a.ranks
        print(f"{m}  {active:.1f}  {cut:.2f} {cut * size:.1f}  {most:.2f} {most * size:.1f}  {most / cut:.2f}  {pairs:.1f}")


if __name__ == "__main__":
    main()
