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


def check_tokens(path: Path, **options: Any) -> None:
    """An engine with quantization="bitline" gives load_model's tokens."""
    assert served(path, quantization="bitline", **options) == expected(path)


def check_two_ranks(path: Path, monkeypatch: Any) -> None:
    """So do two ranks, a core each."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    check_tokens(path, tensor_parallel_size=2, distributed_executor_backend="mp")


def check_bfloat16(path: Path) -> None:
    """In bfloat16 an engine's tokens are nearly greedy ones."""
    assert regret(path, served(path, quantization="bitline", dtype="bfloat16")) < 0.1


def check_reload(path: Path, other: Path, addresses: Callable[[Any], list[int]]) -> None:
    """A running engine takes another checkpoint's weights and the first one's again; packed tensors stay where they are.

    addresses: Of a worker's packed tensors, which captured graphs hold.
    """
    with engine(path, quantization="bitline") as llm:
        first = generate(llm)
        (before,) = llm.collective_rpc(addresses)
        for source, tokens in ((other, expected(other)), (path, first)):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(source)})
            llm.reset_prefix_cache()
            assert generate(llm) == tokens
            assert llm.collective_rpc(addresses) == [before] and before
        assert expected(other) != first


def noisy(model: Any) -> Any:
    """The model, with noise added to its weights."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


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
