"""The experts of a mixture-of-experts layer on a GPU: QuantExperts in a captured graph, beside reading and plain layers.

    python benchmarks/gpu_experts.py [--scheme W4A16,MXFP4A16] [--shape 128x768x2048x8,…] [--m 1,4,…] [--out FILE]

Shapes are experts x intermediate x hidden x experts of a token. `us` is one call, with its own routing each time, of enough
experts that weights come from DRAM. `limit_us`: the packed bytes of the experts that the routing touches over 4.35 TB/s and 2 us,
or FLOPs at 790 TFLOP/s. `plain_us`: both projections as plain layers of the same work, tokens x top_k rows of one expert's
shapes. skew: the share of tokens whose experts are drawn from an eighth of them.
"""

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _machine import machine
from _measure import COLD, RAMP, RATE, READ, eager_us, layer_spec, replay_us

from bitline import Platform, choose, timing
from bitline.expert_gate import ExpertGate
from bitline.experts import ExpertStack, QuantExperts, _stack_like
from bitline.select import Policy, fuses_experts
from bitline.testing.generators import random_weight

SHAPES = ("128x768x2048x8", "8x14336x4096x2", "256x2048x7168x8", "32x2880x2880x4")
GATE = ExpertGate("silu")


def experts_of(scheme: str, count: int, intermediate: int, hidden: int, kernel: str) -> QuantExperts:
    """Experts whose packed weights are copies of one random one per projection."""
    stacks = []
    for n, k in ((2 * intermediate, hidden), (hidden, intermediate)):
        spec = layer_spec(scheme, n, k)
        weight = random_weight(spec, 1, "cuda")
        stack = ExpertStack(spec, count, torch.device("cuda"), Policy(kernel=kernel))
        packed = stack.choice.kernel.pack(weight)
        stack._names = tuple(f"packed_{name}" for name in packed)
        stack._set([_stack_like(t, count) for t in packed.values()])
        for stacked, one in zip(stack.packed, packed.values(), strict=True):
            stacked.copy_(one.expand_as(stacked))
        stacks.append(stack)
    return QuantExperts([stacks[0]], stacks[1], GATE)


def routing(count: int, top_k: int, tokens: int, turn: int, skew: float) -> torch.Tensor:
    """[tokens, top_k] on the GPU."""
    g = torch.Generator("cuda").manual_seed(turn)
    score = torch.rand(tokens, count, generator=g, device="cuda")
    few = max(top_k, count // 8)
    hot = torch.rand(tokens, 1, generator=g, device="cuda") < skew
    score[:, few:] -= 2.0 * hot
    return score.topk(top_k, 1).indices


class Calls(NamedTuple):
    """Calls of a layer on x, each with its own routing, and the least that one takes on average."""

    x: torch.Tensor
    routes: list[tuple[torch.Tensor, torch.Tensor]]
    bytes_of_an_expert: int
    touched_experts: float
    flops: int
    limit_us: float


def calls_of(layer: QuantExperts, shape: tuple[int, ...], m: int, turns: tuple[int, int], skew: float = 0.0) -> Calls:
    """As many calls with m tokens as read 300 MB of weights, within the bounds `turns`. shape: see SHAPES."""
    count, intermediate, hidden, top_k = shape
    size = sum(t[0].nbytes for s in (layer.up[0], layer.down) for t in s.packed)
    x = torch.randn(m, hidden, dtype=torch.bfloat16, device="cuda")
    number = max(turns[0], min(turns[1], int(300e6 / (size * min(count, m * top_k)))))
    routes = [(routing(count, top_k, m, turn, skew), torch.rand(m, top_k, device="cuda")) for turn in range(number)]
    touched = sum(int(index.unique().numel()) for index, _ in routes) / number
    flops = 2 * m * top_k * 3 * intermediate * hidden
    return Calls(x, routes, size, touched, flops, 1e6 * max(touched * size / READ + RAMP, flops / RATE))


def row(layer: QuantExperts, name: str, shape: tuple[int, ...], m: int, skew: float) -> dict[str, Any]:
    count, intermediate, hidden, top_k = shape
    x, routes, size, touched, flops, limit = calls_of(layer, shape, m, (3, 40), skew)
    us = replay_us([lambda r=r: layer(x, *r) for r in routes], 10, 3)
    return {
        "kernel": layer.down.choice.best.name, "scheme": name, "experts": count, "intermediate": intermediate, "hidden": hidden,
        "top_k": top_k, "m": m, "skew": skew,
        "touched_experts": touched, "bytes_of_an_expert": size, "us": us, "limit_us": limit, "tflops": flops / us / 1e6,
        "eager_us": eager_us(lambda: layer(x, *routes[0]), 100) if m == 1 else None,
    }  # fmt: skip


def plain_us(name: str, shape: tuple[int, ...], m: int) -> float:
    """Both projections as plain layers on tokens x top_k rows."""
    total = 0.0
    for n, k in ((2 * shape[1], shape[2]), (shape[2], shape[1])):
        spec = layer_spec(name, n, k)
        best = choose(spec, Platform.detect("cuda"), Policy(m=(m * shape[3],))).best
        calls, _ = timing.packed_calls(best.kernel, random_weight(spec, 1, "cuda"), spec, int(COLD))
        x = torch.randn(m * shape[3], k, dtype=torch.bfloat16, device="cuda")
        total += replay_us([partial(call, x) for call in calls], 5, 3)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="W4A16,MXFP4A16")
    parser.add_argument("--shape", default=",".join(SHAPES))
    parser.add_argument("--m", default="1,4,16,64,256,1024,4096")
    parser.add_argument("--skew", default="0,0.8")
    parser.add_argument("--kernel", default="GluonHopper,Triton", help="Triton: the portable kernel of the scheme")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sizes, skews = list(map(int, arguments.m.split(","))), list(map(float, arguments.skew.split(",")))
    rows: list[dict[str, Any]] = []
    for text in arguments.shape.split(","):
        shape = tuple(map(int, text.split("x")))
        for name in arguments.scheme.split(","):
            portable = "TritonW4A16" if name == "W4A16" else "TritonMinifloat"
            for kernel in arguments.kernel.split(","):
                layer = experts_of(name, *shape[:3], portable if kernel == "Triton" else kernel)
                if not all(fuses_experts(s.choice.kernel, s.spec, s.choice.platform) for s in (layer.up[0], layer.down)):
                    print(kernel, name, text, "not in one call")
                    continue
                for m, skew in itertools.product(sizes, skews):
                    if skew and m < 16:
                        continue
                    found = row(layer, name, shape, m, skew)
                    if not skew and m >= 64 and kernel == arguments.kernel.split(",")[0]:
                        found["plain_us"] = plain_us(name, shape, m)
                    rows.append(found)
                    shown = {k: round(v, 1) for k, v in found.items() if isinstance(v, float)}
                    print(found["kernel"], name, text, f"M={m} skew={skew}", shown, flush=True)
                    arguments.out.write_text(json.dumps({"machine": machine("cuda"), "results": rows}, indent=1) + "\n")
                del layer
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
