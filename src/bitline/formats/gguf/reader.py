"""GGUF: files that hold a model's metadata, its plain tensors and its quantized ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, check_expert_count, in_tensor
from bitline.formats.gguf.blocks import BLOCKS, PLAIN_TYPES, SIZES, SUPPORTED, to_weight
from bitline.formats.gguf.split_files import read_parts
from bitline.formats.io.mapped_file import map_bytes
from bitline.weight import QuantizedWeight


class GGUFSource:
    """The tensors of one .gguf file (version 2 or 3, little-endian), or of all parts of a split model, for format readers.

    path: the file, or the first part. files: all of them.
    metadata: key to int, float, bool, str, list[str], list[bool], list of arrays, or array.array for numbers. Strings
        that are not UTF-8 (some vocabularies hold raw bytes) are decoded with "surrogateescape".
    tensors: plain tensors have their own dtype and row-major shape; a quantized tensor is uint8 [..., K / block * bytes].
    ggml: for every tensor its ggml type ("F32", "Q4_K", "IQ4_XS", …) and its logical row-major shape, [N, K] for a matrix.
    config: {"quantization_config": {"quant_method": "gguf"}}.

    A header that lies or ends early, or a part that is missing, is a CheckpointError on opening.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config: Mapping[str, Any] = {"quantization_config": {"quant_method": "gguf"}}
        self.tensors: dict[str, TensorInfo] = {}
        self.ggml: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._offsets: dict[str, int] = {}
        parts = read_parts(self.path)
        self.files = tuple(part.path for part in parts)
        self.metadata: dict[str, Any] = parts[0].metadata
        for part in parts:
            for name, entry in part.tensors.items():
                if name in self.tensors:
                    raise CheckpointError("two parts of a split model have the same tensor", file=part.path, tensor=name,
                                          found=f"also in {self.tensors[name].file.name}", expected="each name once")  # fmt: skip
                shape = entry.shape
                if entry.kind not in PLAIN_TYPES:
                    weights, nbytes = SIZES[entry.kind]
                    shape = (*shape[:-1], shape[-1] // weights * nbytes)
                dtype = PLAIN_TYPES.get(entry.kind, torch.uint8)
                self.tensors[name] = TensorInfo(name, dtype, shape, part.path, entry.nbytes)
                self.ggml[name] = (entry.kind, entry.shape)
                self._offsets[name] = entry.offset

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """The tensor as a view of the mapped file, with the dtype and shape of `tensors[name]`; writing to it never
        reaches the file. rows: only so many of its first rows. A missing name is a CheckpointError.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError("no such tensor", file=self.path, tensor=name, expected=f"one of {len(self.tensors)} names")
        raw = map_bytes(info.file, self._offsets[name], info.nbytes, name)
        return raw.view(info.dtype).view(info.shape)


class GGUFReader:
    """Layer records of a GGUF file: one for each quantized matrix, named as in the file without ".weight".

    A bias and a scale of the same name are part of the layer. Of stacked experts each is a layer, with its number at the
    end of its name. Mapping llama.cpp's names to a model's modules is done elsewhere.
    """

    name = "gguf"

    def matches(self, source: TensorSource) -> bool:
        """True for a GGUFSource."""
        return isinstance(source, GGUFSource)

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """A record for every quantized matrix. One that cannot be read is a CheckpointError; see `records`."""
        assert isinstance(source, GGUFSource)
        for name, (kind, _) in source.ggml.items():
            if kind not in PLAIN_TYPES:
                yield from records(source, name)


@dataclass(frozen=True)
class _Matrix:
    """A quantized tensor, and the tensors beside it that belong to it."""

    source: GGUFSource
    name: str
    bias: str | None
    scale: str | None

    def read(self, expert: int | None, layer: str) -> QuantizedWeight:
        """The weight, or that of one expert of a stack."""
        kind, shape = self.source.ggml[self.name]
        of = lambda tensor: tensor if expert is None else tensor[expert]
        bias = None if self.bias is None else of(self.source.read(self.bias))
        factor = None if self.scale is None else float(self.source.read(self.scale).view(-1)[expert or 0])
        try:
            return to_weight(kind, of(self.source.read(self.name)), shape[-1], bias, layer, factor)
        except WeightError as error:
            beside = {"bias": self.bias, "scale2": self.scale, "offset2": self.scale}
            fields = {field: self.source.tensors[name] for field, name in beside.items() if name is not None}
            raise in_tensor(error, self.source.tensors[self.name], fields) from error

    def reader(self, expert: int | None, layer: str) -> Callable[[], QuantizedWeight]:
        return lambda: self.read(expert, layer)


def records(source: GGUFSource, name: str) -> Iterator[LayerRecord]:
    """The record of the quantized matrix `name`, or one for each of stacked ones [E, N, K], numbered from 0.

    `<layer>.bias` [N] ([E, N]) is its bias and `<layer>.scale` [1] ([E]) a factor of all its weights, as llama.cpp's
    converter writes them for NVFP4 and BitNet. A ggml type that cannot be read is a CheckpointError.
    """
    info, (kind, shape) = source.tensors[name], source.ggml[name]
    if kind not in BLOCKS:
        raise CheckpointError(
            f"ggml type {kind} is not supported", file=info.file, tensor=name, found=kind, expected=f"one of {SUPPORTED}",
            fix="ggml itself has no decoder for it: quantize the model again, for example to Q4_K_M",
        )  # fmt: skip
    if len(shape) not in (2, 3):
        raise CheckpointError(
            "a quantized tensor is not a matrix", file=info.file, tensor=name, found=f"{kind} {list(shape)}",
            expected="[N, K], or [E, N, K] for stacked experts",
        )  # fmt: skip
    (*stack, n, k), base = shape, name.removesuffix(".weight")
    check_expert_count(info, stack[0] if stack else 1)
    beside = {key: f"{base}.{key}" for key in ("bias", "scale") if base != name and f"{base}.{key}" in source.tensors}
    oddities = []
    if "bias" in beside:
        _expect_bias(source, beside["bias"], (*stack, n))
    if "scale" in beside and not _is_factor(source, beside["scale"], tuple(stack) or (1,)):
        del beside["scale"]
        oddities.append("a tensor of its name with .scale is no factor of the weight and is left alone")
    if f"{base}.input_scale" in source.tensors:
        beside["input_scale"] = f"{base}.input_scale"
        oddities.append("input_scale is not used: inputs keep their 16 bits")
    matrix = _Matrix(source, name, beside.get("bias"), beside.get("scale"))
    spec = BLOCKS[kind].spec(n, k, bias=matrix.bias is not None, scaled=matrix.scale is not None)
    names = (name, *beside.values())
    nbytes = sum(source.tensors[part].nbytes for part in names) // (stack[0] if stack else 1)
    for expert in range(stack[0]) if stack else (None,):
        layer = base if expert is None else f"{base}.{expert}"
        yield LayerRecord(layer, f"gguf {kind}", spec, names, matrix.reader(expert, layer), nbytes, tuple(oddities))


def _expect_bias(source: GGUFSource, name: str, shape: tuple[int, ...]) -> None:
    bias = source.tensors[name]
    if bias.shape != shape or not bias.dtype.is_floating_point:
        raise CheckpointError(
            "a bias does not fit its weight", file=bias.file, tensor=name, found=f"{source.ggml[name][0]} {list(bias.shape)}",
            expected=f"floats {list(shape)}",
        )  # fmt: skip


def _is_factor(source: GGUFSource, name: str, shape: tuple[int, ...]) -> bool:
    """True for one float a matrix. Other tensors of this name belong to a model's own structure (Gemma's router)."""
    scale = source.tensors[name]
    return scale.shape == shape and scale.dtype.is_floating_point


READER = GGUFReader()
