"""A conversion's result as a model folder in transformers' layout: sharded safetensors, config.json and the other files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from bitline.conversion.output import check_new_folder, make_parents, partial_name, remove_folders
from bitline.conversion.shard_writer import ShardWriter, header_bytes, write_json
from bitline.conversion.source_model import QuantizedLayer, SourceModel
from bitline.conversion.target import Target
from bitline.errors import CheckpointError
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

_MAX_TENSORS_PER_LAYER = 8  # in any format


class SafetensorsOutput:
    """An `Output` that writes a model folder. Names and row order are the source's.

    An existing empty folder may be a mount or a working directory: it is kept, and receives the files when they are verified.
    """

    def __init__(self, source: SourceModel, target: Target, result: Path, shard_bytes: int) -> None:
        check_new_folder(result)
        self.source, self.target, self.result = source, target, result
        layers, unquantized = [layer.name for layer in source.layers], [tensor.name for tensor in source.unquantized]
        header_capacity = header_bytes(layers, _MAX_TENSORS_PER_LAYER) + header_bytes(unquantized, 1)
        self._into_existing = result.is_dir()
        self.path = result / partial_name() if self._into_existing else result.parent / partial_name()
        self._made = make_parents(self.path)
        self.path.mkdir()
        self._shards = ShardWriter(self.path, shard_bytes, header_capacity)

    def write_other_files(self) -> tuple[list[str], list[str]]:
        """Copy the source folder's other files, or write the tokenizer that is stored inside the checkpoint."""
        copied, skipped = self.source.other_files()
        for path in copied:
            _copy(path, self.path / path.name)
        if self.source.save_tokenizer is not None:
            self.source.save_tokenizer(self.path)
        return [path.name for path in copied], skipped

    def write_layer(self, layer: QuantizedLayer, weight: QuantizedWeight) -> int:
        """The target's tensors, prefixed with the layer's name; bytes written."""
        tensors = self.target.pack(weight)
        for suffix, tensor in tensors.items():
            self._shards.add(f"{layer.name}.{suffix}", tensor)
        return sum(tensor.nbytes for tensor in tensors.values())

    def write_unquantized(self, name: str, tensor: Tensor) -> int:
        """The tensor as it is; bytes written."""
        self._shards.add(name, tensor)
        return tensor.nbytes

    def finish(self, layers: Mapping[str, LinearSpec]) -> None:
        """config.json with the new quantization config, and the target's further files."""
        self._shards.finish()
        quantization = self.target.quantization_config(layers, self.source)
        write_json(self.path / "config.json", {**self.source.config, "quantization_config": quantization})
        for name, content in self.target.extra_files(layers, self.source).items():
            write_json(self.path / name, content)

    def publish(self) -> None:
        """Rename the folder; into an existing folder, rename each file, config.json last. Replaces nothing."""
        if not self._into_existing:
            self.path.rename(self.result)
            return
        check_new_folder(self.result, ignored=self.path.name)
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
        """Remove the unfinished folder, and the parents that were made for it."""
        self._shards.close()
        shutil.rmtree(self.path, ignore_errors=True)
        remove_folders(self._made)

    def output_name(self, name: str) -> str:
        """The source's name."""
        return name

    def row_order(self, name: str) -> Tensor | None:
        """None: the source's order."""
        return None


def _copy(path: Path, to: Path) -> None:
    """Copy a file's content. A file that cannot be read is a CheckpointError: the source is at fault, not the output's disk."""
    with to.open("wb") as file:
        for chunk in _read_chunks(path):
            file.write(chunk)


def _read_chunks(path: Path) -> Iterator[bytes]:
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
