"""Text from a loaded model: tokenizer, streaming, and the figures that people compare."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bitline.checkpoint import Checkpoint
from bitline.errors import CheckpointError, InputError
from bitline.model import decode_step as native_step
from bitline.model.gguf_names import header
from bitline.model.verify import find_overflow


@dataclass(frozen=True)
class Generation:
    """What one prompt gave: text, token counts, seconds to the first token and tokens per second after it."""

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    decode_tokens_per_second: float
    token_ids: tuple[int, ...]


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's own tokenizer, out of its folder or out of the GGUF file."""
    from transformers import AutoTokenizer

    path = checkpoint.path
    try:
        if checkpoint.is_gguf:
            with header(checkpoint):
                return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        return AutoTokenizer.from_pretrained(path if path.is_dir() else path.parent, trust_remote_code=False)
    except Exception as error:  # tokenizer files come in every kind of broken, and each backend raises its own
        raise CheckpointError(
            "the checkpoint has no tokenizer that transformers can read", file=path,
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            expected="tokenizer.json or tokenizer.model beside the weights, or a tokenizer inside the GGUF file",
        ) from error  # fmt: skip


def encode(tokenizer: Any, prompt: str, *, chat: bool = False) -> torch.Tensor:
    """Token ids int64 [1, T] of a text to continue, or with `chat` of one user message in the tokenizer's own template."""
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError("the checkpoint's tokenizer has no chat template", fix="give the prompt as a text to continue")
        message = [{"role": "user", "content": prompt}]
        try:
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
                "input_ids"
            ]
        except Exception as error:  # a template is a program of the checkpoint's author, run in jinja's sandbox
            raise CheckpointError(
                "the checkpoint's chat template cannot be used", file=tokenizer.name_or_path or None,
                found=f"{type(error).__name__}: {error}", fix="give the prompt as a text to continue",
            ) from error  # fmt: skip
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.numel() == 0:
        raise InputError("the prompt has no tokens", found=repr(prompt), fix="give a prompt with some text")
    return ids


def generate(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    *,
    max_new_tokens: int = 128,
    on_text: Callable[[str], None] | None = None,
    stop: bool = True,
) -> Generation:
    """Greedy text. `on_text` gets each piece as soon as it is final. `stop=False` goes on past the end of the answer."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and ids.shape[1] + max_new_tokens > limit:
        found = f"{ids.shape[1]} + {max_new_tokens} tokens"
        raise InputError("the prompt and the answer are longer than the model's context", found=found,
                         expected=f"at most {limit} tokens", fix="a shorter prompt or fewer new tokens")  # fmt: skip
    streamer = _streamer(tokenizer, on_text)
    device = next(b.device for b in model.buffers() if b.device.type != "meta")
    ids = ids.to(device)
    started = time.perf_counter()
    with torch.inference_mode():
        if _is_plain(model):
            new = _greedy(model, ids, max_new_tokens, _stops(model), streamer, stop)
        else:
            length = {} if stop else {"min_new_tokens": max_new_tokens}
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer,
                temperature=None, top_p=None, top_k=None, pad_token_id=_pad(model, tokenizer),
                logits_processor=[_Check(model)], **length,
            )  # fmt: skip
            new = out[0, ids.shape[1] :].tolist()
    times = streamer.times
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return Generation(
        tokenizer.decode(new, skip_special_tokens=True), ids.shape[1], len(new),
        times[0] - started if times else 0.0, rate, tuple(new),
    )  # fmt: skip


# What a generation config may say that changes nothing here: greedy text, of our own length.
_HARMLESS = frozenset((
    "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "do_sample", "temperature", "top_k", "top_p",
    "max_length", "max_new_tokens", "_from_model_config", "use_cache",
))  # fmt: skip


def _is_plain(model: Any) -> bool:
    """Whether each step of `model.generate` is a forward of one token with an ordinary cache, and the largest logit."""
    from transformers.generation import GenerationMixin

    config = model.generation_config
    asked = {name for name, value in config.to_diff_dict().items() if value is not None and value is not False}
    return (
        asked <= _HARMLESS
        and config.use_cache is not False
        and not model.config.is_encoder_decoder
        and type(model)._supports_default_dynamic_cache()
        and type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    )


def _greedy(model: Any, ids: torch.Tensor, count: int, stops: list[int], streamer: Any, stop: bool) -> list[int]:
    """What `model.generate` does for a plain model, without most of its bookkeeping: 0.8 ms a token."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    native_step.make_room(model, cache)
    # The last position as an index: as a number it is a slice of the hidden states, whose rows lie apart, and torch's product of
    # such a one with a plain head copies the head first (0.7 s for 200 MB).
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    last: dict[str, Any] = {"logits_to_keep": torch.tensor([ids.shape[1] - 1], device=ids.device)} if takes else {}
    avoid = [token for token in stops if token < model.config.get_text_config().vocab_size]
    streamer.put(ids.cpu())
    new: list[int] = []
    step = ids
    while len(new) < count:
        scores = model(input_ids=step, past_key_values=cache, use_cache=True, **last).logits[0, -1].float()
        if not stop:
            scores[avoid] = -torch.inf
        best = scores.max(0)  # NaN where there is one
        if not math.isfinite(best.values.item()):
            _check_logits(model, torch.cat((ids[0], ids.new_tensor(new)))[None], scores)
        new.append(int(best.indices))
        last = {"logits_to_keep": 1} if takes else {}
        step = best.indices.view(1, 1)
        streamer.put(step[0].cpu())
        if stop and new[-1] in stops:
            break
    streamer.end()
    return new


class _Check:
    """A logits processor; of a class, since transformers takes 0.4 ms a token to look at the signature of a partial."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return _check_logits(self.model, ids, scores)


def _check_logits(model: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The scores as they are; where they hold no numbers an InputError names the first layer that gave none."""
    if not bool(torch.isnan(scores).any() | (scores == torch.inf).any()):
        return scores
    found = find_overflow(model, ids)
    where = "no quantized layer" if found is None else f"{found.layer} ({found.bad} of {found.values} outputs)"
    raise InputError(
        "the model's outputs are no numbers", found=f"the first in {where}, inputs in {model.dtype}",
        fix="use bfloat16" if model.dtype == torch.float16 else "bitline inspect --scales names scales that are damaged",
    )  # fmt: skip


def _stops(model: Any) -> list[int]:
    """Tokens that end a text."""
    found = model.generation_config.eos_token_id
    return found if isinstance(found, list) else [] if found is None else [found]


def _pad(model: Any, tokenizer: Any) -> int | None:
    """Padding never happens with one prompt; naming a token keeps transformers from warning about it."""
    eos = model.generation_config.eos_token_id or tokenizer.eos_token_id
    return eos[0] if isinstance(eos, list) else eos


def _streamer(tokenizer: Any, on_text: Callable[[str], None] | None) -> Any:
    from transformers import TextStreamer

    class Timed(TextStreamer):
        """TextStreamer that hands its text over and notes when each token came."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []
            self._prompt = True

        def put(self, value: Any) -> None:
            if not self._prompt:
                self.times.append(time.perf_counter())
            self._prompt = False
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if on_text and text:
                on_text(text)

    return Timed()
