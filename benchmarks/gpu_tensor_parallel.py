"""A decoder of a 70B model's shapes over the GPUs of one machine, W4A16 g128, and the all-reduce of a token.

    torchrun --nproc-per-node 2 benchmarks/gpu_tensor_parallel.py [--layers 80] [--m 1,16,64] [--out FILE]

Random weights, equal in all layers; attention over 256 positions of a static cache; every rank has its heads and channels.
First rank 0 runs the whole decoder alone, then all ranks run their parts. `ms` is a step (RMSNorm, attention, MLP, sums over
ranks), and `linear_ms` its linear layers alone, each one captured CUDA graph. `sum_us`: `TensorParallel.sum` of M x 8192 bfloat16
values in a graph, `nccl_us` NCCL's all-reduce of them.
"""

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _machine import machine
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from bitline import QuantLinear, types
from bitline.parallel import TensorParallel
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD, CONTEXT = 8192, 28672, 64, 8, 128, 256


class Decoder:
    """The linear layers and caches of one of `world` ranks."""

    def __init__(self, layers: int, batch: int, world: int, tp: TensorParallel | None) -> None:
        self.tp, self.heads, self.kv_heads = tp, HEADS // world, KV_HEADS // world
        shapes = {
            "qkv": ((self.heads + 2 * self.kv_heads) * HEAD, HIDDEN), "o": (HIDDEN, self.heads * HEAD),
            "gate_up": (2 * INTERMEDIATE // world, HIDDEN), "down": (HIDDEN, INTERMEDIATE // world),
        }  # fmt: skip
        spec = LinearSpec(1, 1, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
        first = {name: QuantLinear(random_weight(spec.replace(n=n, k=k), 1, "cuda")) for name, (n, k) in shapes.items()}
        self.kernels = {name: layer.choice.best.name for name, layer in first.items()}
        self.layers = [first, *({name: copy.deepcopy(layer) for name, layer in first.items()} for _ in range(layers - 1))]
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.resize(batch)

    def resize(self, batch: int) -> None:
        """Caches and inputs of another batch."""
        self.cache = torch.randn(2, batch, self.kv_heads, CONTEXT, HEAD, device="cuda").bfloat16()
        self.x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
        widths = {name: layer.spec.k for name, layer in self.layers[0].items()}
        self.inputs = {name: torch.randn(batch, k, device="cuda").bfloat16() for name, k in widths.items()}

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.tp is None else self.tp.sum(y)

    def step(self) -> torch.Tensor:
        x, batch = self.x, self.x.shape[0]
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        for layer in self.layers:
            q, k, v = layer["qkv"](rms_norm(x, (HIDDEN,), self.norm)).view(batch, -1, 1, HEAD).split(sizes, 1)
            self.cache[0, :, :, -1:], self.cache[1, :, :, -1:] = k, v
            y = scaled_dot_product_attention(q, self.cache[0], self.cache[1], enable_gqa=True)
            x = x + self.sum(layer["o"](y.reshape(batch, -1)))
            gate, up = layer["gate_up"](rms_norm(x, (HIDDEN,), self.norm)).chunk(2, -1)
            x = x + self.sum(layer["down"](silu(gate) * up))
        return x

    def linears(self) -> None:
        for layer in self.layers:
            for name, module in layer.items():
                module(self.inputs[name])


def graph_ms(call: Any, rounds: int = 10) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, stop, times = torch.cuda.Event(True), torch.cuda.Event(True), []
    for _ in range(rounds + 2):
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--m", default="1,16,64")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    tp = TensorParallel.resolve("auto", torch.device("cuda"))
    assert tp is not None, "start it with torchrun"
    tp.prepare(torch.device("cuda"))
    batches = [int(m) for m in arguments.m.split(",")]
    rows: dict[int, dict[str, Any]] = {m: {"m": m, "layers": arguments.layers} for m in batches}
    kernels: dict[str, Any] = {}
    for world in (1, tp.world):
        if world > 1 or tp.rank == 0:
            decoder = Decoder(arguments.layers, 1, world, tp if world > 1 else None)
            kernels[f"tp{world}"] = decoder.kernels
            with torch.inference_mode():
                for m in batches:
                    decoder.resize(m)
                    rows[m][f"tp{world}"] = {"ms": graph_ms(decoder.step), "linear_ms": graph_ms(decoder.linears)}
            del decoder
            torch.cuda.empty_cache()
        dist.barrier()
    for m in batches:
        x = torch.randn(m * HIDDEN, device="cuda").bfloat16()
        rows[m]["sum_us"] = graph_ms(lambda x=x: [tp.sum(x) for _ in range(100)]) * 10
        rows[m]["nccl_us"] = graph_ms(lambda x=x: [dist.all_reduce(x) for _ in range(100)]) * 10
    if tp.rank == 0:
        report = {"machine": machine("cuda"), "world": tp.world, "kernels": kernels, "rows": list(rows.values())}
        print(json.dumps(report["rows"], indent=1))
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
