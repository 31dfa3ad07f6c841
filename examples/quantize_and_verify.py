"""A model rounded to 4 bits, verified against its files, and the experts of a mixture of experts packed as stacks.

pip install 'bitline[models]'
python examples/quantize_and_verify.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import bitline
from bitline.conversion import quantize_checkpoint

torch.manual_seed(0)
config = Qwen3MoeConfig(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=512,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, intermediate_size=256,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    original, quantized = Path(folder, "original"), Path(folder, "quantized")
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(original)
    report = quantize_checkpoint(original, quantized, scheme="W4A16", group_size=64)
    worst = max(report.layers, key=lambda layer: layer.rms_error)
    print(f"{len(report.layers)} layers, {report.nbytes / report.nbytes_after:.1f} times smaller")
    print(f"largest rms error {worst.rms_error:.3f} ({worst.name})")

    model = bitline.load_model(quantized)
    checks = bitline.verify(model)
    print(f"{len(checks)} outputs agree with the reference; the nearest to its tolerance is {checks[0].layer}")
    print(model.model.layers[0].mlp.experts)
    print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).tolist())
