"""Seeded mutations of valid checkpoints: of config values, headers, whole tensors and bytes."""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from typing import Any

import torch

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 128, 1 << 31, 1 << 63, 1 << 70, -(1 << 63), 0.5, 4.0,
    1e308, float("nan"), float("inf"), "", "4", "int", "float", "group", "channel", "tensor", "block", "token", "Linear",
    "re:.*", "re:(", "gptq", "awq", "gemm", "F16", "F32", "I32", "U8", "\x00", "é", [], [0], [1, 2], [32, 64], ["Linear"], [[]],
    {}, {"a": 1},
]  # fmt: skip
TEXTS = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\x00", b"\xff", b"1e999", b"NaN", b"null", b"-", b"9" * 40, b" " * 9]
# Bytes with a special meaning in some dtype: NaN, infinity, the largest, the smallest, one and zero.
SPECIAL_BYTES = [
    b"\x00\x7e", b"\x00\x7c", b"\xff\x7b", b"\x01\x00", b"\x00\x3c", b"\x00\x80", b"\x80\x7f", b"\xc0\x7f", b"\x7f", b"\xff",
    b"\x80", b"\x00", b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f", b"\x01\x00\x00\x00", b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00",
]  # fmt: skip


SEED = os.environ.get("BITLINE_TEST_SEED", "")  # any text; each gives another set of mutations


def seeded_rng(*facts: object) -> random.Random:
    """A generator seeded by these facts, the same in every process, unlike hash()."""
    return random.Random(zlib.crc32((SEED + repr(facts)).encode()))


def mutate_json(value: Any, rng: random.Random) -> Any:
    """One edit somewhere in a JSON value: another value, a key renamed, removed or added, an element removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.6:
            return value | {key: mutate_json(value[key], rng)}
        changed = dict(value)
        kept = changed.pop(key)
        if rng.random() < 0.5:
            changed[rng.choice([key.upper(), key + "x", key[:-1], "", rng.choice(list(value))])] = kept
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        operation = rng.randrange(3)
        return (
            value[:at]
            + ([mutate_json(value[at], rng)] if operation == 0 else [value[at]] * 2 if operation == 1 else [])
            + value[at + 1 :]
        )
    if type(value) is int and rng.random() < 0.4:
        return value + rng.choice([-1, 1, 8, -8, value, -2 * value, 1 << rng.randrange(70)])
    return rng.choice(VALUES)


def corrupt_bytes(raw: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """One to four corruptions within the first `end` bytes: bits flipped, bytes removed, inserted, swapped, or truncated."""
    out = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if not out:
            break
        at = rng.randrange(max(1, min(end or len(out), len(out))))
        operation = rng.randrange(7)
        if operation <= 1:
            out[at] ^= 1 << rng.randrange(8)
        elif operation == 2:
            del out[at : at + rng.choice([1, 2, 8, 40])]
        elif operation == 3:
            out[at:at] = rng.choice(TEXTS)
        elif operation == 4:
            del out[at:]
        elif operation == 5:
            out[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 0xFFFFFFFF, 1 << 31, rng.getrandbits(32)]))
        else:
            other = rng.randrange(len(out))
            out[at], out[other] = out[other], out[at]
    return bytes(out)


def overwrite_bytes(raw: bytes, rng: random.Random, begin: int = 0, step: int = 1) -> bytes:
    """Overwrite bytes from `begin` on, keeping the size: bits, bytes, SPECIAL_BYTES on multiples of `step`, runs, copies."""
    out, size = bytearray(raw), len(raw) - begin
    for _ in range(rng.choice([1, 1, 2, 4, 30]) if size > 0 else 0):
        at = begin + rng.randrange(size) // step * step
        operation = rng.randrange(5)
        if operation == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif operation == 1:
            out[at] = rng.randrange(256)
        elif operation == 2:
            new = rng.choice(SPECIAL_BYTES)[: len(out) - at]
            out[at : at + len(new)] = new
        elif operation == 3:
            run = min(rng.choice([4, 16, 64, size]), len(out) - at)
            out[at : at + run] = rng.choice([b"\x00", b"\xff", b"\x3c", b"\x88"]) * run
        else:
            run = min(rng.choice([2, 4, 32]), len(out) - at)
            source = begin + rng.randrange(size)
            part = bytes(out[source : source + run])
            out[at : at + len(part)] = part
    return bytes(out)


_VIEWS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]  # fmt: skip


def mutate_tensors(tensors: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One tensor removed, renamed, duplicated, swapped with another, reshaped, truncated, padded, or of another dtype."""
    out = dict(tensors)
    name = rng.choice([key for key in out if key != "__metadata__"])
    tensor = out[name]
    operation = rng.randrange(8)
    if operation == 0:
        del out[name]
    elif operation == 1:
        del out[name]
        base, _, suffix = name.rpartition(".")
        other = rng.choice([key.rpartition(".")[2] for key in tensors] + [suffix.upper(), suffix + "_inv", suffix[:-1], "weight"])
        out[rng.choice([f"{base}.{other}", f"{base}x.{suffix}", suffix, f".{suffix}", f"{name}.{suffix}"])] = tensor
    elif operation == 2:
        suffix = rng.choice(["weight", "bias", "g_idx", "qzeros", "scale", "zero", "input_scale"])
        out[f"{name.rpartition('.')[0]}.{suffix}"] = tensor
    elif operation == 3:
        other = rng.choice([key for key in out if key != "__metadata__"])
        out[name], out[other] = out[other], out[name]
    elif operation == 4:
        out[name] = reshaped(tensor, rng)
    elif operation == 5:
        dim = rng.randrange(max(1, tensor.dim()))
        cut = rng.choice([0, 1, tensor.shape[dim] - 1, tensor.shape[dim] // 2]) if tensor.dim() else 0
        out[name] = tensor.narrow(dim, 0, max(0, cut)).contiguous() if tensor.dim() else torch.zeros(0, dtype=tensor.dtype)
    elif operation == 6:
        if tensor.dim():
            dim = rng.randrange(tensor.dim())
            out[name] = _joined(tensor, rng.choice([tensor, tensor.narrow(dim, 0, min(1, tensor.shape[dim]))]), dim)
        else:
            out[name] = tensor.repeat(rng.choice([1, 2, 7]))
    else:
        dtype = rng.choice(_VIEWS)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        if rng.random() < 0.5 and raw.numel() % dtype.itemsize == 0:  # the same bytes as another dtype
            viewed = raw.view(dtype)
            out[name] = viewed.reshape(tensor.shape) if viewed.numel() == tensor.numel() else viewed
        else:
            out[name] = (tensor.float() if tensor.dtype.is_floating_point else tensor).to(dtype)
    return out


def reshaped(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values in another shape."""
    count = tensor.numel()
    operation = rng.randrange(5)
    if operation == 0:
        return tensor.reshape(-1)
    if operation == 1:
        return tensor.unsqueeze(rng.randrange(tensor.dim() + 1))
    if operation == 2 and tensor.dim() == 2:
        return tensor.t().contiguous()
    rows = rng.choice([size for size in (1, 2, 4, 8, 16, 32, 64, count) if size and count % size == 0] or [1])
    return tensor.reshape(rows, -1) if count else tensor.reshape(0, 3)


def _joined(one: torch.Tensor, two: torch.Tensor, dim: int) -> torch.Tensor:
    if one.dtype.itemsize == 1:
        return torch.cat((one.view(torch.uint8), two.view(torch.uint8)), dim).view(one.dtype)
    return torch.cat((one, two), dim)


def dumps(value: Any) -> bytes:
    """JSON as bytes, NaN included."""
    return json.dumps(value).encode()
