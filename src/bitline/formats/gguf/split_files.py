"""A model in several .gguf files, NAME-00001-of-00003.gguf and so on, as llama.cpp's gguf-split writes them.

The first part has the model's metadata; each has tensors of its own, and says which part of how many it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.gguf.header import Header, read_header

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def whole_model(files: Sequence[Path]) -> Path | None:
    """The file to open of a folder's .gguf files: the only one, or the first part where all are parts of one model."""
    if len(files) == 1:
        return files[0]
    matches = [_NAME.fullmatch(file.name) for file in files]
    models = {(m[1], m[3]) if m else None for m in matches}
    return min(files, key=lambda file: file.name) if len(models) == 1 and None not in models else None


def read_parts(path: Path) -> list[Header]:
    """The headers of all parts of the model that begins with this file, in their order; one for a model of one file.

    A CheckpointError where it is not the first part, a part is missing, or the parts are not of one model.
    """
    first = read_header(path)
    count, match = _number(first, "split.count", 1), _NAME.fullmatch(path.name)
    named = 1 if match is None or "split.count" not in first.metadata else int(match[3])
    if count <= 1 and named <= 1:
        return [first]
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            "one part of a model that is split over several files", file=path, field="split.count",
            found=f"split.count = {count}" + ("" if match is None else f" in a file that is named as one of {int(match[3])}"),
            expected=f"a name that ends in -00001-of-{count:05d}.gguf, with the other parts beside it",
            fix="give the parts their names back, or join them with llama-gguf-split --merge",
        )  # fmt: skip
    files = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}{path.suffix}") for number in range(1, count + 1)]
    if path.name != files[0].name:
        raise CheckpointError(
            "not the first part of a split model", file=path, found=f"part {int(match[2])} of {count}", expected=files[0].name,
            fix="open the first part" if files[0].is_file() else "the first part is missing: download it",
        )  # fmt: skip
    if missing := next((file for file in files if not file.is_file()), None):
        raise CheckpointError(
            "a part of a split model is missing", file=missing, found="no such file", expected=f"{count} parts in one folder",
            fix="download it, or link it into the folder",
        )  # fmt: skip
    parts = [first, *(read_header(file) for file in files[1:])]
    for number, part in enumerate(parts):
        _check(first, part, number, count)
    total, wanted = sum(len(part.tensors) for part in parts), _number(first, "split.tensors.count", -1)
    if wanted not in (-1, total):
        raise CheckpointError(
            "the parts of a split model do not have all of its tensors", file=path, field="split.tensors.count", found=total,
            expected=wanted,
            fix="a part belongs to another model, or is of another version: download them again",
        )  # fmt: skip
    return parts


def _check(first: Header, part: Header, number: int, count: int) -> None:
    found = _number(part, "split.no", -1), _number(part, "split.count", -1)
    if found != (number, count):
        raise CheckpointError(
            "a part of a split model is not the part that its name says", file=part.path, field="split.no",
            found=f"split.no = {found[0]}, split.count = {found[1]}", expected=f"split.no = {number}, split.count = {count}",
            fix="download it again, or give the parts their names back",
        )  # fmt: skip
    for key, value in part.metadata.items():
        if key != "split.no" and key in first.metadata and first.metadata[key] != value:
            raise CheckpointError(
                "parts of different models", file=part.path, field=key, found=f"{key[:80]} = {str(value)[:80]}",
                expected=f"{str(first.metadata[key])[:80]}, as in {first.path.name}", fix="download the parts of one model",
            )  # fmt: skip


def _number(header: Header, key: str, default: int) -> int:
    value: Any = header.metadata.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"{key} is not a number", file=header.path, field=key, found=str(value)[:80], expected="an integer")
    return value
