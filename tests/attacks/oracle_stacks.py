"""Experts stacked in a module's own weight, [E, N, K] or [E, K, N], as one module per expert: see docs/formats.md."""

from __future__ import annotations

import math

import numpy as np
from oracle_files import SIZES, Files, Stored

_CODES = ("weight", "weight_packed")
_SCALES = ("weight_scale", "weight_scale_inv")
_SHARED = ("weight_shape", "pre_quant_scale")


def unstack(files: Files, dtypes: tuple[str, ...]) -> None:
    """Replace every stack whose tensors have an entry per expert by its slices."""
    for base in files.modules(*_CODES):
        parts = {s: t for s, t in files.module(base).items() if "." not in s}
        main = next((parts[s] for s in _CODES if s in parts), None)
        if main is None or len(main.shape) != 3 or main.dtype not in dtypes or not main.shape[0]:
            continue
        experts = main.shape[0]
        fits = [t.shape[:1] == (experts,) or math.prod(t.shape) == 1 or s in _SHARED for s, t in parts.items()]
        if not all(fits):
            continue
        transposed = _is_transposed(main, next((parts[s] for s in _SCALES if s in parts), None))
        for suffix, tensor in parts.items():
            del files.tensors[f"{base}.{suffix}"]
            for e in range(experts):
                part = _slice(tensor, suffix, e, experts)
                if transposed and suffix in ("weight", *_SCALES) and len(part.shape) == 2 and part.shape[1] != 1:
                    part = _transposed(part)
                files.tensors[f"{base}.{e}.{suffix}"] = part


def _is_transposed(codes: Stored, scale: Stored | None) -> bool:
    """Whether a stack is [E, K, N]: where the scales only fit that."""
    experts, rows, columns = codes.shape
    if scale is None or not rows or not columns:
        return False
    shape = scale.shape[1:] if scale.shape[:1] == (experts,) else scale.shape
    flat = [size for size in shape if size != 1]
    if len(flat) == 1:
        return flat[0] != rows and flat[0] == columns
    if len(flat) == 2 and codes.dtype == "U8":
        fits = flat[0] == rows and 2 * columns % flat[1] == 0
        return not fits and flat[1] == columns and 2 * rows % flat[0] == 0
    return False


def _slice(tensor: Stored, suffix: str, expert: int, experts: int) -> Stored:
    whole = (suffix == "weight_shape" and len(tensor.shape) == 1) or (tensor.shape == (1,) and experts == 1)
    if tensor.shape[:1] != (experts,) or whole:
        return tensor
    size = len(tensor.raw) // experts
    return Stored(tensor.dtype, tensor.shape[1:], tensor.raw[expert * size : (expert + 1) * size])


def _transposed(tensor: Stored) -> Stored:
    cells = np.frombuffer(tensor.raw, np.uint8).reshape(*tensor.shape, SIZES[tensor.dtype])
    return Stored(tensor.dtype, tensor.shape[::-1], cells.transpose(1, 0, 2).tobytes())
