"""How many experts of a mixture a batch of tokens touches, and with how many tokens each."""

from __future__ import annotations


def active_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Expected number of experts that a batch of tokens touches, where each token's are equally likely."""
    return num_experts * (1.0 - (1.0 - min(top_k, num_experts) / num_experts) ** tokens)


def tokens_per_expert(num_experts: int, top_k: int, tokens: int) -> int:
    """Expected tokens that an active expert gets of a batch."""
    return max(1, round(tokens * top_k / active_experts(num_experts, top_k, tokens)))
