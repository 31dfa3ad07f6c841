"""The exceptions that Bitline raises. Each message says what failed, where, what was found, what was expected, and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_MAX_CHARS = 600  # of one part of a message; a hostile file may put megabytes in any of them


class BitlineError(Exception):
    """Base class of all exceptions that Bitline raises on purpose.

    The message reads: *what* [file *file*, tensor *tensor*, field *field*]: found *found*, expected *expected*. To fix it: *fix*.
    In the message, parts longer than 600 characters are shortened and control characters are escaped, so that a name from a
    file cannot control the terminal. The attributes hold the parts as they are.

    Attributes:
        what: What failed.
        file: The file, as text.
        tensor: The tensor's name in the file, or the layer's.
        field: The entry that is wrong: of a config or a header ("bits", "shape", "general.alignment"), or of a QuantizedWeight
            ("scale", "perm").
        found: What was there, as text.
        expected: What had to be there, as text.
        fix: What to do about it.
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


def summary_of(error: BaseException) -> str:
    """Type and first line of another package's exception, for `found`."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _plain(text: str) -> str:
    """A part of a message, shortened, with control characters escaped."""
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS // 2]} … {text[-_MAX_CHARS // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class CheckpointError(BitlineError, ValueError):
    """A checkpoint is malformed, contradicts itself or has an unknown format. Nothing of it was loaded."""


class WeightError(BitlineError, ValueError):
    """A QuantizedWeight whose tensors do not fit its spec or each other, or a shard that cannot be taken."""


class NoKernelError(BitlineError, ValueError):
    """No kernel that the policy allows can run the layer, or a kernel name, backend or policy is not valid.

    Attributes:
        reasons: One line per kernel that was tried, "name: reason". The message ends with them.
    """

    def __init__(self, what: str, *, reasons: Iterable[str] = (), **parts: Any) -> None:
        self.reasons = tuple(reasons)
        super().__init__(what, **parts)

    def _message(self) -> str:
        return "\n  ".join((super()._message(), *map(_plain, self.reasons)))


class PlatformError(BitlineError, ValueError):
    """A platform string or a device that Bitline does not know, or a device that this machine does not have."""


class ConversionError(BitlineError, ValueError):
    """The target format cannot represent the checkpoint, or the result did not read back as the source. Nothing was written.

    Attributes:
        layers: For each layer that cannot be represented, by name, the reason.
    """

    def __init__(self, what: str, *, layers: Mapping[str, str] | None = None, **parts: Any) -> None:
        self.layers = dict(layers or {})
        super().__init__(what, **parts)


class InputError(BitlineError, ValueError):
    """An argument that a function or layer does not accept: wrong type, shape, dtype, device or value."""


class VerificationError(BitlineError):
    """A loaded layer whose output differs from the reference's by more than the tolerance."""


class OutOfMemoryError(BitlineError, MemoryError):
    """The host or device ran out of memory."""
