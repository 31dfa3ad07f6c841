"""The tensors of one or more safetensors files, as views of the mapped files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError
from bitline.formats.base import Range, TensorInfo, info_to_read
from bitline.formats.io.checkpoint_files import choose_files
from bitline.formats.io.json_object import read_config
from bitline.formats.io.mapped_file import map_bytes, map_part
from bitline.formats.io.safetensors_header import read_header


class SafetensorsSource:
    """The tensors of a folder (one file, an index with its shards, or several files) or of one .safetensors file.

    path: as given. config: config.json of the folder, {} where there is none. tensors: name to TensorInfo, in file order.
    metadata: the files' "__metadata__", merged. reads: names of the tensors that were read.

    Opening reads config, index and headers. Contradictions are a CheckpointError: lengths, shapes and offsets that do not
    fit the file, shards that are missing, outside the folder, or hold a tensor twice. Files of pickled tensors (.bin, .pt,
    …) are never loaded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config: Mapping[str, Any] = {}
        self._infos: dict[str, TensorInfo] = {}
        self.tensors: Mapping[str, TensorInfo] = self._infos
        self.metadata: dict[str, str] = {}
        self.reads: set[str] = set()
        self._offsets: dict[str, int] = {}
        try:
            self._open()
        except OSError as error:
            raise CheckpointError("the checkpoint cannot be read", file=error.filename or path, found=error.strerror) from error

    def _open(self) -> None:
        folder = self.path if self.path.is_dir() else self.path.parent
        files, index = ([self.path], None) if not self.path.is_dir() else choose_files(self.path)
        config = folder / "config.json"
        if config.is_file():
            self.config = read_config(config)
        elif config.is_symlink() or config.exists():  # unreadable must not pass for absent
            raise CheckpointError("config.json is no file", file=config, fix="a link may lead nowhere: finish the download")
        for file in files:
            self._add_file(file)
        if index is not None:
            self._check_index(*index)

    def _add_file(self, file: Path) -> None:
        infos, offsets, metadata = read_header(file)
        for name in infos:
            if name in self._infos:
                raise CheckpointError(
                    "two files hold the same tensor", file=file, tensor=name, found=f"also in {self._infos[name].file}",
                    fix="keep the files of one checkpoint in a folder, or add its model.safetensors.index.json",
                )  # fmt: skip
        self._infos.update(infos)
        self._offsets.update(offsets)
        self.metadata.update(metadata)

    def _check_index(self, index: Path, weight_map: Mapping[str, str]) -> None:
        """Every tensor of the index is in the shard it names. Tensors that the index does not list are kept."""
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
        """The tensor, a view of the mapped file, or a copy if it is small. Writing to it never reaches the file.

        rows: only its first rows. A missing name, or a file that became shorter since it was opened, is a CheckpointError.
        """
        info = info_to_read(self, name)
        shape, nbytes = info.shape, info.nbytes
        if rows is not None and shape and rows < shape[0]:
            shape, nbytes = (rows, *shape[1:]), nbytes // shape[0] * rows
        if nbytes == 0:
            return torch.empty(shape, dtype=info.dtype)
        return self._typed(map_bytes(info.file, self._offsets[name], nbytes, name), info).view(shape)

    def read_part(self, name: str, ranges: Sequence[Range]) -> Tensor:
        """A part of a tensor, one range for each dimension; a view of the mapped file where its bytes follow each other."""
        info = info_to_read(self, name)
        data = map_part(info.file, self._offsets[name], info.shape, info.dtype.itemsize, ranges, name)
        return self._typed(data, info).view([stop - start for start, stop in ranges])

    def _typed(self, data: Tensor, info: TensorInfo) -> Tensor:
        """Bytes of a tensor in its dtype. Old writers did not align their header: copied to align."""
        aligned = self._offsets[info.name] % info.dtype.itemsize == 0
        return (data if aligned else data.clone()).view(info.dtype)
