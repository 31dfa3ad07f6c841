"""Greedy tokens of a checkpoint: from vLLM's engine, and from bitline.load_model."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import bitline

PROMPT = list(range(3, 13))
TOKENS = 12


@contextmanager
def engine(path: Path, **options: Any) -> Iterator[Any]:
    """A running engine; eager and in float32 unless asked otherwise. float32 so that other sums give the same tokens."""
    from vllm import LLM

    settings = {"enforce_eager": True, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "skip_tokenizer_init": True}
    llm = LLM(model=str(path), **(settings | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def generate(llm: Any) -> list[int]:
    """Greedy tokens of a running engine."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    return list(request.outputs[0].token_ids)


def served(path: Path, **options: Any) -> list[int]:
    """Greedy tokens of an engine of its own."""
    with engine(path, **options) as llm:
        return generate(llm)


def expected(path: Path, dtype: torch.dtype = torch.float32) -> list[int]:
    """Greedy tokens of bitline.load_model."""
    model = bitline.load_model(path, dtype=dtype)
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    return out[0, len(PROMPT) :].tolist()


def regret(path: Path, tokens: list[int]) -> float:
    """How far tokens are from greedy ones: the most by which a logit is below the largest, in standard deviations of the logits.

    For bfloat16, in which other sums give other tokens where two are close. The logits are bitline.load_model's in float32.
    """
    with torch.no_grad():
        logits = bitline.load_model(path, dtype=torch.float32)(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    below = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    return float((below / logits.std(-1)).max())


def rewritten(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint whose tensors and settings `change` edits."""
    folder.mkdir()
    settings = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors, settings)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
