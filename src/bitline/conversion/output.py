"""The interface of a conversion's output, and what outputs share: hidden partial names, refusals of existing paths."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from bitline.conversion.source_model import QuantizedLayer
from bitline.errors import ConversionError, InputError
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


class Output(Protocol):
    """One result being written. path: where it is until `publish` gives it its final name."""

    path: Path

    def write_other_files(self) -> tuple[list[str], list[str]]:
        """Write what does not depend on the weights. -> names of what was copied, names of what was left out."""
        ...

    def write_layer(self, layer: QuantizedLayer, weight: QuantizedWeight) -> int:
        """Write a layer whose weight is in a stored spec; bytes written."""
        ...

    def write_unquantized(self, name: str, tensor: Tensor) -> int:
        """Write an unquantized tensor, given transformers' name of it; bytes written."""
        ...

    def finish(self, layers: Mapping[str, LinearSpec]) -> None:
        """Write everything else. layers: the stored specs of the quantized layers."""
        ...

    def publish(self) -> None:
        """Give the result its final name."""
        ...

    def discard(self) -> None:
        """Remove everything that was written."""
        ...

    def output_name(self, name: str) -> str:
        """The result's name of a module or tensor. KeyError for a tensor that the format leaves out."""
        ...

    def row_order(self, name: str) -> Tensor | None:
        """For each row of a module or tensor in the result, the source's row, int64 [N]; None where the order is the same."""
        ...


# ---- paths ---------------------------------------------------------------------------------------------------------------


def check_new_folder(result: Path, ignored: str = "") -> None:
    """InputError if a folder cannot be the result because it exists and is not empty. ignored: a name that it may contain."""
    if result.is_dir() and any(path.name != ignored for path in result.iterdir()):
        raise InputError("the output folder is not empty", found=result, expected="a new folder, or an empty one")
    if not result.is_dir() and (result.exists() or result.is_symlink()):
        raise InputError("the output exists and is not a folder", found=result, expected="a new folder")
    if result.suffix.lower() in (".gguf", ".safetensors"):
        raise InputError("the output of this format is a folder", found=result, fix="name a folder")


def check_new_gguf_file(result: Path) -> None:
    """InputError if a path cannot be a new GGUF file."""
    if result.suffix.lower() != ".gguf":
        raise InputError("the output of this format is a file named *.gguf", found=result, expected=f"{result}.gguf")
    if result.exists() or result.is_symlink():
        raise InputError("the output file exists already", found=result, expected="a new name")


def partial_name() -> str:
    """A hidden name for an unfinished result, beside or inside its final path: a rename on the same disk finishes it."""
    return f".bitline-{secrets.token_hex(4)}.partial"


def make_parents(path: Path) -> list[Path]:
    """Make the missing folders above a path; those that were made, the outermost first."""
    made: list[Path] = []
    for parent in reversed(path.parents):
        if not parent.is_dir():
            parent.mkdir(exist_ok=True)
            made.append(parent)
    return made


def remove_folders(made: list[Path]) -> None:
    """Remove folders that `make_parents` made, unless something else is in them by now."""
    with contextlib.suppress(OSError):
        for folder in reversed(made):
            folder.rmdir()


def cannot_write(error: OSError, result: Path) -> ConversionError:
    """An operating system error while writing, as a ConversionError."""
    return ConversionError("the result cannot be written, and nothing is left of it", file=result, found=error.strerror or error,
                           fix="make room, or name another disk" if error.errno in (27, 28, 122) else None)  # fmt: skip
