"""Time of `bitline inspect` on large models: headers of real size, tensor data as holes in sparse files.

    python benchmarks/inspect_speed.py --out benchmarks/results/NAME.json

The checkpoints are synthetic, in the temporary directory: shards with complete headers and the small tensors that readers look
at (g_idx, weight_shape). Codes and scales are never written, so a file of 40 GB takes no disk space. Seconds are the median over
several processes, from the end of torch's import to the last line of output; files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _machine import machine

LLAMA_70B = {
    "self_attn.q_proj": (8192, 8192), "self_attn.k_proj": (1024, 8192), "self_attn.v_proj": (1024, 8192),
    "self_attn.o_proj": (8192, 8192), "mlp.gate_proj": (28672, 8192), "mlp.up_proj": (28672, 8192),
    "mlp.down_proj": (8192, 28672),
}  # fmt: skip
ITEMSIZE = {"I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F8_E4M3": 1}

Tensors = Iterator[tuple[str, str, tuple[int, ...], torch.Tensor | None]]  # name, dtype, shape, data or None for a hole
LinearTensors = Callable[[str, int, int], Tensors]  # of a module's name, N and K


def gptq(module: str, n: int, k: int) -> Tensors:
    yield f"{module}.qweight", "I32", (k // 8, n), None
    yield f"{module}.qzeros", "I32", (k // 128, n // 8), None
    yield f"{module}.scales", "F16", (k // 128, n), None
    yield f"{module}.g_idx", "I32", (k,), torch.arange(k, dtype=torch.int32) // 128


def packed(module: str, n: int, k: int) -> Tensors:
    yield f"{module}.weight_packed", "I32", (n, k // 8), None
    yield f"{module}.weight_scale", "BF16", (n, k // 128), None
    yield f"{module}.weight_shape", "I64", (2,), torch.tensor([n, k])


def fp8(module: str, n: int, k: int) -> Tensors:
    yield f"{module}.weight", "F8_E4M3", (n, k), None
    yield f"{module}.weight_scale_inv", "F32", (-(-n // 128), -(-k // 128)), None


def llama(linear: LinearTensors, layers: int) -> Tensors:
    for i in range(layers):
        for module, (n, k) in LLAMA_70B.items():
            yield from linear(f"model.layers.{i}.{module}", n, k)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{norm}.weight", "BF16", (8192,), None


def experts(linear: LinearTensors, layers: int, count: int) -> Tensors:
    for i in range(layers):
        for e in range(count):
            for name, shape in (("gate_proj", (2048, 7168)), ("up_proj", (2048, 7168)), ("down_proj", (7168, 2048))):
                yield from linear(f"model.layers.{i}.mlp.experts.{e}.{name}", *shape)


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
CT = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*mlp[.]gate$"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
MODELS = {
    "GPTQ, 70B's shapes": (GPTQ, lambda: llama(gptq, 34), 15),
    "compressed-tensors W4A16, 70B's shapes": (CT, lambda: llama(packed, 44), 15),
    "FP8 128 x 128, 70B's shapes": (FP8, lambda: llama(fp8, 63), 15),
    "FP8 128 x 128, experts of DeepSeek-V3": (FP8, lambda: experts(fp8, 40, 256), 160),
}


def write(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int) -> int:
    """Write a sparse checkpoint folder. Returns the number of tensors."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    listed = list(tensors)
    index = {}
    for s in range(shards):
        shard = listed[len(listed) * s // shards : len(listed) * (s + 1) // shards]
        name, offset, header = f"model-{s + 1:05}-of-{shards:05}.safetensors", 0, {}
        for tensor, dtype, shape, _ in shard:
            size = ITEMSIZE[dtype] * torch.Size(shape).numel()
            header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for tensor, _, _, data in shard:
                if data is not None:
                    file.seek(8 + len(raw) + header[tensor]["data_offsets"][0])
                    file.write(data.numpy().tobytes())
            file.truncate(8 + len(raw) + offset)
        index |= dict.fromkeys(header, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return len(listed)


CHILD = """
import sys, time
import torch
started = time.perf_counter()
from bitline.cli.main import app
app(["inspect", sys.argv[1]], standalone_mode=False)
print(time.perf_counter() - started, file=sys.stderr)
"""


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    """Median seconds of the command after torch's import, and of the process from start to exit."""
    command, process = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, check=True)
        process.append(time.perf_counter() - started)
        command.append(float(done.stderr.splitlines()[-1]))
    return {"seconds": statistics.median(command), "process_seconds": statistics.median(process)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = {}
    for name, (config, tensors, shards) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            count = write(Path(folder), config, tensors(), shards)
            time.sleep(0.1)
            rows[name] = {"tensors": count, "files": shards, **measure(Path(folder), options.repeats)}
        print(name, json.dumps(rows[name]))
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
