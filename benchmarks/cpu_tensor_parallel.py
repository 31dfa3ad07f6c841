"""Decoding of SmolLM2-135M (Q4_1, bfloat16) on CPUs at one rank and several, one thread each, and the sum of a layer.

    python benchmarks/cpu_tensor_parallel.py [--ranks 1,2] [--tokens 128] [--rounds 5] [--out FILE]

Starts the ranks itself. `tokens_per_second`: medians of rounds of greedy decoding after a prompt of five tokens, with the native
decode step and without it. `sum_us`: `TensorParallel.sum` of 576 bfloat16 values, two of which each layer takes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _machine import machine

import bitline
from bitline.cli.fetch import local_path
from bitline.model.generate import generate
from bitline.model.tokenizer import encode, load_tokenizer
from bitline.parallel import TensorParallel

PROMPT, HIDDEN = "The capital of France is", 576


def median_rate(model: Any, tokenizer: Any, tokens: int, rounds: int) -> float:
    """Decoded tokens a second."""
    ids = encode(tokenizer, PROMPT)
    run = lambda: generate(model, tokenizer, ids, max_new_tokens=tokens, stop=False).decode_tokens_per_second
    run()
    return statistics.median(run() for _ in range(rounds))


def sum_us(tp: TensorParallel, calls: int = 2000) -> float:
    """Of one sum."""
    x = torch.randn(HIDDEN).bfloat16()
    start = 0.0
    for i in range(calls + 100):
        start = time.perf_counter() if i == 100 else start
        tp.sum(x)
    return (time.perf_counter() - start) / calls * 1e6


def rank_main(tokens: int, rounds: int) -> None:
    """One of the ranks; prints a line of JSON."""
    torch.set_num_threads(1)
    tp = TensorParallel.resolve("auto", torch.device("cpu"))
    rates = {}
    for name, native_step in (("native_step", True), ("modules", False)):
        model = bitline.load_model(local_path("smollm2"), dtype=torch.bfloat16, tp=tp, native_step=native_step)
        rates[name] = round(median_rate(model, load_tokenizer(model.bitline_checkpoint), tokens, rounds), 1)
    found = {"ranks": tp.world if tp else 1, "tokens_per_second": rates, "sum_us": round(sum_us(tp), 1) if tp else None}
    if tp is None or tp.rank == 0:
        print(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.tokens, options.rounds)
        return
    results = []
    for ranks in map(int, options.ranks.split(",")):
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [
            sys.executable,
            *launcher,
            __file__,
            "--rank",
            "--tokens",
            str(options.tokens),
            "--rounds",
            str(options.rounds),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(results[-1], flush=True)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
