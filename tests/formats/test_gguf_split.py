"""Split GGUF models: read as one, and refused where a file is missing or of another model."""

import struct

import numpy as np
import pytest
import torch
from gguf_files import build, ggml_values, random_blocks, tensor, value

import bitline
from bitline.errors import CheckpointError
from bitline.formats.gguf.split_files import file_to_open

ROWS = random_blocks("Q8_0", 6, 64, np.random.default_rng(0)).reshape(3, 2, 68)  # three matrices [2, 64]
U16, I32, STRING = 2, 5, 8


def number(key, value_, kind=U16):
    return value(key, kind, struct.pack("<H" if kind == U16 else "<i", value_))


def text(key, content):
    return value(key, STRING, struct.pack("<Q", len(content)) + content.encode())


def split_file(i, no=None, count=3, total=3, names=None, more=()):
    """File i of three, with one matrix; the first has the metadata."""
    values = [
        number("split.no", i if no is None else no),
        number("split.count", count),
        number("split.tensors.count", total, I32),
    ]
    values += [text("general.architecture", "llama")] if i == 0 else []
    name = (names or ("a", "b", "c"))[i]
    return build([*values, *more], [tensor(f"{name}.weight", (64, 2), 8)], ROWS[i].tobytes())


def name(i, count=3):
    return f"m-{i + 1:05d}-of-{count:05d}.gguf"


@pytest.fixture
def folder(tmp_path):
    for i in range(3):
        (tmp_path / name(i)).write_bytes(split_file(i))
    return tmp_path


def test_split_files_are_one_model(folder):
    for path in (folder, folder / name(0)):
        checkpoint = bitline.open_checkpoint(path)
        assert checkpoint.path == folder / name(0) and checkpoint.metadata["general.architecture"] == "llama"
        assert [layer.name for layer in checkpoint.layers()] == ["a", "b", "c"]
        assert [file.name for file in checkpoint.source.files] == [name(i) for i in range(3)]
        for i, layer in enumerate(checkpoint.layers()):
            assert torch.equal(layer.weight().dequantize(), ggml_values(ROWS[i], "Q8_0"))
            assert checkpoint.source.tensors[layer.tensors[0]].file == folder / name(i)


def test_a_model_split_into_one_file(tmp_path):
    (tmp_path / name(0, 1)).write_bytes(split_file(0, count=1, total=1))
    assert len(bitline.open_checkpoint(tmp_path).layers()) == 1


def test_file_to_open(tmp_path):
    names = lambda *files: [tmp_path / file for file in files]
    assert file_to_open(names("x.gguf")) == tmp_path / "x.gguf"
    assert file_to_open(names(name(1), name(2), name(0))) == tmp_path / name(0)
    assert file_to_open(names(name(0), "mmproj.gguf")) is None
    assert file_to_open(names(name(0), name(1, 2))) is None
    assert file_to_open(names(name(0), "n-00002-of-00003.gguf")) is None


def refused(path, message, file):
    with pytest.raises(CheckpointError, match=message) as caught:
        bitline.open_checkpoint(path).layers()
    assert caught.value.file == str(file)


def test_not_the_first_file(folder):
    refused(folder / name(1), r"not the first file.*part 2 of 3.*m-00001-of-00003\.gguf.*open the first", folder / name(1))
    (folder / name(0)).unlink()
    refused(folder, r"not the first file.*is missing", folder / name(1))


def test_a_missing_file(folder):
    (folder / name(2)).unlink()
    refused(folder, r"a file of a split model is missing.*3 files", folder / name(2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"no": 0}, "not the one that its name says.*split.no = 0.*split.no = 1"),
        ({"count": 2}, "not the one that its name says.*split.count = 2"),
        ({"names": ("a", "a", "c")}, "the same tensor.*also in m-00001"),
        ({"total": 4}, "files of different models.*split.tensors.count = 4.*expected 3"),
        ({"more": [text("general.architecture", "qwen2")]}, "files of different models.*qwen2.*expected llama"),
        ({"more": [value("split.no2", 4, b"\0" * 4), value("x", 6, struct.pack("<f", 1))]}, None),
    ],
)
def test_files_that_contradict_each_other(change, says, folder):
    (folder / name(1)).write_bytes(split_file(1, **change))
    if says is None:
        assert len(bitline.open_checkpoint(folder).layers()) == 3
    else:
        refused(folder, says, folder / name(1))


def test_tensors_that_no_file_has(folder):
    for i in range(3):
        (folder / name(i)).write_bytes(split_file(i, total=5))
    refused(folder, r"do not have all of its tensors.*found 3, expected 5", folder / name(0))


def test_a_damaged_file_is_named(folder):
    (folder / name(2)).write_bytes(split_file(2)[:-1])
    refused(folder, "outside the file", folder / name(2))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([number("split.count", 3)], "split over several.*join"),
        ([number("split.count", 0)], None),
        ([text("split.count", "three")], "split.count is not a number"),
        ([number("split.count", 3), text("split.no", "x")], "split over several"),
    ],
)
def test_split_metadata_in_a_file_of_another_name(values, says, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(build(values, [tensor("t")], b"\0" * 128))
    if says is None:
        assert bitline.open_checkpoint(path).layers() == []
    else:
        refused(path, says, path)
