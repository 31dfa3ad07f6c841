"""A model split over several .gguf files, NAME-00001-of-00003.gguf and so on, as llama.cpp's gguf-split writes them.

The first file has the model's metadata; each has tensors of its own, its number and the number of files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.gguf.header import Header, read_header

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def file_to_open(files: Sequence[Path]) -> Path | None:
    """Of a folder's .gguf files the one to open: the only one, or the first of a split model. None for several models."""
    if len(files) == 1:
        return files[0]
    matches = [_NAME.fullmatch(file.name) for file in files]
    models = {(m[1], m[3]) if m else None for m in matches}
    return min(files, key=lambda file: file.name) if len(models) == 1 and None not in models else None


def read_split(path: Path) -> list[Header]:
    """The headers of all files of the model that starts with this one, in order; a single header for an unsplit model.

    A CheckpointError where it is not the first file, a file is missing, or the files are not of one model.
    """
    first = read_header(path)
    count = _integer(first, "split.count", 1)
    files = _split_files(path, first, count)
    if files is None:
        return [first]
    if path.name != files[0].name:
        number = _NAME.fullmatch(path.name)
        raise CheckpointError(
            "not the first file of a split model", file=path, found=f"part {int(number[2]) if number else 0} of {count}",
            expected=files[0].name,
            fix="open the first file" if files[0].is_file() else "the first file is missing: download it",
        )  # fmt: skip
    if missing := next((file for file in files if not file.is_file()), None):
        raise CheckpointError(
            "a file of a split model is missing", file=missing, found="no such file", expected=f"{count} files in one folder",
            fix="download it, or link it into the folder",
        )  # fmt: skip
    headers = [first, *(read_header(file) for file in files[1:])]
    _check_split(headers, path, count)
    return headers


def _split_files(path: Path, first: Header, count: int) -> list[Path] | None:
    """The files of the model by the name of this one; None for an unsplit model."""
    match = _NAME.fullmatch(path.name)
    named_count = 1 if match is None or "split.count" not in first.metadata else int(match[3])
    if count <= 1 and named_count <= 1:
        return None
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            "one file of a model that is split over several", file=path, field="split.count",
            found=f"split.count = {count}" + ("" if match is None else f" in a file that is named as one of {int(match[3])}"),
            expected=f"a name that ends in -00001-of-{count:05d}.gguf, with the other files beside it",
            fix="restore the names of the files, or join them with llama-gguf-split --merge",
        )  # fmt: skip
    return [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}{path.suffix}") for number in range(1, count + 1)]


def _check_split(headers: list[Header], path: Path, count: int) -> None:
    """Every file is the one that its name says, of the same model, and together they have all tensors."""
    for number, header in enumerate(headers):
        _check_file(headers[0], header, number, count)
    total, expected = sum(len(header.tensors) for header in headers), _integer(headers[0], "split.tensors.count", -1)
    if expected not in (-1, total):
        raise CheckpointError(
            "the files of a split model do not have all of its tensors", file=path, field="split.tensors.count", found=total,
            expected=expected,
            fix="a file belongs to another model, or is of another version: download them again",
        )  # fmt: skip


def _check_file(first: Header, header: Header, number: int, count: int) -> None:
    found = _integer(header, "split.no", -1), _integer(header, "split.count", -1)
    if found != (number, count):
        raise CheckpointError(
            "a file of a split model is not the one that its name says", file=header.path, field="split.no",
            found=f"split.no = {found[0]}, split.count = {found[1]}", expected=f"split.no = {number}, split.count = {count}",
            fix="download it again, or restore the names of the files",
        )  # fmt: skip
    for key, value in header.metadata.items():
        if key != "split.no" and key in first.metadata and first.metadata[key] != value:
            raise CheckpointError(
                "files of different models", file=header.path, field=key, found=f"{key[:80]} = {str(value)[:80]}",
                expected=f"{str(first.metadata[key])[:80]}, as in {first.path.name}", fix="download the files of one model",
            )  # fmt: skip


def _integer(header: Header, key: str, default: int) -> int:
    value: Any = header.metadata.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"{key} is not a number", file=header.path, field=key, found=str(value)[:80], expected="an integer")
    return value
