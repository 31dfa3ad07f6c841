"""open_checkpoint: what a path holds, which reader knows it, and its quantized layers."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bitline import formats
from bitline.errors import BitlineError, CheckpointError, OutOfMemoryError
from bitline.formats.base import MEMORY_MARGIN_BYTES, LayerRecord, Reader, TensorInfo, TensorSource
from bitline.formats.io.safetensors_source import PICKLES, SafetensorsSource, pickle_error
from bitline.formats.quant_config import find_quantization

# Methods that are known by name and that no reader takes yet.
NOT_YET = (
    "aqlm", "auto-round", "bitnet", "eetq", "exl2", "exl3", "fouroversix", "fp_quant", "higgs", "inc", "intel/auto-round",
    "marlin", "metal", "nvfp4", "qqq", "quanto", "quip", "quip_sharp", "sinq", "spqr", "squeezellm", "vptq",
)  # fmt: skip
# Names that only quantized layers use: one that no layer claims means that the config does not tell the whole story.
_PACKED = (".qweight", ".qzeros", ".weight_packed", ".W_q", "._weight_qdata")
# And a `weight` of one of these types is codes, which are no weights without their scales.
_CODES = (
    torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip
_WORDS = (torch.int16, torch.uint16, torch.int32, torch.uint32)  # and a matrix of these is packed codes

_registered: list[Reader] = []
plugin_failures: dict[str, str] = {}
log = logging.getLogger("bitline")
_T = TypeVar("_T")


class Checkpoint:
    """An opened checkpoint. Its config and headers have been read and checked, its tensors not yet.

    path: what was opened. source: every tensor by name. config: config.json, or {}. format: the name of the reader that
    knows its quantization ("gptq", "awq", "compressed-tensors", "gguf", …), "" where nothing is quantized.
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
        """Names of the tensors that belong to no quantized layer: norms, embeddings, layers left in 16 bits."""
        claimed = {name for record in self._layers for name in record.tensors}
        return [name for name in self.source.tensors if name not in claimed]

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored, memory-mapped where possible; a CheckpointError where there is none of this name."""
        return self.source.read(name)

    @functools.cached_property
    def _layers(self) -> tuple[LayerRecord, ...]:
        reader = self._reader
        records = [] if reader is None else _guard(lambda: list(reader.layers(self.source)), self.path, reader.name)
        claimed = {name for record in records for name in record.tensors}
        if nameless := next((record for record in records if not record.name), None):
            first = self.source.tensors[nameless.tensors[0]]
            raise CheckpointError("a quantized layer has no name", file=first.file, tensor=first.name, expected="module.suffix")
        for name, info in self.source.tensors.items():
            codes = info.dtype in _CODES and (name.endswith(".weight") or (info.dtype.is_floating_point and len(info.shape) == 3))
            codes |= info.dtype == torch.float8_e8m0fnu  # which only scales have
            codes |= info.dtype in _WORDS and name.endswith(".weight") and len(info.shape) > 1 and not self.is_gguf
            if (codes or name.endswith(_PACKED)) and name not in claimed:
                raise CheckpointError(
                    "a quantized tensor that the config does not account for", file=info.file, tensor=name,
                    found=f"quantization {self.format!r}" if reader else "no quantization config",
                    fix="the config belongs to another checkpoint, or a side file such as quantize_config.json is missing",
                )  # fmt: skip
        beside: dict[str, list[str]] = {}
        for name in self.source.tensors.keys() - claimed if records else ():
            beside.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
        records = [_noted(record, beside.get(record.name, ())) for record in records]
        stored = sum(info.nbytes for info in self.source.tensors.values())
        for record in records:
            _check_memory(record, self.source.tensors[record.tensors[0]], stored)
        return tuple(_guarded(record, self.path) for record in records)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder (config.json and *.safetensors, or one model's *.gguf), a .safetensors or a .gguf file.

    Of a GGUF model in several parts the first one, or the folder, is named.

    Reads config and headers, no tensor data. A CheckpointError says what is wrong with the path or the files, or that no
    reader knows the quantization method.
    """
    path = Path(path)
    source = _guard(lambda: _open_source(path), path, "the file")
    return Checkpoint(path if source.path.suffix.lower() != ".gguf" else source.path, source, _find_reader(source))


def register_format(reader: Reader | type) -> None:
    """Add a reader, an object of the Reader protocol or a class that makes one; it is asked before the built-in ones.

    One of the same name is replaced. Packages register through entry points of the group "bitline.formats" instead.
    """
    made = _made(reader)
    _registered[:] = [made, *(r for r in _registered if r.name != made.name)]


def _made(reader: Any) -> Reader:
    made = reader() if isinstance(reader, type) else reader
    lacking = [name for name in ("name", "matches", "layers") if not hasattr(made, name)]
    if lacking:
        raise TypeError(f"{reader!r} is no format reader: it lacks {', '.join(lacking)}")
    return made


def _open_source(path: Path) -> TensorSource:
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix.lower() in (".gguf", ".safetensors"))
        ggufs = [p for p in files if p.suffix.lower() == ".gguf"]
        if not ggufs or len(ggufs) != len(files):
            return SafetensorsSource(path)
        first = importlib.import_module("bitline.formats.gguf.split_files").whole_model(ggufs)
        if first is None:
            names = ", ".join(p.name for p in ggufs[:4])
            raise CheckpointError("several GGUF files in one folder", file=path, found=names, fix="name one of them")
        path = first
    elif not path.exists():
        raise CheckpointError("no such file or folder", file=path, expected="a checkpoint folder, a .safetensors or a .gguf file")
    elif not path.is_file():
        found = "a pipe, a socket or a device"
        raise CheckpointError("neither a file nor a folder", file=path, found=found, expected="one of both")
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return importlib.import_module("bitline.formats.gguf.reader").GGUFSource(path)
    if suffix in PICKLES:
        raise pickle_error(path, path.name)
    if suffix != ".safetensors":
        raise CheckpointError(
            "not a checkpoint by its name", file=path, found=suffix or "no suffix", expected=".safetensors, .gguf or a folder",
            fix="name the folder that holds config.json" if suffix == ".json" else None,
        )  # fmt: skip
    return SafetensorsSource(path)


def _readers(method: str = "") -> Iterator[Reader]:
    """Registered readers, then the built-in ones, then those of installed packages, imported one by one as needed.

    Built in is every module under bitline.formats that has a READER. Their `matches` exclude each other, so their order is no
    matter: a module that is named like the method, or lies in a folder of that name, comes first, for speed, then all by name.
    """
    yield from _registered
    wanted = method.replace("-", "_")
    for name in sorted(_format_modules(), key=lambda name: (wanted not in name.split("."), name)):
        reader = getattr(importlib.import_module(name), "READER", None)
        if reader is not None:
            yield reader
    for point in entry_points(group="bitline.formats"):
        try:
            yield _PlugIn(point, _made(point.load()))
        except (Exception, SystemExit) as error:
            _report(point, "load", error)


@functools.cache
def _format_modules() -> tuple[str, ...]:
    """The modules under bitline.formats that may have a reader."""
    found = pkgutil.walk_packages(formats.__path__, f"{formats.__name__}.")
    return tuple(module.name for module in found if not module.ispkg)


class _PlugIn:
    """A stranger's reader, which takes nothing else down where it fails to say whether a checkpoint is its own."""

    def __init__(self, point: EntryPoint, reader: Reader) -> None:
        self._point, self._reader, self.name = point, reader, str(reader.name)

    def matches(self, source: TensorSource) -> bool:
        try:
            return bool(self._reader.matches(source))
        except (Exception, SystemExit) as error:
            _report(self._point, "look at a checkpoint", error)
            return False

    def layers(self, source: TensorSource) -> Iterable[LayerRecord]:
        return self._reader.layers(source)


def _report(point: EntryPoint, what: str, error: BaseException) -> None:
    plugin_failures[point.name] = f"{type(error).__name__}: {error}"
    log.warning("format plug-in %s (%s) failed to %s: %s", point.name, point.value, what, plugin_failures[point.name])


def _find_reader(source: TensorSource) -> Reader | None:
    """The reader that takes this checkpoint, None where it is not quantized; otherwise a CheckpointError says why."""
    config, file = find_quantization(source)
    method, asked = str(config.get("quant_method", "")), []
    for reader in _readers(method):
        asked.append(reader.name)
        if _guard(functools.partial(reader.matches, source), source.path, reader.name):
            return reader
    if not config or method in ("none", "fp16", "bf16"):
        return None
    found = f"quant_method {method!r}"
    if config.get("packing_format"):
        found += f" with packing_format {config['packing_format']!r}"
    readers = ", ".join(asked)
    known = method in NOT_YET
    raise CheckpointError(
        f"quantization {method!r} is {'not supported yet' if known else 'not known'}", file=file,
        field="packing_format" if config.get("packing_format") else "quant_method", found=found,
        expected=f"one of {readers}" if known else f"one of {readers} (known, not supported yet: {', '.join(NOT_YET)})",
        fix="convert the model to one of these formats, or register a reader with bitline.register_format",
    )  # fmt: skip


def _noted(record: LayerRecord, beside: Sequence[str]) -> LayerRecord:
    """The record, with an oddity where its module has tensors that its reader does not know."""
    if not beside:
        return record
    names = ", ".join(sorted(beside)[:5]) + (", …" if len(beside) > 5 else "")
    return dataclasses.replace(record, oddities=(*record.oddities, f"tensors beside it that are not known are not used: {names}"))


def _check_memory(record: LayerRecord, info: TensorInfo, stored: int) -> None:
    """An error where a layer takes more memory than all that is stored: scales of blocks that its rows cut in pieces."""
    spec = record.spec
    for what, nbytes in (("codes", spec.codes_bytes()), ("scales", spec.scale_count() * spec.scale_dtype.itemsize)):
        if nbytes > stored + MEMORY_MARGIN_BYTES:
            raise CheckpointError(
                f"a layer's {what} would take more memory than the whole file", file=info.file, tensor=info.name,
                found=f"{nbytes} bytes for {spec}", expected=f"at most {stored} bytes, which are stored, and 64 MB",
            )  # fmt: skip


def _guarded(record: LayerRecord, path: Path) -> LayerRecord:
    """The record with a read that raises nothing but deliberate errors."""
    read = record.read
    return dataclasses.replace(record, read=lambda: _guard(read, path, record.name))


def _guard(call: Callable[[], _T], path: Path, who: str) -> _T:
    """What a bad file makes a reader trip over is a bad file's fault and is reported so, never as a bare KeyError."""
    try:
        return call()
    except (BitlineError, MemoryError):
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError and "alloc" in str(error):  # how torch says that this machine's memory is full
            raise OutOfMemoryError(f"no memory to read {who}", file=path, found=error) from error
        raise CheckpointError(
            f"{who} cannot be read as what it says it is", file=path, found=f"{type(error).__name__}: {error}",
            fix="the files are damaged or of an unknown version; if other tools read them, please report it",
        ) from error  # fmt: skip
