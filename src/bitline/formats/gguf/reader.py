"""GGUF: layer records of the quantized matrices of a GGUFSource."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.formats.base import LayerRecord, PartReader, Range, TensorSource, check_expert_count, in_tensor
from bitline.formats.gguf.blocks import BLOCKS, SUPPORTED, to_weight
from bitline.formats.gguf.ggml_types import BLOCK_SIZES, PLAIN_TYPES
from bitline.formats.gguf.source import GGUFSource
from bitline.weight import QuantizedWeight


class GGUFReader:
    """Layer records of a GGUF model: one for each quantized matrix, named as in the file without ".weight".

    A bias and a scale of the same name are part of the layer. Each of stacked experts is a layer, with its number at the end
    of its name. llama.cpp's names are mapped to a model's modules elsewhere.
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
    """A quantized tensor, [N, K] or [E, N, K], with its bias and its factor."""

    source: GGUFSource
    name: str
    bias: str | None
    scale: str | None

    def read(self, expert: int | None, layer: str, rows: Range | None = None, columns: Range | None = None) -> QuantizedWeight:
        """The weight, or that of one of stacked experts; or of it the rows, and columns of whole blocks."""
        kind, (*_, n, k) = self.source.ggml[self.name]
        size, nbytes = BLOCK_SIZES[kind]
        rows, (first, last) = rows or (0, n), columns or (0, k)
        bias = None if self.bias is None else self._part(self.bias, expert, [rows])
        factor = None if self.scale is None else float(self.source.read(self.scale).view(-1)[expert or 0])
        blocks = self._part(self.name, expert, [rows, (first // size * nbytes, last // size * nbytes)])
        try:
            return to_weight(kind, blocks, last - first, bias, layer, factor)
        except WeightError as error:
            stored_as = {"bias": self.bias, "scale2": self.scale, "offset2": self.scale}
            fields = {field: self.source.tensors[name] for field, name in stored_as.items() if name is not None}
            raise in_tensor(error, self.source.tensors[self.name], fields) from error

    def _part(self, name: str, expert: int | None, ranges: list[Range]) -> Tensor:
        """A part of a tensor, or of one expert's entry of a stacked one."""
        if expert is None:
            return self.source.read_part(name, ranges)
        return self.source.read_part(name, [(expert, expert + 1), *ranges])[0]


def records(source: GGUFSource, name: str) -> Iterator[LayerRecord]:
    """The record of the quantized matrix `name`, or one for each of stacked matrices [E, N, K], numbered from 0.

    `<layer>.bias` [N] ([E, N]) is its bias and `<layer>.scale` [1] ([E]) a factor of all its weights, as llama.cpp's
    converter writes them for NVFP4 and BitNet. An unsupported ggml type is a CheckpointError.
    """
    info, (kind, shape) = source.tensors[name], source.ggml[name]
    _check_supported(source, name)
    (*stack, n, k), base = shape, name.removesuffix(".weight")
    check_expert_count(info, stack[0] if stack else 1)
    extras, warnings = _find_extras(source, name, base, tuple(stack), n)
    matrix = _Matrix(source, name, extras.get("bias"), extras.get("scale"))
    spec = BLOCKS[kind].spec(n, k, bias=matrix.bias is not None, scaled=matrix.scale is not None)
    names = (name, *extras.values())
    may_be_unused = [f"{base}.{key}" for key in ("scale", "input_scale")]  # a scale that is no factor is another module's
    unused = tuple(tensor for tensor in may_be_unused if tensor in source.tensors and tensor != matrix.scale)
    nbytes = sum(source.tensors[tensor].nbytes for tensor in names) // (stack[0] if stack else 1)
    block = BLOCK_SIZES[kind][0]
    units = (1, block if block < k else 0)
    for expert in range(stack[0]) if stack else (None,):
        layer = base if expert is None else f"{base}.{expert}"
        read = functools.partial(matrix.read, expert, layer)
        parts = PartReader(units, read)
        yield LayerRecord(layer, f"gguf {kind}", spec, names, read, nbytes, tuple(warnings), unused, parts)


def _check_supported(source: GGUFSource, name: str) -> None:
    info, (kind, shape) = source.tensors[name], source.ggml[name]
    if kind not in BLOCKS:
        raise CheckpointError(
            f"ggml type {kind} is not supported", file=info.file, tensor=name, found=kind, expected=f"one of {SUPPORTED}",
            fix="ggml itself cannot dequantize it: quantize the model again, for example to Q4_K_M",
        )  # fmt: skip
    if len(shape) not in (2, 3):
        raise CheckpointError(
            "a quantized tensor is not a matrix", file=info.file, tensor=name, found=f"{kind} {list(shape)}",
            expected="[N, K], or [E, N, K] for stacked experts",
        )  # fmt: skip


def _find_extras(source: GGUFSource, name: str, base: str, stack: tuple[int, ...], n: int) -> tuple[dict[str, str], list[str]]:
    """The names of the layer's bias, factor and input_scale, those that exist, and warnings about them."""
    extras = {key: f"{base}.{key}" for key in ("bias", "scale") if base != name and f"{base}.{key}" in source.tensors}
    warnings = []
    if "bias" in extras:
        _check_bias(source, extras["bias"], (*stack, n))
    if "scale" in extras and not _is_factor(source, extras["scale"], stack or (1,)):
        del extras["scale"]
        warnings.append("a tensor of its name with .scale is no factor of the weight and is ignored")
    if f"{base}.input_scale" in source.tensors:
        extras["input_scale"] = f"{base}.input_scale"
        warnings.append("input_scale is not used: activations are not quantized")
    return extras, warnings


def _check_bias(source: GGUFSource, name: str, shape: tuple[int, ...]) -> None:
    bias = source.tensors[name]
    if bias.shape != shape or not bias.dtype.is_floating_point:
        raise CheckpointError(
            "a bias does not fit its weight", file=bias.file, tensor=name, found=f"{source.ggml[name][0]} {list(bias.shape)}",
            expected=f"floats {list(shape)}",
        )  # fmt: skip


def _is_factor(source: GGUFSource, name: str, shape: tuple[int, ...]) -> bool:
    """True for one float per matrix. Some models use this name for other tensors (Gemma's router)."""
    scale = source.tensors[name]
    return scale.shape == shape and scale.dtype.is_floating_point


READER = GGUFReader()
