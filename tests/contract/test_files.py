"""The contract, sentences 9 to 15: files, headers, names."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from pathlib import Path

import pytest
import torch
from bases import TYPE_F32, U32, entry, gguf_bytes, gptq, pair, safetensors_bytes, write
from must import must
from outcomes import replace_file, time_limit

import bitline
from bitline import CheckpointError

ONE, TWO = {"a": torch.zeros(4)}, {"b": torch.ones(4)}


def refused(path: Path, match: str | None = None) -> CheckpointError:
    with time_limit(30), pytest.raises(CheckpointError, match=match) as caught:
        bitline.open_checkpoint(path).layers()
    return caught.value


def shards(folder: Path, weight_map: object) -> Path:
    (folder / "one.safetensors").write_bytes(safetensors_bytes(ONE))
    (folder / "two.safetensors").write_bytes(safetensors_bytes(TWO))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@must(9)
@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/../../x", "..", "", ".", "C:x", "a\\b", "a\0"])
def test_an_index_stays_in_its_folder(name, tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(ONE))
    assert refused(shards(folder, {"a": name, "b": "two.safetensors"}), "outside the checkpoint's folder").tensor == "'a'"


@must(10)
@pytest.mark.parametrize("suffix", ["safetensors", "gguf", "json"])
@pytest.mark.parametrize("what", ["pipe", "socket", "device", "folder", "dangling", "loop"])
def test_special_files_are_not_opened(what, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("config.json" if suffix == "json" else f"model.{suffix}")
    make = {
        "pipe": lambda: os.mkfifo(path), "socket": lambda: socket.socket(socket.AF_UNIX).bind(path.name),
        "device": lambda: path.symlink_to("/dev/zero"), "folder": path.mkdir,
        "dangling": lambda: path.symlink_to("gone"), "loop": lambda: path.symlink_to(path.name),
    }  # fmt: skip
    make[what]()
    if suffix == "json":
        (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(ONE))
    refused(tmp_path)
    refused(path)


@must(10)
def test_links_to_files_are_followed(tmp_path):
    store, folder = tmp_path / "store", tmp_path / "c"
    for new in (store, folder):
        new.mkdir()
    write(store, *gptq())
    for file in store.iterdir():
        (folder / file.name).symlink_to(file)
    assert bitline.open_checkpoint(folder).layers()[0].weight()


def _f32(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


INVALID_HEADERS: dict[str, tuple[str, dict[str, object]]] = {
    "overlap": ("overlaps", {"a": _f32([2], 0, 8), "b": _f32([3], 4, 16)}),
    "gap": ("gap", {"a": _f32([1], 0, 4), "b": _f32([2], 8, 16)}), "outside": ("truncated", {"a": _f32([5], 0, 20)}),
    "unused": ("belong to no tensor", {"a": _f32([3], 0, 12)}), "reversed": ("data_offsets", {"a": _f32([4], 16, 0)}),
    "shape": ("do not fit its shape", {"a": _f32([3], 0, 16)}), "dtype": ("dtype", {"a": _f32([4], 0, 16, "F31")}),
    "item size": ("do not fit its shape", {"a": _f32([4], 0, 16, "F16")}),
}  # fmt: skip


@must(11)
@pytest.mark.parametrize("case", INVALID_HEADERS)
def test_tensors_lie_in_the_file_without_overlap(case, tmp_path):
    says, header = INVALID_HEADERS[case]
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    refused(tmp_path, says)


@must(11)
@pytest.mark.parametrize("length", [0, 1, 80, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_header_length_is_checked_against_the_file(length, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" + bytes(20))
    refused(tmp_path, "length is impossible|not JSON|not valid JSON")


INVALID_GGUF_TENSORS = {
    "overlap": [entry("a", [8], TYPE_F32, 0), entry("b", [16], TYPE_F32, 0)], "misaligned": [entry("a", [2], TYPE_F32, 4)],
    "outside": [entry("a", [8], TYPE_F32, 1 << 20)], "too large": [entry("a", [1 << 20], TYPE_F32, 0)],
    "no type": [entry("a", [8], 77, 0)], "no size": [entry("a", [0], TYPE_F32, 0)], "rank": [entry("a", [1] * 5, TYPE_F32, 0)],
    "partial block": [entry("a", [33], 8, 0)],
}  # fmt: skip


@must(11)
@pytest.mark.parametrize("case", INVALID_GGUF_TENSORS)
def test_tensors_of_a_gguf_file_lie_in_it_without_overlap(case, tmp_path):
    (tmp_path / "model.gguf").write_bytes(gguf_bytes([], INVALID_GGUF_TENSORS[case], bytes(64)))
    assert refused(tmp_path).tensor in ("a", "b")


@must(12)
@pytest.mark.parametrize("shape", [[1 << 62, 4, 4], [(1 << 62) + 1, 4], [1 << 32, 1 << 32], [1 << 70], [1 << 63, 2, 0]], ids=str)
def test_sizes_do_not_overflow(shape, tmp_path):
    nbytes = 4 * math.prod(shape) % (1 << 64)  # the size in 64-bit arithmetic
    text = json.dumps({"a": _f32(shape, 0, nbytes)}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    assert refused(tmp_path).tensor == "a"


@must(12)
@pytest.mark.parametrize("dims", [[1 << 62, 4], [1 << 63, 2], [1 << 32, 1 << 32], [1 << 32] * 4], ids=str)
def test_sizes_of_a_gguf_file_do_not_overflow(dims, tmp_path):
    (tmp_path / "model.gguf").write_bytes(gguf_bytes([], [entry("a", dims, TYPE_F32, 0)], bytes(64)))
    assert refused(tmp_path, "larger than the file").tensor == "a"


BAD_JSON = {
    "list": b"[]", "number": b"3", "empty": b"", "truncated": b'{"a": ', "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "deep": b'{"a":' + b"[" * 99_999 + b"]" * 99_999 + b"}", "twice": b'{"a": 1, "a": 2}', "inside": b'{"a": {"b": 1, "b": 2}}',
    "digits": b'{"a": ' + b"9" * 5000 + b"}", "text after": b"{} {}",
}  # fmt: skip


@must(13)
@pytest.mark.parametrize("where", ["header", "index", "config", "side file"])
@pytest.mark.parametrize("bad", BAD_JSON)
def test_json_is_one_object_with_one_meaning(bad, where, tmp_path):
    if where == "header":
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(BAD_JSON[bad])) + BAD_JSON[bad])
    elif where == "index":
        replace_file(shards(tmp_path, {}) / "model.safetensors.index.json", BAD_JSON[bad])
    else:
        write(tmp_path, ONE, {})
        (tmp_path / ("config.json" if where == "config" else "quantize_config.json")).write_bytes(BAD_JSON[bad])
    refused(tmp_path)


@must(13)
def test_nan_is_refused_in_a_header(tmp_path):
    text = b'{"__metadata__": {"a": "x"}, "a": {"dtype": "F32", "shape": [], "data_offsets": [0, NaN]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    refused(tmp_path, "NaN is not JSON")


@must(14)
@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "a" * 1025, "\u202eabc", "a\0"], ids=ascii)
def test_names_are_printable(name, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({name: torch.zeros(4)}))
    refused(tmp_path, "not printable")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.gguf").write_bytes(gguf_bytes([], [entry(name, [8], TYPE_F32, 0)], bytes(32)))
    refused(tmp_path, "not printable")


@must(14)
def test_a_name_is_given_once(tmp_path):
    (tmp_path / "one.safetensors").write_bytes(safetensors_bytes(ONE))
    (tmp_path / "two.safetensors").write_bytes(safetensors_bytes(ONE))
    assert refused(tmp_path, "two files hold").tensor == "a"
    folder = tmp_path / "gguf"
    folder.mkdir()
    repeated = [entry("a", [8], TYPE_F32, 0), entry("a", [8], TYPE_F32, 32)]
    (folder / "model.gguf").write_bytes(gguf_bytes([], repeated, bytes(64)))
    assert refused(folder, "comes twice").tensor == "a"
    (folder / "model.gguf").write_bytes(gguf_bytes([pair("k", U32, 1), pair("k", U32, 1)], [], b""))
    refused(folder, "comes twice")


@must(15)
def test_missing_shards_and_tensors(tmp_path):
    shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert list(bitline.open_checkpoint(tmp_path).source.tensors) == ["a", "b"]
    shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    assert refused(tmp_path, "does not hold").tensor == "c"
    shards(tmp_path, {"a": "two.safetensors", "b": "two.safetensors"})
    assert refused(tmp_path, "does not hold").tensor == "a"
    shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    (tmp_path / "two.safetensors").unlink()
    refused(tmp_path, r"missing.*two\.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "one.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    refused(tmp_path, "shards are missing")


@must(15)
@pytest.mark.parametrize("lost", [1, 100, 20_000])
def test_a_truncated_file(lost, tmp_path):
    raw = safetensors_bytes({"a": torch.zeros(4096)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    checkpoint = bitline.open_checkpoint(path)
    os.truncate(path, max(0, len(raw) - lost))
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint.read("a")
    refused(path, "truncated|impossible")
