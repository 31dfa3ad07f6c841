"""Text generation from a loaded model, greedy or sampled, streamed, with time to first token and decode throughput."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bitline import native
from bitline.errors import InputError
from bitline.model.known_modules import returns_output_of_head
from bitline.model.token_step import TokenStep
from bitline.model.verify import find_overflow
from bitline.parallel import GatherOutput


@dataclass(frozen=True)
class Generation:
    """The text generated for one prompt.

    first_token_seconds: from the call to the first new token. decode_tokens_per_second: of the tokens after the first.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    decode_tokens_per_second: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The same seed draws the same tokens, on every rank of tensor parallelism.

    temperature: divides the logits. top_k: only that many of the likeliest tokens; 0 allows all. top_p: only the likeliest
    tokens whose probabilities add up to this.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def generate(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    *,
    max_new_tokens: int = 128,
    on_text: Callable[[str], None] | None = None,
    stop: bool = True,
    sampling: Sampling | None = None,
) -> Generation:
    """The continuation of token ids int64 [1, T], greedy unless `sampling` says how to draw tokens.

    The model must not change before this returns.

    tokenizer: as `tokenizer.load_tokenizer` returns it. on_text: called with each chunk of text as soon as it is final. stop:
    end at an EOS token; False always generates max_new_tokens. Errors: InputError for a prompt that does not fit the context
    and for logits that are NaN or infinite.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and ids.shape[1] + max_new_tokens > limit:
        found = f"{ids.shape[1]} + {max_new_tokens} tokens"
        raise InputError("the prompt and the answer are longer than the model's context", found=found,
                         expected=f"at most {limit} tokens", fix="a shorter prompt or fewer new tokens")  # fmt: skip
    streamer = _make_streamer(tokenizer, on_text)
    device = next(b.device for b in model.buffers() if b.device.type != "meta")
    ids = ids.to(device)
    started = time.perf_counter()
    with torch.inference_mode(), native.adapted_threads():
        if sampling is None and _is_plain_greedy(model):
            new = _greedy(model, ids, max_new_tokens, _eos_tokens(model), streamer, stop)
        else:
            min_length = {} if stop else {"min_new_tokens": max_new_tokens}
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, streamer=streamer,
                **_sampling_options(sampling), pad_token_id=_pad_token(model, tokenizer),
                logits_processor=[_FiniteLogits(model)], **min_length,
            )  # fmt: skip
            new = out[0, ids.shape[1] :].tolist()
    times = streamer.times
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return Generation(
        tokenizer.decode(new, skip_special_tokens=True), ids.shape[1], len(new),
        times[0] - started if times else 0.0, rate, tuple(new),
    )  # fmt: skip


def _sampling_options(sampling: Sampling | None) -> dict[str, Any]:
    """Arguments of `model.generate`, after setting the seed."""
    if sampling is None:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    torch.manual_seed(sampling.seed)
    return {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}


# Generation config options that do not change greedy decoding to a given length.
_IGNORED_OPTIONS = frozenset((
    "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "do_sample", "temperature", "top_k", "top_p",
    "max_length", "max_new_tokens", "_from_model_config", "use_cache",
))  # fmt: skip


def _is_plain_greedy(model: Any) -> bool:
    """Whether each step of `model.generate` is a forward of one token with a dynamic cache and the argmax of its logits."""
    from transformers.generation import GenerationMixin

    config = model.generation_config
    options = {name for name, value in config.to_diff_dict().items() if value is not None and value is not False}
    return (
        options <= _IGNORED_OPTIONS
        and config.use_cache is not False
        and not model.config.is_encoder_decoder
        and type(model)._supports_default_dynamic_cache()
        and type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    )


def _greedy(model: Any, ids: torch.Tensor, count: int, eos_tokens: list[int], streamer: Any, stop: bool) -> list[int]:
    """The same tokens as `model.generate`, without its per-token overhead of 0.8 ms."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    # The last position as an index tensor: an int makes transformers slice the hidden states, and torch's matmul of such a
    # strided operand with an unquantized head copies the head first (0.7 s for 200 MB).
    has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep_last: dict[str, Any] = {}
    if has_logits_to_keep:
        keep_last = {"logits_to_keep": torch.tensor([ids.shape[1] - 1], device=ids.device)}
    head = _divided_head(model)
    suppressed = [] if stop else eos_tokens
    streamer.put(ids.cpu())
    new: list[int] = []
    next_ids, step = ids, None
    with nullcontext() if head is None else head.own_rows():
        while len(new) < count:
            found = None if step is None else step.logits(next_ids)
            if found is None:
                found = model(input_ids=next_ids, past_key_values=cache, use_cache=True, **keep_last).logits
            logits = found[0, -1].float()
            value, index = _best(logits, suppressed, head)
            if not math.isfinite(value.item()):
                whole = logits if head is None else head.tp.concatenate(logits, head.sizes)
                _check_logits(model, torch.cat((ids[0], ids.new_tensor(new)))[None], whole)
            new.append(int(index))
            if len(new) == 1:
                keep_last = {"logits_to_keep": 1} if has_logits_to_keep else {}
                step = TokenStep.of(model, cache)
            next_ids = index.view(1, 1)
            streamer.put(next_ids[0].cpu())
            if stop and new[-1] in eos_tokens:
                break
    streamer.end()
    return new


def _divided_head(model: Any) -> GatherOutput | None:
    """The head of a model on a tensor-parallel rank, where the largest logit of all ranks can be found without gathering them."""
    head = model.get_output_embeddings()
    if type(head) is GatherOutput and returns_output_of_head(model):
        return head
    return None


def _best(logits: torch.Tensor, suppressed: list[int], head: GatherOutput | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit, NaN if any is, and its token, the first one of equals.

    logits: [V], or those of this rank's rows of the head.
    """
    start = 0 if head is None else head.start
    if own := [token - start for token in suppressed if 0 <= token - start < logits.numel()]:
        logits[own] = -torch.inf
    if head is None:
        best = logits.max(0)
        return best.values, best.indices
    value, token = head.tp.best(logits, start)
    return value, token.long()


class _FiniteLogits:
    """`_check_logits` as a logits processor. A class, since transformers inspects a partial's signature: 0.4 ms per token."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return _check_logits(self.model, ids, logits)


def _check_logits(model: Any, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The logits themselves; NaN or +infinity is an InputError that names the first layer with a non-finite output."""
    if not bool(torch.isnan(logits).any() | (logits == torch.inf).any()):
        return logits
    found = find_overflow(model, ids)
    where = "no quantized layer" if found is None else f"{found.layer} ({found.bad} of {found.values} outputs)"
    raise InputError(
        "the model's logits are NaN or infinite", found=f"the first non-finite output in {where}, activations in {model.dtype}",
        fix="use bfloat16" if model.dtype == torch.float16 else "bitline inspect --scales names damaged scales",
    )  # fmt: skip


def _eos_tokens(model: Any) -> list[int]:
    """Ids of the end-of-sequence tokens."""
    found = model.generation_config.eos_token_id
    return found if isinstance(found, list) else [] if found is None else [found]


def _pad_token(model: Any, tokenizer: Any) -> int | None:
    """A padding token id. One prompt needs no padding; naming a token keeps transformers from warning about it."""
    eos = model.generation_config.eos_token_id or tokenizer.eos_token_id
    return eos[0] if isinstance(eos, list) else eos


def _make_streamer(tokenizer: Any, on_text: Callable[[str], None] | None) -> Any:
    from transformers import TextStreamer

    class TimedStreamer(TextStreamer):
        """TextStreamer that passes its text to `on_text` and records the time of each token."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []
            self._at_prompt = True

        def put(self, value: Any) -> None:
            if not self._at_prompt:
                self.times.append(time.perf_counter())
            self._at_prompt = False
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if on_text and text:
                on_text(text)

    return TimedStreamer()
