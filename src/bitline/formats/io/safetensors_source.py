"""safetensors files: every header is checked before anything is believed, and tensors are views of the mapped file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import torch
from torch import Tensor

from bitline.errors import CheckpointError
from bitline.formats.base import TensorInfo
from bitline.formats.io.json_object import parse_object, read_config, read_limited
from bitline.formats.io.mapped_file import map_bytes

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 64
MAX_NAME = 1024
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_DAMAGED = "the file is damaged or incomplete: download it again"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32,
    "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


class SafetensorsSource:
    """The tensors of a folder (one file, an index with its shards, or several files) or of one .safetensors file.

    path: as given. config: config.json of the folder, {} where there is none. tensors: name to TensorInfo, in the order
    of the files. metadata: the files' own "__metadata__", merged.

    Opening reads config, index and headers, and refuses what contradicts itself with a CheckpointError: lengths, shapes
    and offsets that do not fit the file, shards that are missing, outside the folder, or hold a tensor twice. Files of
    pickled tensors (.bin, .pt, …) are never loaded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config: Mapping[str, Any] = {}
        self._infos: dict[str, TensorInfo] = {}
        self.tensors: Mapping[str, TensorInfo] = self._infos
        self.metadata: dict[str, str] = {}
        self._starts: dict[str, int] = {}
        try:
            self._open()
        except OSError as error:
            raise CheckpointError("the checkpoint cannot be read", file=error.filename or path, found=error.strerror) from error

    def _open(self) -> None:
        folder = self.path if self.path.is_dir() else self.path.parent
        files, index = ([self.path], None) if not self.path.is_dir() else _choose_files(self.path)
        config = folder / "config.json"
        if config.is_file():
            self.config = read_config(config)
        elif config.is_symlink() or config.exists():  # what is not read must not be taken for what is not there
            raise CheckpointError("config.json is no file", file=config, fix="a link may lead nowhere: finish the download")
        for file in files:
            self._add(file)
        if index is not None:
            self._check_index(*index)

    def _add(self, file: Path) -> None:
        infos, starts, metadata = read_header(file)
        for name in infos:
            if name in self._infos:
                raise CheckpointError(
                    "two files hold the same tensor", file=file, tensor=name, found=f"also in {self._infos[name].file}",
                    fix="keep the files of one checkpoint in a folder, or add its model.safetensors.index.json",
                )  # fmt: skip
        self._infos.update(infos)
        self._starts.update(starts)
        self.metadata.update(metadata)

    def _check_index(self, index: Path, weight_map: Mapping[str, str]) -> None:
        """Every tensor of the index is where the index says. Tensors that it does not list are kept: they are there."""
        files = {shard: self.path / shard for shard in set(weight_map.values())}
        for name, shard in weight_map.items():
            info = self.tensors.get(name)
            if info is None or info.file != files[shard]:
                raise CheckpointError(
                    "the index names a tensor that its shard does not hold", file=index, tensor=name, field="weight_map",
                    found="no such tensor" if info is None else f"the tensor in {info.file.name}", expected=f"it in {shard}",
                    fix="index and shards are of different checkpoints, or a shard is damaged: download them again",
                )  # fmt: skip

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """The tensor, a view of the mapped file: writing to it never reaches the file, and no copy is made unless it is small.

        rows: only so many of its first rows. A missing name, or a file that became shorter since it was opened, is a
        CheckpointError.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError("no such tensor", file=self.path, tensor=name, expected=f"one of {len(self.tensors)} names")
        shape, nbytes = info.shape, info.nbytes
        if rows is not None and shape and rows < shape[0]:
            shape, nbytes = (rows, *shape[1:]), nbytes // shape[0] * rows
        if nbytes == 0:
            return torch.empty(shape, dtype=info.dtype)
        start = self._starts[name]
        part = map_bytes(info.file, start, nbytes, name)
        if start % info.dtype.itemsize:  # old writers did not align their header: this one tensor is copied
            part = part.clone()
        return part.view(info.dtype).view(shape)


# ---- which files ---------------------------------------------------------------------------------------------------------


def _choose_files(folder: Path) -> tuple[list[Path], tuple[Path, dict[str, str]] | None]:
    """The files of a folder to read, and its index with what it says, if one rules."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single], None
    indexes = sorted(p for p in folder.glob("*.safetensors.index.json") if p.is_file())
    main = folder / "model.safetensors.index.json"
    if main in indexes or len(indexes) == 1:
        index = main if main in indexes else indexes[0]
        weight_map = _weight_map(index)
        names = dict.fromkeys(weight_map.values())
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                "shards that the index names are missing", file=index, field="weight_map", found=f"no {', '.join(missing[:3])}",
                expected=f"all {len(names)} files", fix="finish the download",
            )  # fmt: skip
        return [folder / name for name in names], (index, weight_map)
    files = sorted(p for p in folder.glob("*.safetensors") if p.is_file())
    if not files:
        raise _no_files(folder)
    _check_series(folder, files)
    return files, None


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = parse_object(read_limited(index, "index"), index, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index has no weight_map", file=index, field="weight_map", expected='{"weight_map": {tensor: file}}'
        )
    inside = {shard: _stays_inside(shard) for shard in set(filter(lambda s: isinstance(s, str), weight_map.values()))}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not inside[shard]:
            raise CheckpointError(
                "the index names a file outside the checkpoint's folder", file=index, tensor=ascii(name), field="weight_map",
                found=ascii(shard), expected="the name of a file in it",
            )  # fmt: skip
    return weight_map


def _stays_inside(name: str) -> bool:
    """Judged by the name alone: a link may lead anywhere, which is how download caches are built."""
    parts = PurePosixPath(name).parts
    return bool(parts) and name.isprintable() and not (name.startswith("/") or ".." in parts or "\\" in name or ":" in name)


def _check_series(folder: Path, files: list[Path]) -> None:
    """Without an index, the files' own numbers (`model-00001-of-00003`) tell whether one is missing."""
    series: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", file.name):
            series.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), found in series.items():
        if len(found) < count:
            raise CheckpointError(
                "shards are missing", file=folder, found=f"{len(found)} files {stem}-*-of-{count:05d}.safetensors",
                expected=count, fix="finish the download",
            )  # fmt: skip


def _no_files(folder: Path) -> CheckpointError:
    entries = sorted(p.name for p in folder.iterdir())
    pickles = [name for name in entries if Path(name).suffix.lower() in PICKLES]
    if pickles:
        return pickle_error(folder, pickles[0])
    found = "an empty folder" if not entries else f"{len(entries)} other entries, such as {entries[0]}"
    return CheckpointError("no weights in this folder", file=folder, found=found, expected="*.safetensors or one *.gguf file")


def pickle_error(path: Path, name: str) -> CheckpointError:
    """The refusal of a file that could run code on loading."""
    return CheckpointError(
        "the weights are pickled, and pickle is never loaded: it can run any code", file=path, found=name,
        expected="*.safetensors", fix="convert it to safetensors where you trust it, or get the safetensors version",
    )  # fmt: skip


# ---- headers -------------------------------------------------------------------------------------------------------------


def read_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, int], dict[str, str]]:
    """Tensors by name, where their bytes start in the file, and the file's metadata; anything doubtful is refused."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise CheckpointError("this is a Git LFS pointer, not the file itself", file=file, fix="git lfs pull")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length < 2 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                "not a safetensors file: its header's length is impossible", file=file,
                found=f"{length} bytes in a file of {size}", expected=f"2 to {max(2, min(MAX_HEADER_BYTES, size - 8))}",
                fix=_DAMAGED,
            )  # fmt: skip
        raw = stream.read(length)
    if len(raw) < length or raw[:1] != b"{":
        raise CheckpointError("not a safetensors file: its header is not JSON", file=file, found=repr(raw[:8]), fix=_DAMAGED)
    entries = parse_object(raw, file, "header", size=size)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            "the header's __metadata__ is not text", file=file, field="__metadata__", expected="an object of strings"
        )
    infos: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        info, begin = _entry(file, name, entry)
        infos[name] = info
        spans.append((begin, begin + info.nbytes, name))
    _check_spans(file, spans, size - 8 - length)
    return infos, {name: 8 + length + begin for begin, _, name in spans}, metadata


def _entry(file: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    """One tensor of a header and where its bytes begin in the data. Its size is computed in Python's unbounded integers."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise CheckpointError("a tensor's name is not printable text", file=file, field="name", found=ascii(name[:MAX_NAME]),
                              expected=f"1 to {MAX_NAME} characters")  # fmt: skip
    fields = entry if isinstance(entry, dict) else {}
    label, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(label, str) or label not in DTYPES:
        raise CheckpointError(
            "a tensor has a dtype that is not known here", file=file, tensor=name, field="dtype", found=repr(label),
            expected=", ".join(DTYPES),
        )  # fmt: skip
    if not _integers(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(
            "a tensor's shape is not valid", file=file, tensor=name, field="shape", found=_short(shape),
            expected="a list of sizes >= 0",
        )  # fmt: skip
    if not _integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            "a tensor's data_offsets are not valid", file=file, tensor=name, field="data_offsets", found=_short(offsets),
            expected="[begin, end]",
        )  # fmt: skip
    dtype, nbytes = DTYPES[label], offsets[1] - offsets[0]
    expected = math.prod(shape) * dtype.itemsize
    if expected != nbytes:
        raise CheckpointError(
            "a tensor's bytes do not fit its shape", file=file, tensor=name, field="data_offsets", found=f"{nbytes} bytes",
            expected=f"{expected} for {label} {_short(shape)}", fix=_DAMAGED,
        )  # fmt: skip
    if not nbytes and math.prod(max(1, size) for size in shape) >= 1 << 60:  # torch counts strides though there is no element
        raise CheckpointError("an empty tensor's shape is not valid", file=file, tensor=name, field="shape", found=_short(shape),
                              expected="a product of sizes below 2**60")  # fmt: skip
    return TensorInfo(name, dtype, tuple(shape), file, nbytes), offsets[0]


def _integers(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    for v in value:  # noqa: SIM110  (a loop, since a header has a hundred thousand of these lists)
        if type(v) is not int or not 0 <= v < 1 << 63:
            return False
    return True


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_spans(file: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    """The tensors fill the data without gap or overlap, as the format demands, so no byte is read as two things."""
    end, before = 0, "the header"
    for begin, stop, name in sorted(spans):
        if begin != end:
            raise CheckpointError(
                f"a tensor {'overlaps' if begin < end else 'leaves a gap after'} {before}", file=file, tensor=name,
                field="data_offsets", found=f"bytes [{begin}, {stop}) of the data", expected=f"a start at {end}", fix=_DAMAGED,
            )  # fmt: skip
        end, before = stop, name
    if end != size:
        raise CheckpointError(
            "the file is cut short" if end > size else "the file has bytes that belong to no tensor", file=file,
            field="data_offsets", found=f"{size} bytes of data", expected=f"{end}, as the header says", fix=_DAMAGED,
        )  # fmt: skip
