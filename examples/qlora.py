"""Fine-tune a quantized model on a CPU: LoRA adapters on SmolLM2-135M, whose weights stay in their 4-bit GGUF codes.

    pip install 'bitline[models,peft]'
    python examples/qlora.py --steps 16 --out adapter

The text is the beginning of the description of an installed package, a few rows of tokens that are trained on again and again:
the loss of each round falls. In float32, since torch's bfloat16 GEMM is slow on CPUs without instructions for it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

import bitline.hf
from bitline.model.packaged import fetch
from bitline.model.tokenizer import load_tokenizer


def load() -> tuple[Any, Any]:
    """The packaged model through transformers, and its tokenizer."""
    bitline.hf.install()
    path, config = fetch("smollm2"), bitline.hf.BitlineConfig(dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, quantization_config=config)
    return model, load_tokenizer(model.bitline_checkpoint)


def batches(tokenizer: Any, package: str, length: int) -> torch.Tensor:
    """A package's description as rows of tokens [B, length]."""
    text = importlib.metadata.metadata(package).get_payload()
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    return ids[: len(ids) // length * length].view(-1, length)


def train(model: Any, rows: torch.Tensor, steps: int, learning_rate: float) -> list[float]:
    """One row a step. -> the loss of each step."""
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate), []
    model.train()
    for step in range(steps):
        loss = model(input_ids=(row := rows[step % len(rows)][None]), labels=row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1:3}  loss {losses[-1]:.3f}")
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and save; returns the mean loss of each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--package", default="peft", help="whose description is the text")
    parser.add_argument("--out", type=Path, help="folder for the adapter")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model, tokenizer = load()
    model = get_peft_model(model, bitline.hf.lora_config(model, r=16, lora_alpha=32, task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    rows = batches(tokenizer, options.package, options.length)[: options.rows]
    losses = train(model, rows, options.steps, learning_rate=1e-3)
    rounds = [sum(losses[i : i + len(rows)]) / len(rows) for i in range(0, len(losses) // len(rows) * len(rows), len(rows))]
    print("mean loss of each round:", "  ".join(f"{loss:.3f}" for loss in rounds))
    if options.out:
        model.save_pretrained(options.out)
    return rounds


if __name__ == "__main__":
    main()
