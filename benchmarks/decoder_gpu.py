"""Decode steps of an 8B-class Llama on a GPU, W4A16 g128 against bf16: one captured CUDA graph per step, a static KV cache.

    python benchmarks/decoder_gpu.py --out benchmarks/results/h200_decoder_8b.json

Random weights in Llama-3-8B's shapes; the linear layers are quantized on the GPU and replaced as `load_model` does it, with the
head in bf16 and quantized. Before timing, the logits of a prompt and of a step are compared with those of the same model in
float32 with the dequantized weights: their error may be twice that of bf16 with the dequantized weights.

`step_ms`: a greedy step (forward, argmax, next token) replayed as a graph, the median of rounds. `linear_ms`: the linear layers
alone, in the model's order, as a graph. `limit_ms`: the sum over the linear layers of bytes / 4.35 TB/s + 2 us, the read
bandwidth and ramp-up measured on an H200; `bytes_ms` the same without the 2 us. `eager_ms`: a step without a graph. With
--compile the step is compiled before it is captured, as transformers' `generate` does with a static cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine import machine
from _measure import RAMP, READ
from torch import Tensor, nn

import bitline
from bitline.model.plan import plan
from bitline.model.weight_loader import replace_module

Modules = dict[str, nn.Module]
LLAMA_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


def llama(sizes: dict[str, Any], device: str) -> Any:
    """A random Llama in bf16, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)


class Decoder:
    """Greedy decoding after a prompt int64 [B, T] with a static KV cache of `length` positions; `forward` does the steps."""

    def __init__(self, model: Any, prompt: Tensor, length: int, forward: Any = None) -> None:
        from transformers import StaticCache

        self.forward, self.start, self.length = model if forward is None else forward, prompt.shape[1], length
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.columns = torch.arange(length, device=prompt.device).expand(prompt.shape[0], 1, 1, length)
        self.position = torch.full((1, 1), self.start, device=prompt.device)
        self.logits = model(input_ids=prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        self.first = self.logits.argmax(-1, keepdim=True)
        self.token = self.first.clone()

    def step(self) -> None:
        """Forward, argmax, next token, without host synchronization, so that it can be captured."""
        out = self.forward(
            input_ids=self.token, position_ids=self.position, attention_mask=self.columns <= self.position,
            past_key_values=self.cache, use_cache=True,
        )  # fmt: skip
        self.logits = out.logits[:, -1]
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    def rewind(self) -> None:
        """Back to the end of the prompt."""
        self.token.copy_(self.first)
        self.position.fill_(self.start)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.start)

    def seconds(self, step: Callable[[], None], rounds: int) -> float:
        """Seconds per step, the median of rounds from the end of the prompt to the end of the cache."""
        steps, times = self.length - self.start, []
        for _ in range(rounds):
            self.rewind()
            times.append(timed(lambda: [step() for _ in range(steps)], self.token.device) / steps)
        return statistics.median(times)


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, by CUDA events on a GPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """The call as a CUDA graph, after two runs that compile and allocate; on a CPU the call itself."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def linears(model: Any) -> Modules:
    """The linear layers, plain and quantized, in the order of a step."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | bitline.QuantLinear)}


def swap(model: Any, modules: Modules) -> None:
    for name, module in modules.items():
        replace_module(model, name, module)


def layer_bytes(module: Any, batch: int) -> int:
    """Bytes that a layer must move: weight, x and y."""
    n, k = module.out_features, module.in_features
    weight = module.spec.weight_bytes() if isinstance(module, bitline.QuantLinear) else 2 * n * k
    return int(weight + 2 * batch * (n + k))


def timings(
    model: Any, batch: int, prompt: int, length: int, rounds: int, eager_steps: int, backend: str = ""
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds of a step, of its linear layers, and their limits."""
    device = model.model.embed_tokens.weight.device
    layers = linears(model)
    torch.manual_seed(1)
    ids = torch.randint(2, model.config.vocab_size, (batch, prompt), device=device)
    torch._dynamo.reset()
    decoder = Decoder(model, ids, length, torch.compile(model, backend=backend) if backend else None)
    decoder.step()  # compiles
    eager = timed(lambda: [decoder.step() for _ in range(eager_steps)], device) / eager_steps
    decoder.rewind()
    step = decoder.seconds(captured(decoder.step, device), rounds)
    xs = {k: torch.randn(batch, 1, k, device=device, dtype=torch.bfloat16) for k in {m.in_features for m in layers.values()}}
    calls = [(m, xs[m.in_features]) for m in layers.values()]
    alone = captured(lambda: [m(x) for m, x in calls], device)
    times = [timed(lambda: [alone() for _ in range(20)], device) / 20 for _ in range(rounds)]
    linear = statistics.median(times)
    moved = sum(layer_bytes(m, batch) for m in layers.values())
    milli = {
        "step_ms": step, "linear_ms": linear, "rest_ms": step - linear, "eager_ms": eager,
        "limit_ms": moved / READ + RAMP * len(layers), "bytes_ms": moved / READ,
    }  # fmt: skip
    found = {key: round(1e3 * value, 4) for key, value in milli.items()}
    found |= {"tokens_per_second": round(batch / step, 1), "linear_over_limit": round(linear / found["limit_ms"] * 1e3, 3)}
    return {"batch": batch, "prompt": prompt, "cache": length, "layers": len(layers), "linear_bytes": moved, **found}


def kernel_times(model: Any, batch: int, prompt: int, length: int, steps: int = 5) -> dict[str, Any]:
    """Milliseconds and launches per kernel of a step, by torch's profiler; the largest first."""
    device = model.model.embed_tokens.weight.device
    decoder = Decoder(model, torch.randint(2, model.config.vocab_size, (batch, prompt), device=device), length)
    step = captured(decoder.step, device)
    decoder.rewind()
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    kernels = {e.key[:100]: [round(e.self_device_time_total / steps / 1e3, 4), e.count // steps] for e in events}
    return {"batch": batch, "kernels": kernels}


def logits(model: Any, ids: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a prompt's last token, and of one step after it, float32 [B, V] each."""
    decoder = Decoder(model, ids, ids.shape[1] + 1)
    first = decoder.logits.float()
    decoder.token.copy_(last)
    decoder.step()
    return first, decoder.logits.float()


def agreement(model: Any, exact: Any, quantized: Modules, dense: Modules, batch: int, prompt: int) -> dict[str, Any]:
    """Relative errors of both bf16 models' logits against `exact`; AssertionError where ours is more than twice the other's."""
    device = model.model.embed_tokens.weight.device
    torch.manual_seed(2)
    ids = torch.randint(2, model.config.vocab_size, (batch, prompt + 1), device=device)
    want = logits(exact, ids[:, :-1], ids[:, -1:])
    row: dict[str, Any] = {"batch": batch}
    for name, modules in (("bf16", dense), ("ours", quantized)):
        swap(model, modules)
        found = logits(model, ids[:, :-1], ids[:, -1:])
        for kind, a, b in zip(("prompt", "step"), found, want, strict=True):
            row[f"{name} {kind}"] = float((a - b).norm() / b.norm())
            row[f"{name} {kind} same token"] = float((a.argmax(-1) == b.argmax(-1)).float().mean())
    for kind in ("prompt", "step"):
        assert row[f"ours {kind}"] <= 2 * row[f"bf16 {kind}"], row  # a NaN fails too
    return row


def quantize(model: Any, scheme: str, group: int) -> tuple[Modules, Modules, Any]:
    """(quantized linear layers, bf16 ones with the dequantized weights, the model in float32 with the latter)."""
    dtype = model.dtype
    exact = copy.deepcopy(model).float()
    quantized: Modules = {}
    dense: Modules = {}
    for name, module in linears(model).items():
        weight = bitline.quantize(module.weight, scheme, group_size=group)
        quantized[name] = bitline.QuantLinear(weight, act_dtype=dtype, device=module.weight.device)
        dense[name] = module
        module.weight.copy_(weight.dequantize(dtype))
        exact.get_submodule(name).weight.copy_(weight.dequantize(torch.float32))
    return quantized, dense, exact


@torch.inference_mode()
def measure(
    sizes: dict[str, Any], device: str, *, batches: tuple[int, ...] = (1, 16), prompt: int = 128, length: int = 256,
    rounds: int = 5, eager_steps: int = 10, group: int = 128, profile: bool = False,
    backend: str = "", head: bool = True, only: str = "",
) -> dict[str, Any]:  # fmt: skip
    """All timings; see the module. head: also with a quantized head. only: see `main`."""
    started = time.perf_counter()
    note = lambda what: print(f"{time.perf_counter() - started:6.1f} s", what, flush=True)
    model = llama(sizes, device)
    note("model made")
    report: dict[str, Any] = {"sizes": sizes, "scheme": f"W4A16 g{group}", "compiled": backend, "runs": [], "agreement": []}

    def run(name: str) -> None:
        for batch in batches:
            row = {"model": name, **timings(model, batch, prompt, length, rounds, eager_steps, backend)}
            report["runs"].append(row)
            note(row)

    if only != "quantized":
        run("bf16")
    if only == "bf16":
        return report
    quantized, dense, exact = quantize(model, "W4A16", group)
    note("quantized")
    for batch in batches:
        report["agreement"].append(agreement(model, exact, quantized, dense, batch, prompt))
        note(report["agreement"][-1])
    del exact
    swap(model, {**quantized, "lm_head": dense["lm_head"]})
    report["kernels"] = sorted({row.choice.best.name for row in plan(model)})
    run("W4A16, head in bf16")
    if head:
        swap(model, quantized)
        run("W4A16, head too")
    if profile:  # last, since the profiler leaves its hooks behind
        report["profile"] = [kernel_times(model, batch, prompt, length) for batch in batches]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", default="", help="a backend of torch.compile for the step, inductor say (minutes)")
    parser.add_argument("--plain-head", action="store_true", help="do not time the model with a quantized head")
    parser.add_argument("--only", default="", choices=("", "bf16", "quantized"), help="time only this model")
    parser.add_argument("--profile", action="store_true", help="time each kernel of a step with torch's profiler")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = {**LLAMA_8B, "num_hidden_layers": options.layers}
    report = {"machine": machine(options.device)}
    batches = tuple(map(int, options.batches.split(",")))
    chosen = {"rounds": options.rounds, "profile": options.profile, "backend": options.compile}
    chosen |= {"head": not options.plain_head, "only": options.only}
    report |= measure(sizes, options.device, batches=batches, **chosen)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
