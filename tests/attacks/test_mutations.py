"""Seeded mutations of valid checkpoints of every family: the right weight, or an error that says where. See README.md.

BITLINE_TEST_MUTATIONS is how many there are, 50,000 by default, of which `make test` runs a tenth; BITLINE_TEST_SEED, any text,
selects others.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import bases_gguf
import bases_more  # noqa: F401  (its families are among the bases once it is imported)
import corpus_float  # noqa: F401
import pytest
import torch
from bases import FAMILIES, PAIRS, gguf_bytes, llama_folder, model_tensors, safetensors_bytes, write
from mutate import corrupt_bytes, dumps, mutate_json, mutate_tensors, overwrite_bytes, seeded_rng
from outcomes import check_error, is_unneeded_refusal, outcome, replace_file, temporary_folder, time_limit

import bitline
from bitline.errors import BitlineError, OutOfMemoryError

TOTAL = int(os.environ.get("BITLINE_TEST_MUTATIONS", "50000"))
KINDS = ("config-values", "config-bytes", "header-values", "header-bytes", "tensors", "numbers", "data-bytes", "index")
GGUF_KINDS = ("header", "numbers", "bytes")
EACH = -(-TOTAL // (len(KINDS) * len(FAMILIES) + len(GGUF_KINDS) * len(bases_gguf.TYPES)))

ROUNDS = [pytest.param(max(EACH // 10, 1), id="tenth"), pytest.param(EACH, id="all", marks=pytest.mark.exhaustive)]


def _is_object(raw: bytes, *, config: bool = False) -> bool:
    """Whether this is a JSON object. Configs may hold NaN, which Python writes, headers may not."""
    try:
        return isinstance(json.loads(raw, parse_constant=None if config else int), dict)
    except (ValueError, RecursionError):
        return False


def _has_header(raw: bytes) -> bool:
    length = int.from_bytes(raw[:8], "little")
    return length <= len(raw) - 8 and _is_object(raw[8 : 8 + length])


def test_number_of_mutations():
    assert EACH * (len(KINDS) * len(FAMILIES) + len(GGUF_KINDS) * len(bases_gguf.TYPES)) >= TOTAL


Case = tuple[Path, dict[str, bool]]


def safetensors_cases(base: str, kind: str, folder: Path, rounds: int) -> Iterator[Case]:
    """Mutations of a base, one after the other in the same folder, and what an error must name."""
    tensors, quantization = FAMILIES[base]()
    write(folder, tensors, quantization)
    config, weights, index = folder / "config.json", folder / "model.safetensors", folder / "model.safetensors.index.json"
    settings, raw = config.read_bytes(), weights.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:length]), raw[length:]
    assert (error := outcome(folder)) is None, f"{base}: {error}"
    if kind == "index":
        names = [name for name in tensors if name != "__metadata__"]
        halves = {"a.safetensors": names[::2] + ["__metadata__"], "b.safetensors": names[1::2]}
        for file, part in halves.items():
            replace_file(folder / file, safetensors_bytes({name: tensors[name] for name in part if name in tensors}))
        shards = {"weight_map": {name: file for file, part in halves.items() for name in part if name in names}}
        weights.unlink()
    for i in range(rounds):
        rng, located = seeded_rng(base, kind, i), True
        if kind == "config-values":
            replace_file(config, dumps({"model_type": "llama", "quantization_config": mutate_json(quantization, rng)}))
        elif kind == "config-bytes":
            replace_file(config, changed := corrupt_bytes(settings, rng))
            located = _is_object(changed, config=True)
        elif kind == "header-values":
            changed = dumps(mutate_json(header, rng))
            located = _is_object(changed)
            replace_file(weights, struct.pack("<Q", len(changed)) + changed + data)
        elif kind == "header-bytes":
            replace_file(weights, changed := corrupt_bytes(raw, rng, length))
            located = _has_header(changed)
        elif kind == "tensors":
            replace_file(weights, safetensors_bytes(mutate_tensors(tensors, rng)))
        elif kind == "numbers":
            replace_file(weights, overwrite_bytes(raw, rng, length, rng.choice([1, 2, 4])))
        elif kind == "data-bytes":
            replace_file(weights, raw[:length] + corrupt_bytes(data, rng))
            located = False  # the file is shorter or longer than its header says
        else:
            replace_file(index, changed := dumps(mutate_json(shards, rng)) if i % 2 else corrupt_bytes(dumps(shards), rng))
            located = _is_object(changed)
        yield folder, {"located": located, "tensor": kind == "numbers", "exact": kind == "numbers"}


def gguf_cases(ggml: str, kind: str, folder: Path, rounds: int) -> Iterator[Case]:
    """The same for a GGUF file with a matrix of one type."""
    raw, start = bases_gguf.file(ggml)
    path = folder / "model.gguf"
    replace_file(path, raw)
    assert (error := outcome(path)) is None, f"{ggml}: {error}"
    for i in range(rounds):
        rng = seeded_rng("gguf", ggml, kind, i)
        if kind == "numbers":
            changed = overwrite_bytes(raw, rng, start, rng.choice([1, 2]))
        else:
            changed = corrupt_bytes(raw, rng, start if kind == "header" else None)
        replace_file(path, changed)
        yield path, {"located": len(changed) >= 24, "tensor": kind == "numbers", "exact": kind == "numbers"}


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", FAMILIES)
def test_safetensors(base, kind, rounds):
    with temporary_folder() as folder, time_limit():
        loaded = sum(check_mutation(path, **expected) for path, expected in safetensors_cases(base, kind, folder, rounds))
    if rounds == EACH:
        assert loaded < EACH or kind in ("numbers", "index"), "no mutation did anything"
        assert loaded or kind != "numbers", "no mutation was valid"


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("ggml", bases_gguf.TYPES)
def test_gguf(ggml, kind, rounds):
    with temporary_folder() as folder, time_limit():
        loaded = sum(check_mutation(path, **expected) for path, expected in gguf_cases(ggml, kind, folder, rounds))
    assert loaded or kind == "header" or rounds < EACH, "no mutation was valid"


def check_mutation(path: Path, *, located: bool, tensor: bool, exact: bool) -> bool:
    """Whether the checkpoint loads. exact: a refusal must be necessary."""
    error = outcome(path)
    if error is None:
        return True
    check_error(error, path, located=located, tensor=tensor)
    if exact and is_unneeded_refusal(path):
        raise AssertionError(f"refused although it is valid: {error}") from error
    return False


@pytest.mark.parametrize("rounds", ROUNDS)
def test_gguf_models(rounds, tmp_path):
    """A damaged header that still loads configures transformers: load_model has the same two outcomes."""
    entries, data = model_tensors()
    raw = gguf_bytes(PAIRS, entries, data)
    path = tmp_path / "model.gguf"
    for i in range(rounds * TOTAL // (500 * EACH)):
        path.write_bytes(corrupt_bytes(raw, seeded_rng("gguf model", i), len(raw) - len(data)))
        loads(path)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_model_configs(rounds, tmp_path):
    folder = llama_folder(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    for i in range(rounds * TOTAL // (500 * EACH)):
        rng = seeded_rng("config", i)
        changed = settings
        for _ in range(rng.choice([1, 1, 2])):
            key = rng.choice([k for k in settings if k != "quantization_config"])
            changed = changed | {key: mutate_json(changed[key], rng)}
        (folder / "config.json").write_text(json.dumps(changed))
        loads(folder)


def loads(path: Path) -> None:
    try:
        model = bitline.load_model(path, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    except OutOfMemoryError:
        raise AssertionError("allocated what the file claims") from None
    except BitlineError:
        return
    assert all(not t.is_meta for t in [*model.parameters(), *model.buffers()])
