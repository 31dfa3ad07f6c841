"""Invalid safetensors files: every way in which a header, an index or a config can be wrong."""

import json
import struct
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bitline import CheckpointError
from bitline.formats.io.safetensors_header import DTYPES
from bitline.formats.io.safetensors_source import SafetensorsSource


def raw(path, header, data=b"", length=None):
    """A file with any header (a dict, text or bytes) and any length in front of it."""
    text = header if isinstance(header, bytes) else header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_dtype_round_trips(tmp_path):
    plain = {"C64", "U64", "U32", "U16"}
    tensors = {
        name: torch.arange(6).reshape(2, 3).to(dtype) if name not in plain else torch.zeros(2, 3, dtype=dtype)
        for name, dtype in DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(tmp_path)
    assert source.tensors.keys() == tensors.keys() and source.metadata == {"format": "pt"} and source.config == {}
    for name, tensor in tensors.items():
        info, found = source.tensors[name], source.read(name)
        assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        if tensor.numel():
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_writes_to_a_read_tensor_never_reach_the_file(tmp_path):
    save_file({"a": torch.zeros(1000), "b": torch.ones(1000)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = SafetensorsSource(tmp_path / "model.safetensors")
        a, b = source.read("a"), source.read("b")
        a.fill_(7)
    assert b[0] == 1 and (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_mapped_file_takes_no_memory_until_it_is_read(tmp_path):
    def resident():
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024

    size = 4 << 30
    file = raw(tmp_path / "model.safetensors", {"big": entry("U8", (size,), (0, size))})
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + size)
    before = resident()
    tensor = SafetensorsSource(file).read("big")
    assert int(tensor[-1]) == 0 and tensor.numel() == size
    assert resident() - before < 64 << 20


def test_a_header_that_is_not_aligned(tmp_path):
    data = struct.pack("<2f", 1.5, -2.0)
    for pad in range(4):
        header = json.dumps({"a": entry()}) + " " * pad
        source = SafetensorsSource(raw(tmp_path / f"{pad}.safetensors", header, data))
        assert source.read("a").tolist() == [1.5, -2.0]


DAMAGED = {
    "empty file": (b"", None, "length is impossible"),
    "short": (b"abc", None, "length is impossible"),
    "length over the file": ({"a": entry()}, 1000, "length is impossible"),
    "length over the limit": ({"a": entry()}, 1 << 40, "length is impossible"),
    "length of all ones": ({"a": entry()}, (1 << 64) - 1, "length is impossible"),
    "length 0": ({"a": entry()}, 0, "length is impossible"),
    "not an object": ("[1]", None, "not JSON"),
    "not JSON": ("{nonsense}", None, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', None, "not valid JSON"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), None, "not JSON"),
    "deep": ('{"a":' + "[" * 200_000, None, "nested too deeply|not valid JSON"),
    "long number": ('{"a":' + "9" * 5000 + "}", None, "not valid JSON"),
    "same name twice": ('{"a": {}, "a": {}}', None, "given twice"),
    "same field twice": ('{"a": {"dtype": "F32", "dtype": "F16"}}', None, "given twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, None, "not text"),
    "metadata list": ({"__metadata__": []}, None, "not text"),
    "entry no object": ({"a": 3}, None, "dtype"),
    "dtype unknown": ({"weight": entry("F4")}, None, r"tensor weight.*'F4'"),
    "dtype not text": ({"a": entry(["F32"])}, None, "dtype"),
    "negative size": ({"a": entry(shape=(-2, -1))}, None, "shape"),
    "size of 2**63": ({"a": entry(shape=(1 << 63,))}, None, "shape"),
    "sizes that overflow": ({"a": entry(shape=(1 << 32, 1 << 32, 1 << 32))}, None, "do not fit its shape"),
    "sizes that overflow to right": ({"a": entry(shape=(1 << 62, 4, 2), offsets=(0, 8))}, None, "do not fit its shape"),
    "float size": ({"a": entry(shape=(2.0,))}, None, "shape"),
    "bool size": ({"a": entry(shape=(True,))}, None, "shape"),
    "too many sizes": ({"a": entry(shape=(1,) * 65)}, None, "shape"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, None, "data_offsets"),
    "one offset": ({"a": entry(offsets=(0,))}, None, "data_offsets"),
    "offsets backwards": ({"a": entry(offsets=(8, 0))}, None, "data_offsets"),
    "negative offset": ({"a": entry(offsets=(-8, 0))}, None, "data_offsets"),
    "more bytes than the shape": ({"a": entry("F16")}, None, "8 bytes.*4 for F16"),
    "past the end": ({"a": entry(), "b": entry(offsets=(8, 16))}, None, "truncated"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, None, "overlaps a"),
    "gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, None, "gap after a"),
    "starts late": ({"a": entry(offsets=(8, 16))}, None, "gap after the header"),
    "trailing bytes": ({"a": entry("U8", (4,), (0, 4))}, None, "belong to no tensor"),
    "name with a newline": ({"a\nb": entry()}, None, "printable"),
    "name of half a character": ('{"\\ud800": {"dtype": "F32"}}', None, "printable"),
    "git lfs pointer": (b"oid sha256:0", int.from_bytes(b"version ", "little"), "Git LFS"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case, tmp_path):
    header, length, message = DAMAGED[case]
    file = raw(tmp_path / "model.safetensors", header, bytes(8), length)
    if case == "empty file":
        file.write_bytes(b"")
    if case == "short":
        file.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsSource(file)
    assert caught.value.file == str(file)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_is_read_or_refused(tmp_path, data):
    file = tmp_path / "model.safetensors"
    good = raw(file, {"__metadata__": {"f": "pt"}, "a": entry(), "b": entry("I32", (1, 2), (8, 16))}, bytes(16)).read_bytes()
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bad[: data.draw(st.integers(len(bad) - 3, len(bad)))])
    try:
        source = SafetensorsSource(file)
    except CheckpointError:
        return
    for name, info in source.tensors.items():
        assert source.read(name).shape == info.shape


def test_missing_name_and_truncation_after_opening(tmp_path):
    save_file({"a": torch.zeros(4096)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such tensor.*tensor b"):
        source.read("b")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match="became shorter"):
        source.read("a")


# ---- folders -------------------------------------------------------------------------------------------------------------


def sharded(folder, weight_map=None, metadata=None):
    save_file({"a": torch.zeros(2), "extra": torch.ones(1)}, folder / "s-00001-of-00002.safetensors")
    save_file({"b": torch.ones(2)}, folder / "s-00002-of-00002.safetensors")
    weight_map = weight_map or {"a": "s-00001-of-00002.safetensors", "b": "s-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata or {}, "weight_map": weight_map}))
    return folder


def test_shards_by_index_and_without(tmp_path):
    source = SafetensorsSource(sharded(tmp_path))
    assert list(source.tensors) == ["a", "extra", "b"]  # tensors that the index omits are kept
    assert source.read("b").tolist() == [1, 1]
    (tmp_path / "model.safetensors.index.json").unlink()
    assert list(SafetensorsSource(tmp_path).tensors) == ["a", "extra", "b"]
    (tmp_path / "s-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shards are missing.*1 files"):
        SafetensorsSource(tmp_path)


def test_links_may_point_outside_the_folder(tmp_path):
    (tmp_path / "blobs").mkdir()
    folder = sharded(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert SafetensorsSource(tmp_path / "snapshot").read("a").tolist() == [0, 0]
    (folder / "s-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        SafetensorsSource(tmp_path / "snapshot")


@pytest.mark.parametrize(
    "name", ["../s.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "..", "", "a\0b", "a\nb", 3, None, ["x"]], ids=repr
)
def test_an_index_cannot_name_files_outside(name, tmp_path):
    with pytest.raises(CheckpointError, match="outside the checkpoint's folder"):
        SafetensorsSource(sharded(tmp_path, {"a": name}))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "s-00001-of-00002.safetensors", "b": "s-00009-of-00002.safetensors"}, "missing.*s-00009"),
        ({"a": "s-00001-of-00002.safetensors", "c": "s-00002-of-00002.safetensors"}, "tensor c.*no such tensor"),
        ({"a": "s-00002-of-00002.safetensors", "b": "s-00001-of-00002.safetensors"}, "tensor a.*in s-00001.*s-00002"),
        ({"a": "x" * 5000}, "cannot be read|missing"),
    ],
)  # fmt: skip
def test_an_index_that_contradicts_its_shards(weight_map, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(sharded(tmp_path, weight_map))


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "[" * 100_000])
def test_an_index_that_is_none(text, tmp_path):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        SafetensorsSource(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    for name in ("x", "y"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"two files hold the same tensor.*tensor a.*x\.safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt", "m.pkl"])
def test_pickles_are_never_loaded(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x04")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"pickle is never loaded.*safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[1]", "not a JSON object.*found list"),
        ("null", "not a JSON object"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ('{"bits": 4, "bits": 8}', "'bits' is given twice"),
        ("{" + " " * (65 << 20) + "}", "too large"),
        (b"\xff\xfe{}", "not valid JSON"),
    ],
    ids=["empty", "list", "null", "deep list", "deep object", "two meanings", "large", "utf-16"],
)  # fmt: skip
def test_invalid_configs(text, message, tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsSource(tmp_path)
    assert caught.value.file == str(tmp_path / "config.json")


def test_configs_written_by_real_tools(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes('\ufeff{"limit": [0.0, Infinity], "x": 1, "x": 1}'.encode())
    assert SafetensorsSource(tmp_path / "model.safetensors").config == {"limit": [0.0, float("inf")], "x": 1}
