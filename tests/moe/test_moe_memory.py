"""Memory while experts are loaded: the packed model and about one stack."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, GROUP = 512, 512, 128
SLACK = 8 << 20

CHILD = """
import os, sys, threading, time
import torch
import bitline
from bitline.experts import ExpertStack

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
warm = bitline.load_model(sys.argv[1], dtype=torch.bfloat16)  # imports, thread pools and caches do not count
before, seen, done = anonymous(), [], threading.Event()

def watch():
    while not done.is_set():
        seen.append(anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
model = bitline.load_model(sys.argv[2], dtype=torch.bfloat16)
done.set()
thread.join()
stacks = [m for m in model.modules() if isinstance(m, ExpertStack)]
sizes = [s.packed_bytes() for s in stacks]
plain = sum(p.nbytes for p in model.parameters())
print(len(stacks), sum(sizes), max(sizes), plain, max(seen) - before, len(seen))
"""


def write(folder, layers, experts):
    """A compressed-tensors W4A16 Qwen3-MoE of random codes; attention is unquantized and small."""
    folder.mkdir()
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
                    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN, "head_dim": 32,
        "moe_intermediate_size": INNER, "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "num_experts": experts, "num_experts_per_tok": 2,
        "tie_word_embeddings": False, "dtype": "bfloat16", "quantization_config": quantization,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    floats = {"model.norm.weight": (HIDDEN,), "model.embed_tokens.weight": (64, HIDDEN), "lm_head.weight": (64, HIDDEN)}
    tensors = {}
    for i in range(layers):
        layer = f"model.layers.{i}"
        floats |= {f"{layer}.self_attn.{name}_proj.weight": (64, HIDDEN) for name in "qkv"}
        floats |= {f"{layer}.self_attn.o_proj.weight": (HIDDEN, 64), f"{layer}.mlp.gate.weight": (experts, HIDDEN)}
        floats |= {f"{layer}.self_attn.{name}_norm.weight": (32,) for name in "qk"}
        floats |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        for e in range(experts):
            for leaf, n, k in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
                stem = f"{layer}.mlp.experts.{e}.{leaf}_proj"
                tensors[f"{stem}.weight_packed"] = torch.randint(-(1 << 31), (1 << 31) - 1, (n, k // 8), dtype=torch.int32)
                tensors[f"{stem}.weight_scale"] = torch.full((n, k // GROUP), 0.01, dtype=torch.bfloat16)
                tensors[f"{stem}.weight_shape"] = torch.tensor([n, k])
    tensors |= {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in floats.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="anonymous memory is counted by Linux")
def test_peak_memory_is_the_packed_model_and_a_stack(tmp_path):
    small, large = write(tmp_path / "small", 1, 2), write(tmp_path / "large", 2, 64)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(small), str(large)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stacks, packed, largest, plain, peak, samples = map(int, done.stdout.split()[-6:])
    assert stacks == 4 and samples > 20 and packed > 2 * 64 * 3 * HIDDEN * INNER // 2
    assert peak <= packed + plain + largest + SLACK, f"{peak >> 20} MiB for {packed >> 20} MiB, of which {largest >> 20} a stack"
