"""The tensors of a GGUF model as a tensor source for readers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError
from bitline.formats.base import Range, TensorInfo, info_to_read
from bitline.formats.gguf.ggml_types import BLOCK_SIZES, PLAIN_TYPES
from bitline.formats.gguf.header import Header
from bitline.formats.gguf.split_files import read_split
from bitline.formats.io.mapped_file import map_bytes, map_part


class GGUFSource:
    """The tensors of one .gguf file (version 2 or 3, little-endian), or of all files of a split model.

    path: the file, or the first one. files: all of them.
    metadata: key to int, float, bool, str, list[str], list[bool], list of arrays, or array.array for numbers. Strings
        that are not UTF-8 (some vocabularies hold raw bytes) are decoded with "surrogateescape".
    tensors: plain tensors have their own dtype and row-major shape; a quantized tensor is uint8 [..., K / block * bytes].
    ggml: for every tensor its ggml type ("F32", "Q4_K", "IQ4_XS", …) and its logical row-major shape, [N, K] for a matrix.
    config: {"quantization_config": {"quant_method": "gguf"}}. reads: names of the tensors that were read.

    An invalid or truncated header, or a missing file, is a CheckpointError on opening.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config: Mapping[str, Any] = {"quantization_config": {"quant_method": "gguf"}}
        self._infos: dict[str, TensorInfo] = {}
        self.tensors: Mapping[str, TensorInfo] = self._infos
        self.ggml: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.reads: set[str] = set()
        self._offsets: dict[str, int] = {}
        headers = read_split(self.path)
        self.files = tuple(header.path for header in headers)
        self.metadata: dict[str, Any] = headers[0].metadata
        for header in headers:
            self._add_tensors(header)

    def _add_tensors(self, header: Header) -> None:
        for name, entry in header.tensors.items():
            if name in self.tensors:
                raise CheckpointError("two files of a split model have the same tensor", file=header.path, tensor=name,
                                      found=f"also in {self.tensors[name].file.name}", expected="each name once")  # fmt: skip
            shape = entry.shape
            if entry.kind not in PLAIN_TYPES:
                block, block_bytes = BLOCK_SIZES[entry.kind]
                shape = (*shape[:-1], shape[-1] // block * block_bytes)
            dtype = PLAIN_TYPES.get(entry.kind, torch.uint8)
            self._infos[name] = TensorInfo(name, dtype, shape, header.path, entry.nbytes)
            self.ggml[name] = (entry.kind, entry.shape)
            self._offsets[name] = entry.offset

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """The tensor as a view of the mapped file, with the dtype and shape of `tensors[name]`; writing to it never
        reaches the file. rows: ignored, since a view of all rows costs the same. A missing name is a CheckpointError.
        """
        info = info_to_read(self, name)
        raw = map_bytes(info.file, self._offsets[name], info.nbytes, name)
        return raw.view(info.dtype).view(info.shape)

    def read_part(self, name: str, ranges: Sequence[Range]) -> Tensor:
        """A part of a tensor, one range for each dimension of `tensors[name].shape`, which is of bytes where it is quantized."""
        info = info_to_read(self, name)
        raw = map_part(info.file, self._offsets[name], info.shape, info.dtype.itemsize, ranges, name)
        return raw.view(info.dtype).view([stop - start for start, stop in ranges])
