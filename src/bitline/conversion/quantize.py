"""quantize_checkpoint: a checkpoint with its linear layers rounded to nearest, written in any format of `convert`."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitline import bitstream
from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.conversion.open_source import source_model
from bitline.conversion.readback import RoundingError, rounding_error
from bitline.conversion.report import ConversionReport
from bitline.conversion.run import Conversion, new_result
from bitline.conversion.source_model import HEADS, QuantizedLayer, SourceModel, UnquantizedTensor
from bitline.errors import ConversionError, InputError
from bitline.formats.base import LayerRecord
from bitline.model.meta_model import check_config_sizes, make_config, make_meta_model
from bitline.model.safetensors_names import SafetensorsNameMap
from bitline.rtn import quantize, scheme_spec
from bitline.types import dtype_name
from bitline.weight import QuantizedWeight


def quantize_checkpoint(
    source: str | os.PathLike[str],
    result: str | os.PathLike[str],
    *,
    scheme: str = "W4A16",
    group_size: int | None = None,
    to: str = "compressed-tensors",
    ignore: Sequence[str] = (),
    shard_bytes: int = 5_000_000_000,
    progress: Callable[[str, int, int], None] | None = None,
) -> ConversionReport:
    """Round the linear layers of a model to nearest, without calibration data, and verify the result by reading it back.

    Linear layers and experts are quantized; embeddings, output heads, norms and routers are copied. Memory holds one layer.

    Args:
        source: A folder with config.json and safetensors of an unquantized model that transformers has.
        result: A new folder, or for `to="gguf"` a new .gguf file. It gets its name when it is complete; after an error nothing
            of it is left.
        scheme: As in `bitline.quantize`.
        group_size: As in `bitline.quantize`.
        to: The format to write, a key of TARGETS.
        ignore: Regular expressions; a layer in whose name one is found is copied.
        shard_bytes: The most data in one safetensors file, unless one tensor is larger.
        progress: Called with ("write" or "prove", layers and tensors done, in total).

    Returns:
        The report, with each layer's error against the original weight.

    Raises:
        InputError: For arguments, and a source that is quantized already or is no folder of safetensors.
        ConversionError: For a format that cannot represent the scheme, and where no layer is left to quantize.
        CheckpointError: For a source that cannot be read, and a weight that is not finite.
    """
    patterns = [_pattern(text) for text in ignore]
    _check_scheme(scheme, group_size)
    path = new_result(result, to)
    checkpoint = _open_unquantized(source)
    rounding = _Rounding(checkpoint, scheme, group_size, patterns)
    report = Conversion(rounding.source, to, path, False, False, shard_bytes, progress).run()
    layers = tuple(
        dataclasses.replace(layer, before=rounding.dtypes[layer.name], changes=(f"rounded to {layer.after}",), exact=False,
                            max_error=rounding.errors[layer.name].max_error, rms_error=rounding.errors[layer.name].rms_error)
        for layer in report.layers
    )  # fmt: skip
    return dataclasses.replace(report, layers=layers, source_format="unquantized")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InputError(
            "a pattern of layers to ignore is no regular expression", found=repr(text), expected=str(error)
        ) from error


def _check_scheme(scheme: str, group_size: int | None) -> None:
    act = scheme_spec(1, 1 << 10, scheme, group_size).act
    if act is not None and (not act.dynamic or act.scale == "e4m3"):
        raise InputError("rounding to nearest has no data to calibrate static scales of activations", found=scheme,
                         expected="a weight-only scheme, or one with dynamic activation scales, such as FP8_DYNAMIC",
                         fix="llm-compressor calibrates them")  # fmt: skip


def _open_unquantized(source: str | os.PathLike[str]) -> Checkpoint:
    checkpoint = open_checkpoint(source)
    if checkpoint.is_gguf or not checkpoint.path.is_dir():
        raise InputError("a model to quantize is a folder with config.json and safetensors", found=checkpoint.path,
                         fix="take the original model; convert changes the format of a quantized one")  # fmt: skip
    if layers := checkpoint.layers():
        found = f"{len(layers)} layers, {layers[0].format}"
        raise InputError("the model is quantized already", file=checkpoint.path, found=found,
                         fix="quantize the original model, or convert this one with --lossy")  # fmt: skip
    return checkpoint


class _Rounding:
    """A model whose linear layers are read as rounded weights.

    source: what the conversion reads. errors, dtypes: of each layer that was read, by name.
    """

    def __init__(self, checkpoint: Checkpoint, scheme: str, group_size: int | None, ignore: Sequence[re.Pattern[str]]) -> None:
        self.checkpoint, self.scheme, self.group_size = checkpoint, scheme, group_size
        self.errors: dict[str, RoundingError] = {}
        self.dtypes: dict[str, str] = {}
        plain = source_model(checkpoint)
        linear = _linear_layers(checkpoint, plain)
        chosen = {name for name in linear if not any(pattern.search(name) for pattern in ignore)}
        if not chosen:
            raise ConversionError(
                "no linear layer is left to quantize", file=checkpoint.path, found=f"{len(linear)} before --ignore"
            )
        tensors = {entry.name: entry for entry in plain.unquantized}
        entries: list[Any] = []
        for entry in plain.unquantized:
            name, _, leaf = entry.name.rpartition(".")
            if name not in chosen:
                entries.append(entry)
            elif leaf == "weight":
                entries.append(self._layer(name, entry, tensors.get(f"{name}.bias")))
            elif leaf != "bias":
                entries.append(entry)
        self.source = dataclasses.replace(plain, entries=entries)

    def _layer(self, name: str, weight: UnquantizedTensor, bias: UnquantizedTensor | None) -> QuantizedLayer:
        dtype = self.checkpoint.source.tensors[weight.name].dtype
        self.dtypes[name] = dtype_name(dtype)
        n, k = weight.shape
        spec = scheme_spec(n, k, self.scheme, self.group_size, dtype).replace(bias=bias is not None)
        read = functools.partial(self._read, name, weight, bias)
        names = (weight.name,) if bias is None else (weight.name, bias.name)
        record = LayerRecord(name, "unquantized", spec, names, read, weight.nbytes)
        return QuantizedLayer(name, record, read)

    def _read(self, name: str, weight: UnquantizedTensor, bias: UnquantizedTensor | None) -> QuantizedWeight:
        original = weight.read()
        try:
            rounded = quantize(original, self.scheme, self.group_size, bias=None if bias is None else bias.read())
        except InputError as error:
            raise ConversionError("a layer cannot be quantized", tensor=weight.name, found=str(error)) from error
        if name not in self.errors:
            self.errors[name] = _error(rounded, original)
        return rounded


def _error(rounded: QuantizedWeight, original: Tensor) -> RoundingError:
    n, step = rounded.spec.n, bitstream.rows_per_chunk(rounded.spec.k)
    chunks = (slice(r, min(r + step, n)) for r in range(0, n, step))
    return rounding_error((rounded.dequantize_rows(rows), original[rows].float()) for rows in chunks)


def _linear_layers(checkpoint: Checkpoint, plain: SourceModel) -> list[str]:
    """Modules of the file that are linear layers or experts of transformers' model; neither heads nor routers."""
    check_config_sizes(checkpoint)
    model = make_meta_model(make_config(checkpoint), torch.bfloat16, checkpoint)
    modules, names = dict(model.named_modules()), SafetensorsNameMap(model, checkpoint.path)
    found = []
    for name in plain.unquantized_linears():
        if name.rpartition(".")[2] in HEADS:
            continue
        if names.expert_place(name, layer=True) is not None or isinstance(modules.get(names.module_name(name)), nn.Linear):
            found.append(name)
    return found
