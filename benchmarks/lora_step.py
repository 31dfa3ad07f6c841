"""One training step of LoRA adapters on SmolLM2-135M: quantized weights against the same weights in plain linear layers.

    python benchmarks/lora_step.py [--tokens 64,256] [--dtype bfloat16] [--rounds 7] [--out FILE]

Forward, backward and AdamW of one row of tokens, adapters of rank 16 on all linear layers but the head. Both models are in one
process and take turns; medians. `ms`: of a step; `weights_mb`: parameters and packed weights, without gradients and optimizer.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _machine import machine
from peft import LoraConfig, get_peft_model
from torch import nn

import bitline
import bitline.hf
from bitline.model.packaged import fetch
from bitline.model.plan import quant_linears


def quantized(dtype: torch.dtype) -> Any:
    return bitline.load_model(fetch("smollm2"), dtype=dtype, native_step=False)


def plain(dtype: torch.dtype) -> Any:
    """The same weights, dequantized, in nn.Linear."""
    model = quantized(dtype)
    for name, layer in list(quant_linears(model)):
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        linear.weight = nn.Parameter(model.bitline_weights[name]().dequantize(dtype), requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, linear)
    return model


def megabytes(model: Any) -> float:
    packed = sum(m.packed_bytes() for m in model.modules() if hasattr(m, "packed_bytes"))
    return (packed + sum(p.nbytes for p in model.parameters())) / 1e6


class Trainee:
    """A model with adapters and its optimizer."""

    def __init__(self, model: Any, config: LoraConfig) -> None:
        self.weights_mb = megabytes(model)
        torch.manual_seed(0)
        self.model = get_peft_model(model, config).train()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def step(self, row: torch.Tensor) -> float:
        start = time.perf_counter()
        self.model(input_ids=row, labels=row).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="64,256")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dtype, common = getattr(torch, arguments.dtype), {"r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
    base = quantized(dtype)
    names = sorted({name.rpartition(".")[2] for name, _ in quant_linears(base)} - {"lm_head"})
    trainees = {"quantized": Trainee(base, bitline.hf.lora_config(base, **common))}
    trainees["plain"] = Trainee(plain(dtype), LoraConfig(**common, target_modules=names))
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        row = torch.randint(1000, 40000, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        times: dict[str, list[float]] = {name: [] for name in trainees}
        for _ in range(arguments.rounds + 1):
            for name, trainee in trainees.items():
                times[name].append(trainee.step(row))
        rows.append(
            {"tokens": tokens, **{name: {"ms": statistics.median(of[1:]), "least_ms": min(of)} for name, of in times.items()}}
        )
        print(rows[-1], flush=True)
    held = {name: trainee.weights_mb for name, trainee in trainees.items()}
    report = {"machine": machine(), "dtype": arguments.dtype, "weights_mb": held, "rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
