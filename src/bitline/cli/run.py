"""`bitline run`: load a model, generate text, report the plan, speed, memory and accuracy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from bitline import env
from bitline.checkpoint import open_checkpoint
from bitline.cli.console import err, out
from bitline.cli.fetch import local_path
from bitline.cli.options import device_of, dtype_of
from bitline.cli.render import layer_names, size, table
from bitline.model.embedding import QuantEmbedding
from bitline.model.generate import Sampling, generate
from bitline.model.layer_check import LayerCheck
from bitline.model.load import load_model
from bitline.model.plan import PlanRow, expert_stacks, plan, quant_linears
from bitline.model.tokenizer import encode, load_tokenizer
from bitline.model.transformers_logging import suppress_transformers_logging
from bitline.model.verify import check_layers
from bitline.parallel import TensorParallel
from bitline.platform import Platform
from bitline.select import Policy, short_name


@dataclass(frozen=True)
class RunOptions:
    """Options of the command. threads: of torch, 0 for its own choice. sampling: None for greedy decoding. expert_parallel: ranks
    have whole experts.
    """

    max_new_tokens: int
    device: str
    dtype: str
    policy: Policy
    chat: bool = False
    check: bool = True
    threads: int = 0
    sampling: Sampling | None = None
    expert_parallel: bool = False


@dataclass(frozen=True)
class Loaded:
    """A model ready to run. seconds: that loading it took."""

    network: Any
    tokenizer: Any
    path: Path
    device: torch.device
    seconds: float


def load(model: str, options: RunOptions) -> Loaded:
    """Load a model and its tokenizer, with a progress bar."""
    target, dtype_asked = device_of(options.device), dtype_of(options.dtype)
    if options.threads:
        torch.set_num_threads(options.threads)
    path = local_path(model)
    started = time.perf_counter()
    network = _load(path, target, dtype_asked, options)
    return Loaded(network, load_tokenizer(network.bitline_checkpoint), path, target, time.perf_counter() - started)


def run_report(model: str, prompt: str, options: RunOptions, *, quiet: bool) -> dict[str, Any]:
    """Run the model and return the report; print it on the way unless `quiet`, or on a rank other than the first."""
    quiet = quiet or env.launched_rank() > 0
    with suppress_transformers_logging():
        if not prompt.strip():  # whether that has tokens is the tokenizer's to say: ask it before the model is loaded
            encode(load_tokenizer(open_checkpoint(local_path(model))), prompt, chat=options.chat)
        loaded = load(model, options)
        network, tokenizer, target = loaded.network, loaded.tokenizer, loaded.device
        rows = plan(network)
        if not quiet:
            show_plan(rows, loaded)
        ids = encode(tokenizer, prompt, chat=options.chat)
        if not quiet:
            end = "\n\n" if options.chat else ""
            out.print(f"\n[bold]{escape(prompt)}[/]", end=end, highlight=False, soft_wrap=True)
        warm = _warm_up(network, tokenizer, ids, target)
        generation = generate(
            network, tokenizer, ids, max_new_tokens=options.max_new_tokens, sampling=options.sampling,
            on_text=None if quiet else print_text,
        )  # fmt: skip
        memory = weight_memory(network)
        checks = check_layers(network) if options.check else []
    if not quiet:
        _show_figures(generation, memory, loaded.seconds, warm, checks)
    return {
        "model": str(loaded.path), "tp": env.launched_ranks(), "device": str(target), "platform": str(Platform.detect(target)),
        "prompt": prompt,
        "text": generation.text, "prompt_tokens": generation.prompt_tokens, "new_tokens": generation.new_tokens,
        "load_seconds": loaded.seconds, "warm_up_seconds": warm, "first_token_seconds": generation.first_token_seconds,
        "decode_tokens_per_second": generation.decode_tokens_per_second, "memory_bytes": memory,
        "plan": [_plan_dict(r) for r in rows], "checks": [vars(c) | {"ok": c.ok} for c in checks],
    }  # fmt: skip


def print_text(text: str) -> None:
    """Print a part of the model's answer."""
    out.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def _load(path: Path, device: torch.device, dtype: torch.dtype | None, options: RunOptions) -> Any:
    ranks = TensorParallel.resolve("auto", device, expert_parallel=options.expert_parallel)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"))
    with Progress(*columns, console=err, transient=True, disable=env.launched_rank() > 0) as bar:
        task = bar.add_task(f"load {path.name}", total=None)
        return load_model(
            path,
            device=device,
            dtype=dtype,
            policy=options.policy,
            tp=ranks,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def weight_memory(network: Any) -> dict[str, int]:
    """Bytes of all weights in memory, and as they would be in bfloat16."""
    parameters = list(network.parameters())  # lists a shared parameter once
    held, bf16 = sum(p.nbytes for p in parameters), sum(2 * p.numel() for p in parameters)
    tied = set()
    for module in network.modules():
        if isinstance(module, QuantEmbedding):
            held, bf16 = held + module.packed_bytes(), bf16 + 2 * module.spec.n * module.spec.k
            tied.add(module.source[0])
    for _, module in quant_linears(network):
        held += module.packed_bytes()
        bf16 += 0 if module.source[0] in tied else 2 * module.spec.n * module.spec.k
    for _, stack in expert_stacks(network):
        held += stack.packed_bytes()
        bf16 += 2 * stack.num_experts * stack.spec.n * stack.spec.k
    return {"held": held, "bf16": bf16}


def _warm_up(network: Any, tokenizer: Any, ids: torch.Tensor, device: torch.device) -> float:
    """Seconds of generating sixteen tokens: on a GPU the first calls compile and load the kernels."""
    if device.type == "cpu":
        return 0.0
    started = time.perf_counter()
    generate(network, tokenizer, ids, max_new_tokens=16, stop=False)
    return time.perf_counter() - started


def _plan_dict(row: PlanRow) -> dict[str, Any]:
    runner = row.choice.runner_up
    return {
        "layers": len(row.names), "experts": row.experts, "example": row.names[0],
        "shape": [row.spec.n, row.spec.k], "format": row.format,
        "scheme": row.spec.scheme, "kernel": row.choice.best.name, "packed_bytes": row.packed_bytes,
        "runner_up": runner.name if runner else None, "lost_because": row.choice.lost_because, "degraded": row.choice.degraded,
        "note": row.choice.note,
    }  # fmt: skip


def show_plan(rows: list[PlanRow], loaded: Loaded) -> None:
    """Print which kernel runs each kind of layer, and why."""
    network, path, device = loaded.network, loaded.path, loaded.device
    out.print(f"[bold]{escape(path.name)}[/], activations {str(network.dtype).removeprefix('torch.')}", highlight=False)
    out.print(f"on {Platform.detect(device)}", highlight=False)
    if not rows:
        out.print("no quantized linear layer in this checkpoint: transformers runs all of it")
        return
    grid = table("layers", "N×K", "format", "kernel", "runner-up, and why it lost")
    for row in rows:
        shape, kernel = f"{row.spec.n}×{row.spec.k}", short_name(row.choice.best.name)
        shape = f"{row.experts} × {shape}" if row.experts else shape
        grid.add_row(layer_names(row.names), shape, row.format, kernel, row.choice.lost_because)
    out.print(grid)
    for row in rows:
        near, what = row.choice.nearest_fast, escape(layer_names(row.names))
        if row.choice.note:
            out.print(f"[yellow]note[/] {what}: {escape(row.choice.note)}", highlight=False)
        if row.choice.degraded and near:
            out.print(f"[yellow]degraded[/] {what}: {near.name} would be faster; {escape(near.verdict.reason)}", highlight=False)


def _show_figures(generation: Any, memory: dict[str, int], loaded: float, warm: float, checks: list[LayerCheck]) -> None:
    out.print("\n")
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        "time to first token", f"{generation.first_token_seconds * 1e3:.0f} ms ({generation.prompt_tokens} prompt tokens)"
    )
    grid.add_row("decode", f"{generation.decode_tokens_per_second:.1f} tokens/s ({generation.new_tokens} tokens)")
    ratio = memory["held"] / max(1, memory["bf16"])
    grid.add_row("weights", f"{size(memory['held'])} in memory, {size(memory['bf16'])} in bf16 ({ratio:.0%})")
    grid.add_row("loaded in", f"{loaded:.1f} s" + (f", kernels compiled and warmed up in {warm:.1f} s" if warm else ""))
    out.print(grid)
    if checks:
        out.print("one layer of each spec against the reference:")
        grid = table("layer", "kernel", "M", "max error", "allowed", "")
        for c in checks:
            mark = Text("ok", "green") if c.ok else Text("FAILED", "bold red")
            grid.add_row(c.layer, short_name(c.kernel), str(c.m), f"{c.error:.1e}", f"{c.allowed:.1e}", mark)
        out.print(grid)
