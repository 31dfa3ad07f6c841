"""What several benchmarks of more than one layer share. Single layers are `bitline bench`'s, with benchmarks/grids/."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bitline import timing
from bitline.bench import scheme_of
from bitline.types import LinearSpec

# Measured on an H200: bytes/s of a read, seconds of its ramp-up, FLOP/s of a dense product in bf16.
READ, RAMP, RATE = 4.35e12, 2e-6, 790e12
COLD = 300e6  # bytes of copies which no GPU's cache holds

Calls = Sequence[Callable[[], Any]]


def layer_spec(scheme: str, n: int, k: int) -> LinearSpec:
    """The layer of a scheme of `bitline bench`; groups of 64 where K is no multiple of 128."""
    spec = scheme_of(scheme, n, k)
    return spec.replace(block=(1, 64)) if spec.block == (1, 128) and k % 128 else spec


def copies(size: int) -> int:
    """How many copies of so many bytes are cold."""
    return min(400, max(2, int(COLD / size) + 1))


def replay_us(calls: Calls, target_ms: float = 15, rounds: int = 5) -> float:
    """Microseconds of a call, the median of rounds of replays of a CUDA graph of all calls."""
    return 1e6 * statistics.median(timing.replay_seconds(calls, target_ms / 1e3, rounds))


def eager_us(call: Callable[[], Any], n: int = 300) -> float:
    """Microseconds of a plain call from Python on a GPU."""
    for _ in range(20):
        call()
    return 1e6 * timing.seconds_of([call] * n, torch.device("cuda"))
