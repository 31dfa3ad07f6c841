"""Every error that Bitline raises on purpose: what, where, what was found, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_LONGEST = 600  # characters of one part in a message; a hostile file may put megabytes in any of them


class BitlineError(Exception):
    """Base of all deliberate errors.

    The message reads: *what* [file *file*, tensor *tensor*, field *field*]: found *found*, expected *expected*. *fix*.
    field is the entry of a config, of a header or of its metadata that is wrong ("bits", "shape", "general.alignment"), or
    the part of a canonical weight ("scale", "perm"). Each part is also an attribute, so a caller can act on it without
    parsing text. In the message a part that is very long is cut, and control characters are escaped: a name out of a file
    never moves a terminal's cursor.
    """

    def __init__(
        self,
        what: str,
        *,
        file: object = None,
        tensor: str | None = None,
        field: str | None = None,
        found: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.tensor, self.field, self.fix = what, tensor, field, fix
        self.file = None if file is None else str(file)
        self.found = None if found is None else str(found)
        self.expected = None if expected is None else str(expected)
        super().__init__(self._message())

    def _message(self) -> str:
        where = [f"file {_plain(self.file)}"] if self.file else []
        where += [f"tensor {_plain(self.tensor)}"] if self.tensor else []
        where += [f"field {_plain(self.field)}"] if self.field else []
        text = _plain(self.what) + (f" [{', '.join(where)}]" if where else "")
        facts = [f"found {_plain(self.found)}"] if self.found is not None else []
        facts += [f"expected {_plain(self.expected)}"] if self.expected is not None else []
        text += f": {', '.join(facts)}" if facts else ""
        return text + (f". To fix it: {_plain(self.fix)}" if self.fix else "")


def _plain(text: str) -> str:
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class CheckpointError(BitlineError, ValueError):
    """A checkpoint cannot be read as what it says it is; nothing of it was used."""


class WeightError(BitlineError, ValueError):
    """A canonical weight contradicts itself."""


class NoKernelError(BitlineError, ValueError):
    """The policy leaves no kernel that can run a layer. reasons: a line for each kernel tried, at the end of the message too."""

    def __init__(self, what: str, *, reasons: Iterable[str] = (), **parts: Any) -> None:
        self.reasons = tuple(reasons)
        super().__init__(what, **parts)

    def _message(self) -> str:
        return "\n  ".join((super()._message(), *map(_plain, self.reasons)))


class PlatformError(BitlineError, ValueError):
    """A platform string or device that Bitline does not know, or that is not here."""


class ConversionError(BitlineError, ValueError):
    """A checkpoint that another format cannot hold, or a result that did not read back as its source; nothing was written.

    layers: the reason for each layer that cannot be held, by name.
    """

    def __init__(self, what: str, *, layers: Mapping[str, str] | None = None, **parts: Any) -> None:
        self.layers = dict(layers or {})
        super().__init__(what, **parts)


class InputError(BitlineError, ValueError):
    """A call with a tensor or an argument that the layer or function cannot take."""


class OutOfMemoryError(BitlineError, MemoryError):
    """The machine or device has too little memory for what was asked."""
