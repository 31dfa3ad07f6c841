"""Decode steps of an 8B-class Llama on a GPU with query, key and value, gate and up as one layer each, against separate layers.

    python benchmarks/decoder_merged.py --compile inductor --out benchmarks/results/h200_decoder_merged.json

Models, timings and keys are those of decoder_gpu.py. Every scheme, merged and not, has a process of its own: all compile at once,
then each is timed alone. `prompt_difference`, `step_difference`: of the merged model's logits from the other's, relative, after
the prompt and after a step with the same token. Random weights amplify rounding: two bf16 models differ by a tenth, unrelated
ones by 1.4, and greedy tokens differ after a few steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import decoder_gpu as bench
import numpy
import torch
from _machine import machine

import bitline
from bitline.model import merge
from bitline.model.merge_weights import merge_weights
from bitline.model.weight_loader import replace_module

SCHEMES = {"W4A16": 128, "FP8_DYNAMIC": None}


def quantize(model: Any, scheme: str, *, merged: bool) -> None:
    """Replace the linear layers but the head by quantized ones, siblings by one layer if `merged`."""
    group = SCHEMES[scheme]
    layers = {name: m for name, m in bench.linears(model).items() if name != "lm_head"}
    weights = {name: bitline.quantize(m.weight, scheme, **({"group_size": group} if group else {})) for name, m in layers.items()}
    together: set[str] = set()
    for owner, parent in list(model.named_modules()):
        for leaves in merge.sibling_names(parent) if merged else ():
            names = [f"{owner}.{leaf}" for leaf in leaves]
            whole = merge_weights([weights[name] for name in names])
            assert whole is not None
            sizes = [weights[name].spec.n for name in names]
            merge.install(parent, leaves, sizes, bitline.QuantLinear(whole, act_dtype=torch.bfloat16))
            together |= set(names)
    for name, weight in weights.items():
        if name not in together:
            replace_module(model, name, bitline.QuantLinear(weight, act_dtype=torch.bfloat16))


class Timing:
    """A step of a model at one batch size, compiled and captured, ready to be timed."""

    def __init__(self, model: Any, batch: int, prompt: int, length: int, backend: str) -> None:
        device = model.model.embed_tokens.weight.device
        torch.manual_seed(1)
        ids = torch.randint(2, model.config.vocab_size, (batch, prompt), device=device)
        forward = torch.compile(model, backend=backend) if backend else None
        self.model, self.batch, self.decoder = model, batch, bench.Decoder(model, ids, length, forward)
        self.logits = [self.decoder.logits.float().cpu()]
        self.decoder.token.fill_(5)
        self.decoder.step()
        self.logits.append(self.decoder.logits.float().cpu())
        self.decoder.rewind()
        self.step = bench.captured(self.decoder.step, device)
        layers = list(bench.linears(model).values())
        xs = {k: torch.randn(batch, 1, k, device=device, dtype=model.dtype) for k in {m.in_features for m in layers}}
        calls = [(m, xs[m.in_features]) for m in layers]
        self.alone = bench.captured(lambda: [m(x) for m, x in calls], device)
        self.facts = {"batch": batch, "layers": len(layers), "linear_bytes": sum(bench.layer_bytes(m, batch) for m in layers)}

    def times(self, rounds: int) -> dict[str, Any]:
        """Milliseconds of a step and of its linear layers."""
        device = self.decoder.token.device
        step = 1e3 * self.decoder.seconds(self.step, rounds)
        linear = sorted(bench.timed(lambda: [self.alone() for _ in range(20)], device) / 20 for _ in range(rounds))[rounds // 2]
        return {**self.facts, "step_ms": round(step, 4), "linear_ms": round(1e3 * linear, 4)}


@torch.inference_mode()
def worker(scheme: str, merged: bool, options: dict[str, Any], barrier: Any, lock: Any, results: Any) -> None:
    """Make, quantize and compile a model; time it when all have compiled."""
    started = time.perf_counter()
    model = bench.llama(options["sizes"], options["device"])
    quantize(model, scheme, merged=merged)
    torch._dynamo.config.cache_size_limit = 64
    made = [Timing(model, batch, options["prompt"], options["length"], options["backend"]) for batch in options["batches"]]
    kernels = sorted({layer.choice.best.name for layer in model.modules() if isinstance(layer, bitline.QuantLinear)})
    print(f"{time.perf_counter() - started:.0f} s {scheme} merged={merged} compiled, {kernels}", flush=True)
    barrier.wait(options["patience"])
    for timing in made:
        with lock:
            row = {"scheme": scheme, "merged": merged, "kernels": kernels, **timing.times(options["rounds"])}
        print(row, flush=True)
        results.put((row, [t.numpy() for t in timing.logits]))


def measure(**options: Any) -> list[dict[str, Any]]:
    """A row for every scheme, merged and not, and batch size."""
    context = multiprocessing.get_context("spawn")
    variants = [(scheme, merged) for scheme in SCHEMES for merged in (False, True)]
    shared = context.Barrier(len(variants)), context.Lock(), context.Queue()
    processes = [context.Process(target=worker, args=(*variant, options, *shared)) for variant in variants]
    for process in processes:
        process.start()
    found = [shared[2].get(timeout=options["patience"] + 60) for _ in range(len(variants) * len(options["batches"]))]
    for process in processes:
        process.join()
    logits = {(row["scheme"], row["merged"], row["batch"]): values for row, values in found}
    for row, values in found:
        for name, a, b in zip(("prompt", "step"), values, logits[row["scheme"], False, row["batch"]], strict=True):
            row[f"{name}_difference"] = round(float(numpy.linalg.norm(a - b) / numpy.linalg.norm(b)), 4)
            assert row[f"{name}_difference"] < 0.5, row  # a NaN fails too
    return sorted((row for row, _ in found), key=lambda row: (row["scheme"], row["batch"], row["merged"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=bench.LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for the slowest to compile")
    parser.add_argument("--compile", default="", help="a backend of torch.compile for the step")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = {**bench.LLAMA_8B, "num_hidden_layers": options.layers}
    batches = tuple(map(int, options.batches.split(",")))
    rows = measure(
        sizes=sizes, device=options.device, batches=batches, prompt=128, length=256, rounds=options.rounds,
        backend=options.compile, patience=options.patience,
    )  # fmt: skip
    for row in rows:
        print(row, flush=True)
    if options.out:
        report = {"machine": machine(options.device), "sizes": sizes, "compiled": options.compile, "results": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
