"""The experts of a mixture-of-experts layer on the native CPU kernel, out of DRAM.

    python benchmarks/cpu_experts.py [--scheme W4A16,MXFP4A16] [--shape 64x768x2048x8] [--m 1,64] [--seconds 4] [--out FILE]

Shapes are experts x intermediate x hidden x experts of a token. For each M: QuantExperts with the kernel's one call (`experts`),
the same kernel called expert by expert from Python (`loop`), only those layers' C functions, without sorting, gate and sums
(`layers`), and reading the packed bytes of the active experts on the same threads, expert by expert (`read`). For one token every
call takes other experts, so that no cache holds them; the four are interleaved. Medians, least times and the load average are
reported: beside other busy processes only the least times of few rows say anything.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bitline import native
from bitline.expert_gate import ExpertGate
from bitline.experts import ExpertStack, QuantExperts, _stack_like, loop_over_experts
from bitline.kernels.cpu.native_experts import DTYPE_CODES
from bitline.select import Policy
from bitline.testing.generators import random_weight

from _machine import machine  # isort: skip
from _measure import layer_spec  # isort: skip

RESULTS = Path(__file__).parent / "results" / "cpu_experts.json"
SHAPES = ("64x768x2048x8", "8x14336x4096x2")
GATE = ExpertGate("silu")
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def experts_of(name: str, count: int, intermediate: int, hidden: int) -> QuantExperts:
    """Experts whose packed weights are copies of two random ones."""
    stacks = []
    for n, k in ((2 * intermediate, hidden), (hidden, intermediate)):
        weight = random_weight(layer_spec(name, n, k), 1)
        stack = ExpertStack(weight.spec, count, torch.device("cpu"), Policy(backend="native"))
        packed = stack.choice.kernel.pack(weight)
        stack._names = ("packed_weight",)
        stack._set([_stack_like(packed["weight"], count)])
        stack.packed[0].copy_(packed["weight"].expand(count, -1))
        stacks.append(stack)
    return QuantExperts([stacks[0]], stacks[1], GATE)


def by_layers(layer: QuantExperts, x: torch.Tensor, index: torch.Tensor) -> Callable[[], None]:
    """The C functions of each active expert's two layers, on rows of its number of tokens."""
    core, code = native.core(), DTYPE_CODES[x.dtype]
    assert core is not None
    counts = torch.bincount(index.flatten(), minlength=layer.num_experts).tolist()
    calls, kept = [], []
    for stack in (layer.up[0], layer.down):
        rows = torch.randn(x.shape[0], stack.spec.k).to(x.dtype)
        y = torch.empty(x.shape[0], stack.spec.n, dtype=x.dtype)
        kept += [rows, y]
        calls += [
            (rows.data_ptr(), m, stack.packed[0][e].data_ptr(), None, y.data_ptr(), code) for e, m in enumerate(counts) if m
        ]

    def run(kept: list[torch.Tensor] = kept) -> None:
        for call in calls:
            core.gemm(*call)

    return run


def read(layer: QuantExperts, index: torch.Tensor) -> Callable[[], None]:
    """Reads of the packed weights of the experts of `index`."""
    core = native.core()
    assert core is not None
    parts = [s.packed[0][e] for e in index.unique().tolist() for s in (layer.up[0], layer.down)]
    calls = [(part.data_ptr(), part.nbytes // 4, 4, 0x7F800000) for part in parts]

    def run() -> None:
        for call in calls:
            core.all_finite(*call)

    return run


def routing(count: int, top_k: int, tokens: int, turn: int) -> torch.Tensor:
    """[tokens, top_k]: random experts, for one token those that follow the turn before."""
    if tokens == 1:
        return ((torch.arange(top_k) + top_k * turn) % count).view(1, top_k)
    g = torch.Generator().manual_seed(turn)
    return torch.rand(tokens, count, generator=g).argsort(1)[:, :top_k].contiguous()


def row(layer: QuantExperts, name: str, shape: tuple[int, ...], m: int, seconds: float) -> dict[str, Any]:
    count, intermediate, hidden, top_k = shape
    times: dict[str, list[float]] = {"read": [], "experts": [], "loop": [], "layers": []}
    active, turn, end = [], 0, time.perf_counter() + seconds
    while time.perf_counter() < end or len(active) < 5:
        for what, measured in times.items():
            x = torch.randn(m, hidden, dtype=torch.bfloat16)
            index, weights = routing(count, top_k, m, turn), torch.rand(m, top_k)
            call: Callable[[], Any] = {
                "read": lambda i=index: read(layer, i), "layers": lambda i=index, v=x: by_layers(layer, v, i),
                "experts": lambda i=index, v=x, w=weights: lambda: layer(v, i, w),
                "loop": lambda i=index, v=x, w=weights: lambda: loop_over_experts(v, i, w, count, layer._expert),
            }[what]()  # fmt: skip
            start = time.perf_counter()
            call()
            measured.append(time.perf_counter() - start)
            turn += 1
        active.append(int(index.unique().numel()))
    size = sum(s.packed[0][0].nbytes for s in (layer.up[0], layer.down))
    return {
        "scheme": name, "experts": count, "intermediate": intermediate, "hidden": hidden, "top_k": top_k, "m": m,
        "turns": len(active), "active_experts": statistics.mean(active), "bytes_of_an_expert": size,
        "load": os.getloadavg()[0], "least_us": {what: round(min(values) * 1e6, 1) for what, values in times.items()},
        "median_us": {what: round(statistics.median(values) * 1e6, 1) for what, values in times.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="W4A16,MXFP4A16")
    parser.add_argument("--shape", default=",".join(SHAPES))
    parser.add_argument("--m", default="1,4,16,64")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each scheme, shape and M")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    for name in arguments.scheme.split(","):
        for text in arguments.shape.split(","):
            shape = tuple(map(int, text.split("x")))
            layer = experts_of(name, *shape[:3])
            for m in map(int, arguments.m.split(",")):
                found = row(layer, name, shape, m, arguments.seconds)
                identity = ("scheme", "experts", "intermediate", "hidden", "top_k", "m")
                rows = [r for r in rows if any(r[key] != found[key] for key in identity)] + [found]
                print(name, text, f"M={m}", found["median_us"], found["least_us"], flush=True)
            del layer
    report = {"machine": machine(), "isa": native.isa(), "rows": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
