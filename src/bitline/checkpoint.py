"""open_checkpoint: the files of a path, the reader of their format, and the quantized layers."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bitline.errors import BitlineError, CheckpointError, OutOfMemoryError
from bitline.formats.base import HARMLESS, MEMORY_MARGIN_BYTES, LayerRecord, Reader, TensorInfo, TensorSource
from bitline.formats.discovery import readers
from bitline.formats.io.checkpoint_files import PICKLES, pickle_error
from bitline.formats.io.safetensors_source import SafetensorsSource
from bitline.formats.quant_config import find_quantization
from bitline.host import without_default_device
from bitline.weight import QuantizedWeight

# Known quantization methods that no reader supports yet.
UNSUPPORTED_METHODS = (
    "aqlm", "auto-round", "bitnet", "eetq", "exl2", "exl3", "fouroversix", "fp_quant", "higgs", "inc", "intel/auto-round",
    "marlin", "metal", "nvfp4", "qqq", "quanto", "quip", "quip_sharp", "sinq", "spqr", "squeezellm", "vptq",
)  # fmt: skip
# Evidence of quantized codes that no layer claims, which means that the config is incomplete or of another checkpoint:
# suffixes that only quantized layers use, a `weight` of an 8-bit dtype, and a `weight` matrix of packed integers.
_CODE_SUFFIXES = (".qweight", ".qzeros", ".weight_packed", ".W_q", "._weight_qdata")
_CODE_DTYPES = (
    torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip
_PACKED_DTYPES = (torch.int16, torch.uint16, torch.int32, torch.uint32)

_T = TypeVar("_T")


class Checkpoint:
    """An opened checkpoint. Its config and headers have been read and checked, its tensors not yet.

    path: what was opened. source: every tensor by name. config: config.json, or {}. format: the name of the reader of its
    quantization ("gptq", "awq", "compressed-tensors", "gguf", …), "" where nothing is quantized.
    """

    def __init__(self, path: Path, source: TensorSource, reader: Reader | None) -> None:
        self.path, self.source, self._reader = path, source, reader

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, or {} where there is none."""
        return self.source.config

    @property
    def format(self) -> str:
        """The name of the reader, "" where nothing is quantized."""
        return self._reader.name if self._reader else ""

    @property
    def is_gguf(self) -> bool:
        """True for a GGUF file, whose names and configuration are not transformers' own."""
        return hasattr(self.source, "ggml")

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The files' own metadata: a GGUF header's keys, a safetensors header's __metadata__."""
        return getattr(self.source, "metadata", {})

    def layers(self) -> list[LayerRecord]:
        """Every quantized linear layer, in file order; an empty list where nothing is quantized.

        Found on the first call and kept. A layer whose tensors contradict each other or the config is a CheckpointError.
        """
        return list(self._layers)

    def layer(self, name: str) -> LayerRecord:
        """One layer by its module's name ("model.layers.0.mlp.down_proj"); a CheckpointError where there is none."""
        for record in self._layers:
            if record.name == name:
                return record
        near = difflib.get_close_matches(name, [r.name for r in self._layers], 3, 0.5)
        raise CheckpointError(
            "no such quantized layer", file=self.path, tensor=name, expected=f"one of {len(self._layers)} layers",
            fix=f"perhaps {' or '.join(near)}" if near else None,
        )  # fmt: skip

    def dense_names(self) -> list[str]:
        """Names of the tensors that belong to no quantized layer: norms, embeddings, layers in 16 bits."""
        claimed = _claimed(self._layers)
        return [name for name in self.source.tensors if name not in claimed]

    @without_default_device
    def read(self, name: str) -> Tensor:
        """A tensor as it is stored, memory-mapped where possible; a CheckpointError where there is none of this name."""
        return self.source.read(name)

    @functools.cached_property
    def _layers(self) -> tuple[LayerRecord, ...]:
        reader = self._reader
        records = [] if reader is None else _guard(lambda: list(reader.layers(self.source)), self.path, reader.name)
        self._check_names(records)
        self._check_unclaimed_codes(records)
        strays = self._unclaimed_by_layer(records)
        stored = sum(info.nbytes for info in self.source.tensors.values())
        for record in records:
            _check_memory(record, self.source.tensors[record.tensors[0]], stored)
        return tuple(self._guarded(record, strays.get(record.name, [])) for record in records)

    def _check_names(self, records: Sequence[LayerRecord]) -> None:
        if nameless := next((record for record in records if not record.name), None):
            first = self.source.tensors[nameless.tensors[0]]
            raise CheckpointError("a quantized layer has no name", file=first.file, tensor=first.name, expected="module.suffix")

    def _check_unclaimed_codes(self, records: Sequence[LayerRecord]) -> None:
        """An error where a tensor of codes belongs to no layer: the layer must not pass for a missing or a dense one."""
        claimed = _claimed(records)
        for name, info in self.source.tensors.items():
            if name not in claimed and (name.endswith(_CODE_SUFFIXES) or self._has_code_dtype(name, info)):
                raise CheckpointError(
                    "a quantized tensor that the config does not account for", file=info.file, tensor=name,
                    found=f"quantization {self.format!r}" if self._reader else "no quantization config",
                    fix="the config belongs to another checkpoint, or a side file such as quantize_config.json is missing",
                )  # fmt: skip

    def _has_code_dtype(self, name: str, info: TensorInfo) -> bool:
        if info.dtype == torch.float8_e8m0fnu:  # only scales are E8M0
            return True
        is_weight = name.endswith(".weight")
        if info.dtype in _CODE_DTYPES and (is_weight or (info.dtype.is_floating_point and len(info.shape) == 3)):
            return True
        return info.dtype in _PACKED_DTYPES and is_weight and len(info.shape) > 1 and not self.is_gguf

    # ---- tensors that nothing uses ---------------------------------------------------------------------------------------

    def _unclaimed_by_layer(self, records: Sequence[LayerRecord]) -> dict[str, list[str]]:
        """Tensors inside a quantized layer's module, or named after the stack that it is an expert of, that belong to no layer;
        by the layer's name, under the first expert's for a stack.
        """
        claimed = _claimed(records)
        modules = {record.name: record.name for record in records}
        stacks: dict[str, str] = {}
        for record in records:
            if (stack := _stack_of(record)) is not None:
                stacks.setdefault(stack, record.name)
        lengths = sorted({len(name) for name in (*modules, *stacks)}, reverse=True)  # the innermost module first
        found: dict[str, list[str]] = {}
        for name in self.source.tensors:
            if name not in claimed and (owner := _owner(name, modules, stacks, lengths)) is not None:
                found.setdefault(owner, []).append(name)
        return found

    def _guarded(self, record: LayerRecord, strays: Sequence[str]) -> LayerRecord:
        """The record with a warning about its strays, and reading functions that raise BitlineErrors only and refuse a layer with
        a tensor that nothing used.
        """

        def checked(read: Callable[[], QuantizedWeight]) -> QuantizedWeight:
            weight = _guard(read, self.path, record.name)
            self._check_all_used(record, strays)
            return weight

        oddities, parts = (*record.oddities, *_stray_warning(record.name, strays)), record.parts
        if parts is not None:
            read_part = parts.read
            parts = dataclasses.replace(parts, read=lambda *part: checked(functools.partial(read_part, *part)))
        return dataclasses.replace(record, read=functools.partial(checked, record.read), oddities=oddities, parts=parts)

    def _check_all_used(self, record: LayerRecord, strays: Sequence[str]) -> None:
        """An error for a tensor of a layer that was read by nothing: the weight would lack what it holds."""
        if self.source.reads.isdisjoint(record.tensors):  # a plug-in's reader that reads the files by itself
            return
        others = [name for name in strays if name.rpartition(".")[2] not in HARMLESS]
        for name in (*record.tensors, *others):
            if name in self.source.reads or name in record.unused:
                continue
            info = self.source.tensors[name]
            raise CheckpointError(
                "a tensor of a quantized layer that nothing uses", file=info.file, tensor=name,
                found=f"{info.dtype} {list(info.shape)} in layer {record.name}, read as {record.format}: {record.spec.scheme}",
                expected="every tensor of a layer in use, or known to hold nothing that it needs",
                fix="the quantization config lacks a key (symmetric, sym, …), or is of another version of the format",
            )  # fmt: skip


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder (config.json and *.safetensors, or one model's *.gguf), a .safetensors or a .gguf file.

    For a GGUF model split over several files, the first one or the folder.

    Reads config and headers, no tensor data. A CheckpointError says what is wrong with the path or the files, or that no
    reader supports the quantization method.
    """
    path = Path(path)
    source = _guard(lambda: _open_source(path), path, "the file")
    return Checkpoint(path if source.path.suffix.lower() != ".gguf" else source.path, source, _find_reader(source))


# ---- files ---------------------------------------------------------------------------------------------------------------


def _open_source(path: Path) -> TensorSource:
    if path.is_dir():
        gguf_file = _gguf_file(path)
        if gguf_file is None:
            return SafetensorsSource(path)
        path = gguf_file
    elif not path.exists():
        raise CheckpointError("no such file or folder", file=path, expected="a checkpoint folder, a .safetensors or a .gguf file")
    elif not path.is_file():
        found = "a pipe, a socket or a device"
        raise CheckpointError("neither a file nor a folder", file=path, found=found, expected="one of both")
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return importlib.import_module("bitline.formats.gguf.source").GGUFSource(path)
    if suffix in PICKLES:
        raise pickle_error(path, path.name)
    if suffix != ".safetensors":
        raise CheckpointError(
            "not a checkpoint by its name", file=path, found=suffix or "no suffix", expected=".safetensors, .gguf or a folder",
            fix="name the folder that holds config.json" if suffix == ".json" else None,
        )  # fmt: skip
    return SafetensorsSource(path)


def _gguf_file(folder: Path) -> Path | None:
    """The .gguf file to open in a folder that holds one GGUF model; None where there are none or safetensors too."""
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".gguf", ".safetensors"))
    gguf_files = [p for p in files if p.suffix.lower() == ".gguf"]
    if not gguf_files or len(gguf_files) != len(files):
        return None
    first = importlib.import_module("bitline.formats.gguf.split_files").file_to_open(gguf_files)
    if first is None:
        names = ", ".join(p.name for p in gguf_files[:4])
        raise CheckpointError("several GGUF files in one folder", file=folder, found=names, fix="name one of them")
    return first


# ---- the reader ----------------------------------------------------------------------------------------------------------


def _find_reader(source: TensorSource) -> Reader | None:
    """The reader that matches the checkpoint, None where it is not quantized; else a CheckpointError says why."""
    config, file = find_quantization(source)
    method, names = str(config.get("quant_method", "")), []
    for reader in readers(method):
        names.append(reader.name)
        if _guard(functools.partial(reader.matches, source), source.path, reader.name):
            return reader
    if not config or method in ("none", "fp16", "bf16"):
        return None
    found = f"quant_method {method!r}"
    if config.get("packing_format"):
        found += f" with packing_format {config['packing_format']!r}"
    supported = f"one of {', '.join(names)}"
    known = method in UNSUPPORTED_METHODS
    raise CheckpointError(
        f"quantization {method!r} is {'not supported yet' if known else 'not known'}", file=file,
        field="packing_format" if config.get("packing_format") else "quant_method", found=found,
        expected=supported if known else f"{supported} (known, not supported yet: {', '.join(UNSUPPORTED_METHODS)})",
        fix="convert the model to one of these formats, or register a reader with bitline.register_format",
    )  # fmt: skip


# ---- records -------------------------------------------------------------------------------------------------------------


def _claimed(records: Sequence[LayerRecord]) -> set[str]:
    """Names of the tensors that belong to layers."""
    return {name for record in records for name in record.tensors}


def _stack_of(record: LayerRecord) -> str | None:
    """The name of the stack that a layer is an expert of; None for a layer with tensors of its own."""
    stack, _, number = record.name.rpartition(".")
    own = record.tensors[0] == record.name or record.tensors[0].startswith(f"{record.name}.")
    return stack if number.isdigit() and not own else None


def _owner(name: str, modules: Mapping[str, str], stacks: Mapping[str, str], lengths: Sequence[int]) -> str | None:
    """The layer whose module, or whose stack of experts, a tensor's name is in. lengths: of those names, the longest first."""
    for length in lengths:
        after = name[length : length + 1]
        if after == "." and (found := modules.get(name[:length]) or stacks.get(name[:length])) is not None:
            return found
        if after == "_" and (found := stacks.get(name[:length])) is not None:
            return found
    return None


def _stray_warning(layer: str, strays: Sequence[str]) -> list[str]:
    """A warning that names tensors of a layer's module that no reader knows; none where there are none."""
    suffixes = sorted(name.removeprefix(f"{layer}.") for name in strays)
    names = ", ".join(suffixes[:5]) + (", …" if len(suffixes) > 5 else "")
    return [f"the module has tensors that are not known and not used: {names}"] if suffixes else []


def _check_memory(record: LayerRecord, info: TensorInfo, stored: int) -> None:
    """An error where a layer needs more memory than the whole file, as scale blocks that are not whole in a row may."""
    spec = record.spec
    for what, nbytes in (("codes", spec.codes_bytes()), ("scales", spec.scale_count() * spec.scale_dtype.itemsize)):
        if nbytes > stored + MEMORY_MARGIN_BYTES:
            raise CheckpointError(
                f"a layer's {what} would take more memory than the whole file", file=info.file, tensor=info.name,
                found=f"{nbytes} bytes for {spec}", expected=f"at most {stored} bytes, which are stored, and 64 MB",
            )  # fmt: skip


@without_default_device
def _guard(call: Callable[[], _T], path: Path, who: str) -> _T:
    """Call a reader. Any exception that a bad file provokes in it becomes a CheckpointError, never a bare KeyError."""
    try:
        return call()
    except (BitlineError, MemoryError):
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError and "alloc" in str(error):  # torch's error where the machine has no memory left
            raise OutOfMemoryError(f"no memory to read {who}", file=path, found=error) from error
        raise CheckpointError(
            f"{who} cannot be read as what it says it is", file=path, found=f"{type(error).__name__}: {error}",
            fix="the files are damaged or of an unknown version; if other tools read them, please report it",
        ) from error  # fmt: skip
