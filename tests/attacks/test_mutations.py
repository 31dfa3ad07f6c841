"""Seeded mutations of small valid checkpoints: each loads as a weight of finite scales, or is a deliberate error."""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import corpus_float  # noqa: F401  (its families are among the bases once it is imported)
import pytest
import torch
from bases import ARRAY, FAMILIES, PAIRS, STRING, U32, gguf_bytes, model_tensors, pair, write

import bitline
from bitline.errors import BitlineError, OutOfMemoryError
from bitline.weight import QuantizedWeight

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 128, 1 << 31, 1 << 63, 1 << 70, -(1 << 63), 0.5, 4.0,
    1e308, float("nan"), float("inf"), "", "4", "int", "float", "group", "channel", "tensor", "block", "token", "Linear",
    "re:.*", "re:(", "gptq", "awq", "gemm", "F16", "F32", "I32", "U8", "\x00", "é", [], [0], [1, 2], [32, 64], ["Linear"], [[]],
    {}, {"a": 1},
]  # fmt: skip
ROUNDS = int(os.environ.get("BITLINE_TEST_MUTATIONS", "300"))  # more, for a longer search
TEXTS = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\x00", b"\xff", b"1e999", b"NaN", b"null", b"-", b"9" * 40, b" " * 9]


def survives(path: Path) -> bool:
    """True where every layer loads and is sound, False where a deliberate error says why not."""
    try:
        for record in bitline.open_checkpoint(path).layers():
            weight = record.weight()
            assert isinstance(weight, QuantizedWeight) and weight.spec == record.spec
            scales = weight.scales()
            assert weight.scale.dtype == torch.float8_e8m0fnu or bool(torch.isfinite(scales).all()) or weight.scale2 is not None
            assert weight.dequantize().shape == (record.spec.n, record.spec.k)
    except OutOfMemoryError:
        raise AssertionError("memory was asked for on the file's word") from None
    except BitlineError as error:
        assert str(error)
        return False
    return True


def edit(value: Any, rng: random.Random) -> Any:
    """One edit somewhere in a JSON value: another value, a key renamed, lost or added, an element lost or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.6:
            return value | {key: edit(value[key], rng)}
        changed = dict(value)
        kept = changed.pop(key)
        if rng.random() < 0.5:
            changed[rng.choice([key.upper(), key + "x", key[:-1], "", rng.choice(list(value))])] = kept
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        how = rng.randrange(3)
        return value[:at] + ([edit(value[at], rng)] if how == 0 else [value[at]] * 2 if how == 1 else []) + value[at + 1 :]
    if type(value) is int and rng.random() < 0.4:
        return value + rng.choice([-1, 1, 8, -8, value, -2 * value, 1 << rng.randrange(70)])
    return rng.choice(VALUES)


def scar(raw: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """One to four damages within the first `end` bytes: bits turned, bytes lost, put in, exchanged, or cut off."""
    out = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if not out:
            break
        at = rng.randrange(max(1, min(end or len(out), len(out))))
        how = rng.randrange(7)
        if how <= 1:
            out[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            del out[at : at + rng.choice([1, 2, 8, 40])]
        elif how == 3:
            out[at:at] = rng.choice(TEXTS)
        elif how == 4:
            del out[at:]
        elif how == 5:
            out[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 0xFFFFFFFF, 1 << 31, rng.getrandbits(32)]))
        else:
            other = rng.randrange(len(out))
            out[at], out[other] = out[other], out[at]
    return bytes(out)


def rng_of(*facts: object) -> random.Random:
    return random.Random(zlib.crc32(repr(facts).encode()))  # hash() is another one in every process


@pytest.mark.parametrize("kind", ["config-values", "config-bytes", "header-values", "header-bytes", "data"])
@pytest.mark.parametrize("base", FAMILIES)
def test_safetensors(base, kind, tmp_path):
    tensors, quantization = FAMILIES[base]()
    write(tmp_path, tensors, quantization)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    settings, raw = config.read_bytes(), weights.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:length]), raw[length:]
    assert survives(tmp_path)
    loaded = 0
    for i in range(ROUNDS):
        rng = rng_of(base, kind, i)
        if kind == "config-values":
            config.write_text(json.dumps({"model_type": "llama", "quantization_config": edit(quantization, rng)}))
        elif kind == "config-bytes":
            config.write_bytes(scar(settings, rng))
        elif kind == "header-values":
            text = json.dumps(edit(header, rng)).encode()
            weights.write_bytes(struct.pack("<Q", len(text)) + text + data)
        elif kind == "header-bytes":
            weights.write_bytes(scar(raw, rng, length))
        else:
            weights.write_bytes(raw[:length] + scar(data, rng))
        loaded += survives(tmp_path)
    assert loaded < ROUNDS, "no mutation did anything"


@pytest.mark.parametrize("part", range(4))
def test_gguf(part, tmp_path):
    entries, data = model_tensors()
    pairs = PAIRS + [pair("tokens", ARRAY, (STRING, ["a", "b", "é"])), pair("numbers", ARRAY, (U32, [1, 2, 3]))]
    raw = gguf_bytes(pairs, entries, data)
    path = tmp_path / "model.gguf"
    loaded = 0
    for i in range(4 * ROUNDS):
        path.write_bytes(scar(raw, rng_of("gguf", part, i), len(raw) - len(data) if i % 4 else None))
        loaded += survives(path)
    assert 0 < loaded < 4 * ROUNDS


def test_gguf_models(tmp_path):
    """A damaged header that still loads gives transformers a configuration: load_model keeps its promises there too."""
    entries, data = model_tensors()
    raw = gguf_bytes(PAIRS, entries, data)
    path = tmp_path / "model.gguf"
    for i in range(ROUNDS // 3):
        path.write_bytes(scar(raw, rng_of("gguf model", i), len(raw) - len(data)))
        loads(path)


def test_model_configs(tmp_path):
    from bases import llama_folder

    folder = llama_folder(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    for i in range(ROUNDS // 3):
        rng = rng_of("config", i)
        changed = settings
        for _ in range(rng.choice([1, 1, 2])):
            key = rng.choice([k for k in settings if k != "quantization_config"])
            changed = changed | {key: edit(changed[key], rng)}
        (folder / "config.json").write_text(json.dumps(changed))
        loads(folder)


def loads(path: Path) -> None:
    try:
        model = bitline.load_model(path, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    except OutOfMemoryError:
        raise AssertionError("memory was asked for on the file's word") from None
    except BitlineError:
        return
    assert all(not t.is_meta for t in [*model.parameters(), *model.buffers()])
