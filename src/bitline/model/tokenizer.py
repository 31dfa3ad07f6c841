"""A checkpoint's tokenizer, and prompts as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bitline.checkpoint import Checkpoint
from bitline.errors import CheckpointError, InputError, summary_of
from bitline.model.gguf_metadata import use_parsed_header


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The transformers tokenizer of a checkpoint, from its folder or from the GGUF file's metadata."""
    from transformers import AutoTokenizer

    path = checkpoint.path
    try:
        if checkpoint.is_gguf:
            with use_parsed_header(checkpoint):
                return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        return AutoTokenizer.from_pretrained(path if path.is_dir() else path.parent, trust_remote_code=False)
    except Exception as error:  # each tokenizer backend raises its own types for a malformed file
        raise CheckpointError(
            "the checkpoint has no tokenizer that transformers can read", file=path,
            found=summary_of(error),
            expected="tokenizer.json or tokenizer.model beside the weights, or a tokenizer inside the GGUF file",
        ) from error  # fmt: skip


def encode(tokenizer: Any, prompt: str, *, chat: bool = False) -> torch.Tensor:
    """Token ids int64 [1, T] of a prompt. chat: format it as one user message with the tokenizer's chat template."""
    if chat:
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}])
    return _not_empty(tokenizer(prompt, return_tensors="pt")["input_ids"], prompt)


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> torch.Tensor:
    """Token ids int64 [1, T] of a conversation, up to where the model's answer begins. messages: {"role", "content"} of each."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the checkpoint's tokenizer has no chat template", fix="give the prompt as a text to continue")
    try:
        encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True)
    except Exception as error:  # a template is code of the checkpoint's author, run in jinja's sandbox
        raise CheckpointError(
            "the checkpoint's chat template cannot be used", file=tokenizer.name_or_path or None,
            found=f"{type(error).__name__}: {error}", fix="give the prompt as a text to continue",
        ) from error  # fmt: skip
    return _not_empty(encoded["input_ids"], messages[-1]["content"])


def _not_empty(ids: torch.Tensor, prompt: str) -> torch.Tensor:
    if ids.numel() == 0:
        raise InputError("the prompt has no tokens", found=repr(prompt), fix="give a prompt with some text")
    return ids
