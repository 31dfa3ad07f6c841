"""Untrusted JSON: bounded, UTF-8, one object, no key with two values. Every failure is a CheckpointError."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.base import MEMORY_MARGIN_BYTES, PYTHON_VALUE_BYTES

MAX_CONFIG_BYTES = 64 << 20


def parse_object(data: bytes, file: Path, what: str, *, repeats: bool = False, size: int = 0) -> dict[str, Any]:
    """The JSON object in `data`. what: "header" or "config", for the message.

    repeats: accept a key given twice with equal values, which a config may have and a header may not. size: bytes of the
    whole file; JSON that would take more memory than the file and 64 MB is refused.
    """
    _check_memory(data, file, what, max(size, len(data)))
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            seen: dict[str, Any] = {}
            for key, value in items:
                if key in seen and not (repeats and seen[key] == value):
                    repeated.append(key)
                    raise ValueError(f"the key {key!r} is given twice")
                seen[key] = value
        return result

    def constant(text: str) -> float:
        if not repeats:  # Python writes NaN and Infinity into configs, no writer puts them into a header
            raise ValueError(f"{text} is not JSON")
        return float(text)

    try:
        text = data.decode("utf-8-sig" if repeats else "utf-8")
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number of thousands of digits
        found = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"the {what} is not valid JSON", file=file, field=repeated[0] if repeated else None, found=found,
            fix="download the file again",
        ) from error  # fmt: skip
    if not isinstance(value, dict):
        raise CheckpointError(f"the {what} is not a JSON object", file=file, found=type(value).__name__)
    return value


def _check_memory(data: bytes, file: Path, what: str, size: int) -> None:
    # One character beyond the basic plane makes every character of a Python string four bytes.
    char_bytes = 4 if not data.isascii() or b"\\u" in data else 1
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    nbytes = values * PYTHON_VALUE_BYTES + len(data) * char_bytes
    if nbytes > size + MEMORY_MARGIN_BYTES:
        raise CheckpointError(
            f"the {what} would take more memory than the whole file", file=file, field=what,
            found=f"about {values} values in {len(data)} bytes", expected=f"what {size} bytes and 64 MB can hold",
        )  # fmt: skip


def invalid_config(error: Exception, file: Path, field: str | None = None) -> CheckpointError:
    """The error about an invalid config. field: its key, unless a msgspec.ValidationError names one."""
    found = re.search(r" - at `\$\.?([^`]+)`$", str(error))
    field = field or (found[1] if found else "quantization_config")
    return CheckpointError("the quantization config is not valid", file=file, field=field, found=error)


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in a config file of at most 64 MiB."""
    try:
        data = read_limited(file, "config")
    except OSError as error:
        raise CheckpointError("the config cannot be read", file=file, found=error.strerror) from error
    return parse_object(data, file, "config", repeats=True)


def read_limited(file: Path, what: str) -> bytes:
    """The bytes of a file of at most 64 MiB, with no more memory than the file is long. what: for the message."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(min(size, MAX_CONFIG_BYTES) + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise CheckpointError(
            f"the {what} is too large", file=file, found=f"{size} bytes", expected=f"at most {MAX_CONFIG_BYTES}"
        )
    return data
