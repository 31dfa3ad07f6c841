"""A GGUF file's metadata handed to transformers from the header that Bitline has already parsed."""

from __future__ import annotations

import array
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from bitline.checkpoint import Checkpoint

_INT, _FLOAT, _BOOL, _STRING, _ARRAY = 10, 12, 7, 8, 9  # GGUF's metadata value types
_patch_lock = threading.Lock()


@contextmanager
def use_parsed_header(checkpoint: Checkpoint) -> Iterator[None]:
    """Let transformers read a GGUF file's metadata from Bitline's parsed header instead of parsing the file again.

    transformers parses the header once for the config and once for the tokenizer, with gguf.GGUFReader: three seconds each for
    a vocabulary of 50,000. Within this context GGUFReader is a view of our header, whose bounds are already validated.
    """
    import gguf

    fields = {key: _reader_field(value) for key, value in checkpoint.metadata.items()}
    view = SimpleNamespace(fields=fields, tensors=[SimpleNamespace(name=n) for n in checkpoint.source.tensors])
    with _patch_lock:
        original = gguf.GGUFReader
        gguf.GGUFReader = lambda *_args, **_kwargs: view
        try:
            yield
        finally:
            gguf.GGUFReader = original


def _reader_field(value: Any) -> SimpleNamespace:
    """A metadata value with the attributes of gguf's ReaderField: parts, the indices of the parts with data, value types."""
    if isinstance(value, list | array.array):
        types = {_typed_part(v)[0] for v in value[:1]} or {_INT}
        return SimpleNamespace(parts=_LazyParts(value), data=range(len(value)), types=[_ARRAY, types.pop()])
    value_type, part = _typed_part(value)
    return SimpleNamespace(parts=[part], data=[0], types=[value_type])


class _LazyParts:
    """The parts of an array field, each built on access: all of them at once take a hundred times the array's memory."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        return _typed_part(self._values[index])[1]


def _typed_part(value: Any) -> tuple[int, Any]:
    """A scalar's GGUF value type and its part as gguf's reader would store it."""
    if isinstance(value, str):
        return _STRING, value.encode("utf-8", "surrogateescape")
    return (_BOOL if isinstance(value, bool) else _FLOAT if isinstance(value, float) else _INT), [value]
