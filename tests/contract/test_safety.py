"""The contract, sentences 1 to 8: what reading an untrusted checkpoint never does."""

from __future__ import annotations

import ast
import json
import struct
import sys
from pathlib import Path

import bases_gguf
import bases_more  # noqa: F401  (its families are among the bases once it is imported)
import corpus_float  # noqa: F401
import corpus_gguf_types  # noqa: F401
import corpus_memory  # noqa: F401
import corpus_variants  # noqa: F401
import pytest
import torch
from bases import ARRAY, FAMILIES, LAYER, STRING, gguf_bytes, gptq, one_matrix, pair, write
from corpus import ATTACKS, EVIL, PICKLE
from must import must
from mutate import mutate_tensors, seeded_rng
from outcomes import address_space_limit, check_error, memory_limit, outcome, replace_file, temporary_folder, time_limit

import bitline
from bitline import CheckpointError, checkpoint, formats
from bitline.formats.gguf.source import GGUFSource
from bitline.formats.gptq_awq.gptq import GPTQReader
from bitline.formats.io import mapped_file, safetensors_source
from bitline.formats.io.safetensors_source import SafetensorsSource

READING = [*sorted(Path(formats.__path__[0]).rglob("*.py")), Path(checkpoint.__file__)]
SMALL_ATTACKS = [attack for attack in ATTACKS if not (attack.model or attack.huge) and attack.name != "unreadable"]


def read(path: Path) -> dict[str, bitline.QuantizedWeight]:
    return {record.name: record.weight() for record in bitline.open_checkpoint(path).layers()}


@must(1)
def test_no_code_of_the_checkpoint_runs(tmp_path, monkeypatch):
    tensors, config = gptq()
    auto = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoQuantizer"), "evil.Evil")
    write(tmp_path, tensors, config=json.dumps({"auto_map": auto, "quantization_config": config | {"auto_map": auto}}).encode())
    for name in ("evil.py", "quantization_config.py", "gptq.py", "conftest.py", "torch.py"):
        (tmp_path / name).write_text(EVIL)
    for name in ("pytorch_model.bin", "model.pt", "optimizer.ckpt"):
        (tmp_path / name).write_bytes(PICKLE)
    monkeypatch.chdir(tmp_path)
    assert read(tmp_path)
    assert not (tmp_path / "owned").exists() and not {"evil", "gptq"} & sys.modules.keys()
    for name in ("pytorch_model.bin", "model.pt", "optimizer.ckpt"):
        with pytest.raises(CheckpointError, match="pickle is never loaded"):
            bitline.open_checkpoint(tmp_path / name)


@must(1)
@pytest.mark.parametrize("file", READING, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_readers_cannot_run_code(file):
    """No pickle, no eval, and no import by a name out of a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "marshal", "shelve", "runpy", "subprocess", "code", "ctypes"} & set(names)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile", "__import__", "torch.load", "getattr(torch, name)")
            if called.endswith("import_module"):
                assert ast.unparse(node.args[0]).startswith(("'bitline.formats.", "f'bitline.formats.")), called


@must(2)
@pytest.mark.parametrize("base", FAMILIES)
def test_the_right_weight_or_a_checkpoint_error(base):
    """With tensors replaced at random; tests/attacks has tens of thousands of these."""
    tensors, config = FAMILIES[base]()
    with temporary_folder() as folder, time_limit():
        assert outcome(write(folder, tensors, config)) is None
        for i in range(6):
            folder.joinpath("model.safetensors").unlink()
            outcome(write(folder, mutate_tensors(tensors, seeded_rng("contract", base, i)), config))


@must(2)
@pytest.mark.parametrize("kind", bases_gguf.TYPES)
def test_the_right_weight_of_every_ggml_type(kind, tmp_path):
    replace_file(tmp_path / "model.gguf", bases_gguf.file(kind)[0])
    assert outcome(tmp_path / "model.gguf") is None


@must(2)
@pytest.mark.parametrize(
    "error", [KeyError("a"), TypeError("a"), OverflowError("a"), RecursionError("a"), IndexError("a")], ids=repr
)
@pytest.mark.parametrize("at", ["layers", "weight"])
def test_an_exception_in_a_reader_is_a_checkpoint_error(at, error, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(GPTQReader if at == "layers" else SafetensorsSource, "layers" if at == "layers" else "read", fail)
    tensors, config = FAMILIES["gptq_rows"]()
    with pytest.raises(CheckpointError, match="cannot be read as what it says it is"):
        read(write(tmp_path, tensors, config))


@must(3)
def test_an_error_says_where_and_what(tmp_path):
    errors = 0
    for i, attack in enumerate(SMALL_ATTACKS[::5]):
        folder = tmp_path / str(i)
        folder.mkdir()
        path = attack.build(folder)
        try:
            with time_limit():
                read(path)
        except CheckpointError as error:
            errors += 1
            check_error(error, folder, tensor=attack.tensor is not None, located=False)
            assert attack.tensor is None or error.tensor == attack.tensor
    assert errors > 100


@must(4)
@pytest.mark.parametrize("attack", [a for a in SMALL_ATTACKS if "endless" in a.name or "pipe" in a.name], ids=lambda a: a.name)
def test_reading_ends(attack, tmp_path):
    with time_limit(30):
        path = attack.build(tmp_path)
        try:
            read(path)
        except CheckpointError:
            assert attack.harmless is not True


def _header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


M = 1 << 20
OVERSIZED = {
    "header-of-lists": lambda f: (f / "model.safetensors").write_bytes(_header(b'{"a":[' + b"[]," * (8 * M) + b"[]]}")),
    "header-of-objects": lambda f: (f / "model.safetensors").write_bytes(_header(b'{"a":[' + b"{}," * (8 * M) + b"{}]}")),
    "header-of-keys": lambda f: (f / "model.safetensors").write_bytes(
        _header(b"{" + b",".join(b'"%x":0' % i for i in range(2 * M)) + b"}")
    ),
    "header-of-4-byte-characters": lambda f: (f / "model.safetensors").write_bytes(
        _header('{"__metadata__":{"a":"\U0001f600'.encode() + b"a" * (30 * M) + b'"}}')
    ),
    "header-of-4-byte-characters-escaped": lambda f: (f / "model.safetensors").write_bytes(
        _header(b'{"__metadata__":{"a":"\\ud83d\\ude00' + b"a" * (30 * M) + b'"}}')
    ),
    "config-of-lists": lambda f: (f / "config.json").write_bytes(b'{"a":[' + b"[]," * (8 * M) + b"[]]}"),
    "index-of-numbers": lambda f: (f / "model.safetensors.index.json").write_bytes(b'{"a":[' + b"999," * (12 * M) + b"0]}"),
    "gguf-of-texts": lambda f: (f / "model.gguf").write_bytes(
        gguf_bytes([pair("a", ARRAY, struct.pack("<IQ", STRING, 3 * M) + (b"\x02" + bytes(7) + b"ab") * (3 * M))], *one_matrix())
    ),
    "gguf-of-4-byte-characters": lambda f: (f / "model.gguf").write_bytes(
        gguf_bytes([pair("a", STRING, "\U0001f600" + "a" * (30 * M))], *one_matrix())
    ),
    "gguf-of-arrays": lambda f: (f / "model.gguf").write_bytes(
        gguf_bytes([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 2 * M) + (struct.pack("<IQ", 0, 0)) * (2 * M))], *one_matrix())
    ),
}  # fmt: skip


@must(5)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")
@pytest.mark.parametrize("name", OVERSIZED)
def test_no_more_memory_than_the_file_and_64_mb(name, tmp_path):
    OVERSIZED[name](tmp_path)
    if not (tmp_path / "model.gguf").exists() and "header" not in name and "index" not in name:
        replace_file(tmp_path / "model.safetensors", _header(b"{}"))
    with (
        address_space_limit(memory_limit(tmp_path)),
        pytest.raises(CheckpointError, match=r"memory|too long|not valid") as caught,
    ):
        bitline.open_checkpoint(tmp_path).layers()
    check_error(caught.value, tmp_path, located=False)


@must(5)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")
@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.name.startswith("memory-")], ids=lambda a: a.name)
def test_sparse_files_that_ask_for_more(attack, tmp_path):
    path = attack.build(tmp_path)
    with address_space_limit(memory_limit(tmp_path)), time_limit(), pytest.raises(CheckpointError):
        read(path)


# Small tensors that describe a layer's layout, and zero points where a scheme depends on them.
DESCRIPTIONS = (
    "g_idx", "weight_g_idx", "weight_shape", "shape", "packing", "axis", "group_size", "quant_scale", "quant_zero",
    "channel_wise",
    "weight_format", "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "qzeros",
    "_weight_zero_point",
)  # fmt: skip


@must(6)
@pytest.mark.parametrize("base", FAMILIES)
def test_headers_alone_tell_the_layers(base, tmp_path, monkeypatch):
    seen = []
    real = safetensors_source.info_to_read  # of whole tensors, and of parts
    monkeypatch.setattr(safetensors_source, "info_to_read", lambda source, name: seen.append(name) or real(source, name))
    opened = bitline.open_checkpoint(write(tmp_path, *FAMILIES[base]()))
    assert not seen
    layers = opened.layers()
    assert layers and not [name for name in seen if not name.endswith(tuple(f".{last}" for last in DESCRIPTIONS))]
    seen.clear()
    assert layers[0].weight() and seen  # the patched read is the one in use


@must(6)
def test_headers_alone_tell_the_layers_of_a_gguf_file(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(bases_gguf.file("Q4_K")[0])
    monkeypatch.setattr(GGUFSource, "read", lambda *_: pytest.fail("tensor data is read"))
    assert bitline.open_checkpoint(path).layers()


@must(7)
@pytest.mark.parametrize("small", [1 << 18, 0], ids=["read", "mapped"])
@pytest.mark.parametrize("base", ["gptq", "packed", "fp8", "bnb4", "hqq", "mxfp4"])
def test_files_are_never_written(base, small, tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_file, "MAX_READ_BYTES", small)
    write(tmp_path, *FAMILIES[base]())

    def state():
        return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()}

    before = state()
    opened = bitline.open_checkpoint(tmp_path)
    for weight in read(tmp_path).values():
        for tensor in weight.tensors().values():
            tensor.view(torch.uint8).fill_(1) if tensor.dim() and tensor.is_contiguous() else None
    for name in opened.source.tensors:
        opened.read(name).zero_()
    assert state() == before
    assert all(outcome(tmp_path) is None for _ in range(2))


@must(8)
def test_an_error_leaves_nothing_behind(tmp_path):
    good = write(tmp_path / "good" if (tmp_path / "good").mkdir() is None else tmp_path, *gptq())
    before = read(good)[LAYER].dequantize()
    for i, attack in enumerate(SMALL_ATTACKS[::40]):
        folder = tmp_path / str(i)
        folder.mkdir()
        path = attack.build(folder)
        try:
            with time_limit():
                read(path)
        except CheckpointError:
            pass
        assert torch.equal(read(good)[LAYER].dequantize(), before), attack.name
