"""Perplexity, and the divergence of two models' predictions on one text, in the quantities of llama.cpp's perplexity tool."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitline.errors import InputError

_ROWS = 64  # positions whose distributions over the vocabulary are in memory at once, in float64


@dataclass(frozen=True)
class TokenScores:
    """What two models say of each scored token. Lists of one value a token; nll, nll_base and kld are in nats.

    Attributes:
        nll: Negative log-likelihood of the right token in the model.
        nll_base: The same in the base.
        kld: Kullback-Leibler divergence of the model's distribution from the base's, KL(base || model).
        same_top: Whether both models' likeliest tokens are the same.
        shift: The right token's probability in the model less that in the base.
    """

    nll: list[float]
    nll_base: list[float]
    kld: list[float]
    same_top: list[bool]
    shift: list[float]


@dataclass(frozen=True)
class Quality:
    """A model against a base on a text.

    Attributes:
        tokens: Scored tokens.
        perplexity: exp of the mean negative log-likelihood in the model; perplexity_error: one standard error of it.
        perplexity_base: The same in the base.
        log_ratio: ln(perplexity / perplexity_base); log_ratio_error: one standard error, the two being correlated.
        mean_kld: Mean divergence; mean_kld_error: one standard error.
        median_kld, kld_99, kld_999, max_kld: The median, the 99th and 99.9th percentile and the maximum.
        same_top: Share of tokens whose likeliest token is the same.
        rms_shift: Root mean square of the change of the right token's probability.
    """

    tokens: int
    perplexity: float
    perplexity_error: float
    perplexity_base: float
    log_ratio: float
    log_ratio_error: float
    mean_kld: float
    mean_kld_error: float
    median_kld: float
    kld_99: float
    kld_999: float
    max_kld: float
    same_top: float
    rms_shift: float


def chunks_of(ids: Tensor, context: int, count: int | None, bos: int | None) -> Tensor:
    """A text's token ids int64 [T] as rows [chunks, context], without the incomplete last one.

    bos: put in the place of each row's first token; None to leave it. InputError for a text shorter than one row.
    """
    rows = ids[: len(ids) // context * context].view(-1, context).clone()
    if not len(rows):
        raise InputError("the text is shorter than one chunk", found=f"{len(ids)} tokens", expected=f"at least {context}",
                         fix="give a longer text or a smaller context")  # fmt: skip
    if bos is not None:
        rows[:, 0] = bos
    return rows if count is None else rows[:count]


def score(model: Any, base: Any, row: Tensor) -> TokenScores:
    """Both models on one row of token ids int64 [T]: the tokens of its second half, each after all that precede it."""
    first = len(row) // 2
    with torch.inference_mode():
        ours, theirs = (m(row[None].to(m.device)).logits[0, first:-1].cpu() for m in (model, base))
    parts = list(_compare(ours, theirs, row[first + 1 :]))
    return TokenScores(*(torch.cat(column).tolist() for column in zip(*parts, strict=True)))


def _compare(ours: Tensor, theirs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Scores of logits [T, V] whose right tokens are targets [T], a few rows at a time."""
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        p, q = (torch.log_softmax(logits[rows].double(), -1) for logits in (theirs, ours))
        right = targets[rows, None]
        p_right, q_right = (log.gather(1, right).squeeze(1) for log in (p, q))
        # A token that the base rules out adds nothing, whatever the model says of it.
        kld = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum(-1)
        yield -q_right, -p_right, kld, p.argmax(-1) == q.argmax(-1), q_right.exp() - p_right.exp()


def summarize(scores: Sequence[TokenScores]) -> Quality:
    """The figures of all scored tokens."""
    nll, base, kld, shift = (
        torch.tensor([value for s in scores for value in getattr(s, name)], dtype=torch.float64)
        for name in ("nll", "nll_base", "kld", "shift")
    )
    same = [value for s in scores for value in s.same_top]
    perplexity = float(nll.mean().exp())
    return Quality(
        tokens=len(same), perplexity=perplexity, perplexity_error=perplexity * _standard_error(nll),
        perplexity_base=float(base.mean().exp()),
        log_ratio=float((nll - base).mean()), log_ratio_error=_standard_error(nll - base),
        mean_kld=float(kld.mean()), mean_kld_error=_standard_error(kld), median_kld=float(kld.quantile(0.5)),
        kld_99=float(kld.quantile(0.99)), kld_999=float(kld.quantile(0.999)), max_kld=float(kld.max()),
        same_top=sum(same) / len(same), rms_shift=float(shift.square().mean().sqrt()),
    )  # fmt: skip


def _standard_error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf
