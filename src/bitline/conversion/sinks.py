"""Where the result goes: a folder of safetensors or one GGUF file, under a name that nothing looks for until it is whole."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bitline.conversion.base import Target
from bitline.conversion.files import ShardWriter, header_bytes, write_json
from bitline.conversion.gguf import blocks
from bitline.conversion.gguf.model import GGUFModel
from bitline.conversion.gguf.writer import GGUFWriter, plain_type
from bitline.conversion.original import Layer, Original, Plain
from bitline.conversion.packing import same_numbers
from bitline.errors import CheckpointError, ConversionError, InputError
from bitline.types import LinearSpec, dtype_name
from bitline.weight import QuantizedWeight

_PER_LAYER = 8  # tensors that a layer has at most, in any format


class Sink(Protocol):
    """One result being written. path: where it is until `publish` gives it its name."""

    path: Path

    def others(self) -> tuple[list[str], list[str]]:
        """Write what does not depend on weights. -> names of the original's other files that were copied, and of those left."""
        ...

    def layer(self, layer: Layer, weight: QuantizedWeight) -> int:
        """Write a layer in one of the target's forms; bytes written."""
        ...

    def plain(self, name: str, tensor: Tensor) -> int:
        """Write a plain tensor under transformers' name; bytes written."""
        ...

    def finish(self, layers: Mapping[str, LinearSpec]) -> None:
        """Write everything else. layers: those that are quantized, with their forms."""
        ...

    def publish(self) -> None:
        """Give the result its name."""
        ...

    def discard(self) -> None:
        """Remove what was written."""
        ...

    def name_of(self, name: str) -> str:
        """The name that a module or tensor has in the result."""
        ...

    def order_of(self, name: str) -> Tensor | None:
        """The rows of a module or tensor in the result's order; None where it is the original's."""
        ...


class FolderSink:
    """A folder as transformers lays it out."""

    def __init__(self, original: Original, target: Target, result: Path, shard_bytes: int) -> None:
        check_folder(result)
        self.original, self.target, self.result = original, target, result
        layers, plain = [layer.name for layer in original.layers], [p.name for p in original.plain]
        room = header_bytes(layers, _PER_LAYER) + header_bytes(plain, 1)
        self._inside = result.is_dir()  # an empty folder may be a mount or someone's working directory: it stays what it is
        self.path = result / _partial() if self._inside else result.parent / _partial()
        self._made = _make_parents(self.path)
        self.path.mkdir()
        self._shards = ShardWriter(self.path, shard_bytes, room)

    def others(self) -> tuple[list[str], list[str]]:
        """The other files of the original's folder, and a tokenizer that is inside the checkpoint."""
        taken, left = self.original.other_files()
        for path in taken:
            _copy(path, self.path / path.name)
        if self.original.save_tokenizer is not None:
            self.original.save_tokenizer(self.path)
        return [path.name for path in taken], left

    def layer(self, layer: Layer, weight: QuantizedWeight) -> int:
        """The target's tensors under the layer's name."""
        tensors = self.target.pack(weight)
        for suffix, tensor in tensors.items():
            self._shards.add(f"{layer.name}.{suffix}", tensor)
        return sum(tensor.nbytes for tensor in tensors.values())

    def plain(self, name: str, tensor: Tensor) -> int:
        """The tensor as it is."""
        self._shards.add(name, tensor)
        return tensor.nbytes

    def finish(self, layers: Mapping[str, LinearSpec]) -> None:
        """config.json with the new quantization, and what the target adds."""
        self._shards.finish()
        config = {**self.original.config, "quantization_config": self.target.config(layers, self.original)}
        write_json(self.path / "config.json", config)
        for name, content in self.target.files(layers, self.original).items():
            write_json(self.path / name, content)

    def publish(self) -> None:
        """A rename, which replaces nothing; of each file, config.json last, where the folder was there before."""
        if not self._inside:
            self.path.rename(self.result)
            return
        check_folder(self.result, but=self.path.name)
        files = sorted(self.path.iterdir(), key=lambda path: path.name == "config.json")
        try:
            for path in files:
                path.rename(self.result / path.name)
            self.path.rmdir()
        except BaseException:
            for path in files:
                if not path.exists():
                    (self.result / path.name).unlink(missing_ok=True)
            raise

    def discard(self) -> None:
        """Remove the folder, and those that were made for it."""
        self._shards.close()
        shutil.rmtree(self.path, ignore_errors=True)
        _remove(self._made)

    def name_of(self, name: str) -> str:
        """The original's name."""
        return name

    def order_of(self, name: str) -> Tensor | None:
        """The original's order."""
        return None


class GGUFSink:
    """One .gguf file with llama.cpp's names and metadata."""

    def __init__(self, original: Original, target: Target, result: Path, kinds: Mapping[str, int]) -> None:
        check_file(result)
        self.target, self.result = target, result
        self.model = GGUFModel(original)
        self._extra = self.model.extra()
        shapes: dict[str, tuple[int, ...]] = {}
        for item in original.items:
            if item.name in self.model.names:
                name = self.model.names[item.name]
                if isinstance(item, Layer):
                    spec = item.record.spec
                    shapes[f"{name}.weight"] = (spec.n, spec.k)
                    if spec.bias:
                        shapes[f"{name}.bias"] = (spec.n,)
                else:
                    shapes[name] = item.shape
        shapes |= {name: tuple(tensor.shape) for name, tensor in self._extra.items()}
        metadata = self.model.metadata(kinds)
        self.path = result.parent / f"{_partial()}.gguf"
        self._made = _make_parents(self.path)
        self._file = GGUFWriter(self.path, metadata, shapes)

    def others(self) -> tuple[list[str], list[str]]:
        """No files: the tokenizer is in the header. Left are tensors that llama.cpp computes."""
        return [], self.model.left

    def layer(self, layer: Layer, weight: QuantizedWeight) -> int:
        """Rows of blocks in llama.cpp's order."""
        order = self.model.order(layer.name)
        tensors = self.target.pack(weight if order is None else weight.take_rows(order))
        name = self.model.names[layer.name]
        self._file.add(f"{name}.weight", tensors["weight"], blocks.kind_of(weight.spec)[1])
        if "bias" in tensors:
            self._file.add(f"{name}.bias", tensors["bias"], plain_type(tensors["bias"]))
        return sum(tensor.nbytes for tensor in tensors.values())

    def plain(self, name: str, tensor: Tensor) -> int:
        """Vectors as float32, which llama.cpp computes with; matrices in their own dtype."""
        if name not in self.model.names and name.endswith((".weight", ".bias")):
            stem, _, suffix = name.rpartition(".")
            target = f"{self.model.names[stem]}.{suffix}" if stem in self.model.names else None
        else:
            target = self.model.names.get(name)
        if target is None:
            return 0
        order = self.model.order(name)
        tensor = tensor if order is None else tensor.index_select(0, order)
        if tensor.dim() < 2 or tensor.dtype not in _GGUF_FLOATS:
            stored, tensor = tensor, tensor.float()
            if not same_numbers(stored, tensor):
                raise ConversionError(
                    "a plain tensor is not exact in float32, as gguf files store it", tensor=name,
                    found=dtype_name(stored.dtype), fix="--to another format keeps plain tensors as they are",
                )  # fmt: skip
        self._file.add(target, tensor, plain_type(tensor))
        return tensor.nbytes

    def finish(self, layers: Mapping[str, LinearSpec]) -> None:
        """The header, and the tensors that transformers computes."""
        for name, tensor in self._extra.items():
            self._file.add(name, tensor, plain_type(tensor))
        self._file.finish()

    def publish(self) -> None:
        """A rename, where nothing has taken the name meanwhile."""
        check_file(self.result)
        self.path.rename(self.result)

    def discard(self) -> None:
        """Remove the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)
        _remove(self._made)

    def name_of(self, name: str) -> str:
        """llama.cpp's name."""
        return self.model.names[name]

    def order_of(self, name: str) -> Tensor | None:
        """llama.cpp's order of the rows of queries and keys."""
        return self.model.order(name)


_GGUF_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_folder(result: Path, but: str = "") -> None:
    """Refuse a result that is there. but: the one name that a folder may have in it."""
    if result.is_dir() and any(path.name != but for path in result.iterdir()):
        raise InputError("the output folder is not empty", found=result, expected="a new folder, or an empty one")
    if not result.is_dir() and (result.exists() or result.is_symlink()):
        raise InputError("the output is there and is no folder", found=result, expected="a new folder")
    if result.suffix.lower() in (".gguf", ".safetensors"):
        raise InputError("the output of this format is a folder", found=result, fix="name a folder")


def check_file(result: Path) -> None:
    """Refuse a result that is there or is not called a GGUF file."""
    if result.suffix.lower() != ".gguf":
        raise InputError("the output of this format is a file called *.gguf", found=result, expected=f"{result}.gguf")
    if result.exists() or result.is_symlink():
        raise InputError("the output file is there already", found=result, expected="a new name")


def _partial() -> str:
    """A hidden name beside the result or in it, on the same disk, so that a rename finishes it."""
    return f".bitline-{secrets.token_hex(4)}.partial"


def _make_parents(path: Path) -> list[Path]:
    """Make the folders above a path; those that were not there, the outermost first."""
    made: list[Path] = []
    for parent in reversed(path.parents):
        if not parent.is_dir():
            parent.mkdir(exist_ok=True)
            made.append(parent)
    return made


def _remove(made: list[Path]) -> None:
    """Remove folders that were made, where nothing else has come into them."""
    with contextlib.suppress(OSError):
        for folder in reversed(made):
            folder.rmdir()


def _copy(path: Path, to: Path) -> None:
    """A copy of a file's content. What cannot be read is the source's fault and not the disk's."""
    with to.open("wb") as file:
        for chunk in _chunks(path):
            file.write(chunk)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        while True:
            try:
                chunk = file.read(1 << 20)
            except OSError as error:
                raise _unreadable(path, error) from error
            if not chunk:
                return
            yield chunk


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError("a file of the checkpoint cannot be read", file=path, found=error.strerror or error,
                           fix="make it readable, or move it away to convert without it")  # fmt: skip


def count_kinds(forms: Mapping[str, LinearSpec]) -> Counter[str]:
    """How many layers get each GGUF block type, as far as their forms tell."""
    return Counter(blocks.kind_of(form)[0] for form in forms.values())


def cannot_write(error: OSError, result: Path) -> ConversionError:
    """The disk's refusal as a deliberate error."""
    return ConversionError("the result cannot be written, and nothing is left of it", file=result, found=error.strerror or error,
                           fix="make room, or name another disk" if error.errno in (27, 28, 122) else None)  # fmt: skip


__all__ = ["FolderSink", "GGUFSink", "Plain", "Sink", "cannot_write", "check_file", "check_folder", "count_kinds"]
