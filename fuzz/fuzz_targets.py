"""The fuzz targets: functions of bytes that read them as a checkpoint and raise where the contract in docs/formats.md is broken.

They need no fuzzer: tests/attacks/test_fuzz_corpus.py runs the seeds through them, run.py --replay runs a finding. The oracle
and the valid checkpoints are those of tests/attacks.
"""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "attacks")]

import bases_more  # noqa: E402, F401  (its families are among the bases once it is imported)
import torch  # noqa: E402
from bases import FAMILIES, safetensors_bytes, write  # noqa: E402
from outcomes import check_error, check_weights, replace_file, shm_folder  # noqa: E402

import bitline  # noqa: E402
from bitline.errors import CheckpointError  # noqa: E402

Target = Callable[[bytes], bool]
MAX_DATA = 1 << 20  # bytes of tensor data; a file gets as many as its header claims, so that reading gets further
_SHARDS = {"one.safetensors": {"a": torch.zeros(4), "c": torch.zeros(2, 3)}, "two.safetensors": {"b": torch.ones(4)}}
_OPERATIONS = 6
_DTYPES = ("F16", "BF16", "F32", "F64", "I8", "U8", "I16", "I32", "I64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL")
_SUFFIXES = (
    "weight", "bias", "g_idx", "qweight", "qzeros", "scales", "weight_scale", "weight_scale_inv", "weight_zero_point",
    "weight_packed", "weight_shape", "input_scale", "input_zero_point", "weight_global_scale", "weight_scale_2",
    "pre_quant_scale", "scale", "zero",
)  # fmt: skip


def read(path: Path, *, weights: bool) -> bool:
    """Whether a checkpoint opens. Raises any exception other than a CheckpointError that says where.

    weights: also read every layer, and check it against the oracle.
    """
    try:
        checkpoint = bitline.open_checkpoint(path)
        records = checkpoint.layers()
        for record in records:
            assert str(record.spec) and record.name and set(record.tensors) <= set(checkpoint.source.tensors)
        read = {record.name: record.weight() for record in records} if weights else {}
    except CheckpointError as error:
        check_error(error, path, located=False)
        return False
    if weights:
        assert all(read[record.name].spec == record.spec for record in records)
        check_weights(path, read)
    return True


# ---- files ---------------------------------------------------------------------------------------------------------------


def safetensors(data: bytes) -> bool:
    """A header, if it starts with "{", to which its length and the zeros of its tensors are added, else a whole file."""
    if data[:1] == b"{":
        data = struct.pack("<Q", len(data)) + data + bytes(_data_size(data))
    folder = _folder("safetensors")
    replace_file(folder / "model.safetensors", data)
    if not read(folder, weights=False):
        return False
    checkpoint = bitline.open_checkpoint(folder)
    for name, info in list(checkpoint.source.tensors.items())[:50]:
        tensor = checkpoint.read(name)
        assert tensor.shape == info.shape and tensor.dtype == info.dtype
    wanted = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    wanted.pop("__metadata__", None)
    assert wanted.keys() == checkpoint.source.tensors.keys()
    return True


def _data_size(header: bytes) -> int:
    """The end of the last tensor's data, 0 where there is none."""
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        return min(max(0, *map(int, ends)), MAX_DATA)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return 0


def index(data: bytes) -> bool:
    """The index of two shards."""
    folder = _folder("index")
    for name, tensors in _SHARDS.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(safetensors_bytes(tensors))
    replace_file(folder / "model.safetensors.index.json", data)
    if not read(folder, weights=False):
        return False
    tensors = bitline.open_checkpoint(folder).source.tensors
    for name, shard in json.loads(data)["weight_map"].items():
        file = tensors[name].file.resolve()
        assert file == (folder / shard).resolve() and file.parent == folder.resolve()
    return True


def gguf(data: bytes) -> bool:
    """A GGUF file, its weights checked against the oracle."""
    path = _folder("gguf") / "model.gguf"
    replace_file(path, data)
    return read(path, weights=True)


# ---- configs -------------------------------------------------------------------------------------------------------------


def config(data: bytes) -> bool:
    """The name of a valid checkpoint, a newline, and a config.json that replaces its own; only headers are read."""
    base, _, text = data.partition(b"\n")
    path = _base(base.decode("latin-1"))
    if path is None:
        return False
    replace_file(path / "config.json", text)
    return read(path, weights=False)


def weights(data: bytes) -> bool:
    """The same, another newline, and edits of the tensors (see `_edited`); weights are checked against the oracle.

    An empty line keeps the checkpoint's own config.
    """
    base, _, rest = data.partition(b"\n")
    text, _, edits = rest.partition(b"\n")
    name = base.decode("latin-1")
    if name not in FAMILIES:
        return False
    folder = _folder("weights")
    tensors, quantization = FAMILIES[name]()
    header, content = _split(safetensors_bytes(tensors))
    header, content = _edited(header, bytearray(content), edits)
    packed = json.dumps(header).encode()
    replace_file(folder / "model.safetensors", struct.pack("<Q", len(packed)) + packed + content)
    replace_file(folder / "config.json", text or json.dumps({"quantization_config": quantization}).encode())
    if _has_many_quantifiers(text):
        return read(folder, weights=False)
    return read(folder, weights=True)


def _has_many_quantifiers(text: bytes) -> bool:
    """Whether the oracle, which uses Python's `re`, may take too long."""
    return text.count(b"*") + text.count(b"+") + text.count(b"{1") > 8


def _split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:length]), raw[length:]


def _edited(header: dict[str, Any], data: bytearray, edits: bytes) -> tuple[dict[str, Any], bytearray]:
    """Four bytes are one edit: its kind, the tensor, and two parameters. The file can still be opened.

    0: remove the tensor. 1: view it as another dtype. 2: reshape it. 3: give it another suffix. 4: change one of its bytes.
    5: swap the names of two tensors.
    """
    metadata = header.pop("__metadata__", None)
    parts = {name: [entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]] for name, entry in header.items()}
    for at in range(0, min(len(edits) - 3, 64), 4):
        kind, which, one, two = edits[at : at + 4]
        if not parts:
            break
        name = list(parts)[which % len(parts)]
        part = parts[name]
        if kind % _OPERATIONS == 0:
            del parts[name]
        elif kind % _OPERATIONS == 1:
            _view_as(part, _DTYPES[one % len(_DTYPES)])
        elif kind % _OPERATIONS == 2:
            _reshape(part, one, two)
        elif kind % _OPERATIONS == 3:
            parts[f"{name.rpartition('.')[0]}.{_SUFFIXES[one % len(_SUFFIXES)]}"] = parts.pop(name)
        elif kind % _OPERATIONS == 4 and part[2]:
            part[2][one * 7 % len(part[2])] = two
        else:
            other = list(parts)[one % len(parts)]
            parts[name], parts[other] = parts[other], parts[name]
    out: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    content = bytearray()
    for name, (dtype, shape, raw) in parts.items():
        out[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(raw)]}
        content += raw
    return out, content


def _view_as(part: list[Any], dtype: str) -> None:
    """View the same bytes as another dtype, with as many columns as they make."""
    size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}.get(dtype, 1)
    rows = part[1][0] if part[1] else 1
    if rows and len(part[2]) % (rows * size) == 0:
        part[0], part[1] = dtype, ([rows, len(part[2]) // rows // size] if len(part[1]) > 1 else [len(part[2]) // size])


def _reshape(part: list[Any], one: int, two: int) -> None:
    count = 1
    for size in part[1]:
        count *= size
    shapes = [[count], [count, 1], [1, count], part[1][::-1], [*part[1], 1], [1, *part[1]]]
    shapes += [[rows, count // rows] for rows in (2, 4, 8, 16, 32, 64, one or 1) if count % rows == 0]
    shapes += [[rows, 2, count // rows // 2] for rows in (1, 2, 4) if count % (2 * rows) == 0]
    part[1] = shapes[two % len(shapes)]


# ---- folders -------------------------------------------------------------------------------------------------------------

_made: dict[str, Path] = {}


def _folder(name: str) -> Path:
    """A folder in memory, the same one for the whole process."""
    if name not in _made:
        _made[name] = Path(tempfile.mkdtemp(prefix="bitline-fuzz-", dir=shm_folder()))
        atexit.register(shutil.rmtree, _made[name], ignore_errors=True)
    return _made[name]


def _base(name: str) -> Path | None:
    """A folder with the tensors of a valid checkpoint; None where there is none of this name."""
    if name not in FAMILIES:
        return None
    folder = _folder(f"config {name}")
    if not (folder / "model.safetensors").exists():
        write(folder, *FAMILIES[name]())
    return folder


TARGETS: dict[str, Target] = {f.__name__: f for f in (safetensors, index, gguf, config, weights)}
