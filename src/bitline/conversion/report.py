"""What a conversion did, layer by layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerReport:
    """One layer. format: what it was stored as. before, after: its scheme. changes: what was rewritten.

    exact: read back bit for bit. max_error, rms_error: of a layer that was rounded, relative to its largest magnitude and to
    its root mean square. nbytes: in the file it came from; nbytes_after: in the file that was written.
    """

    name: str
    shape: tuple[int, int]
    format: str
    before: str
    after: str
    changes: tuple[str, ...]
    exact: bool
    nbytes: int
    nbytes_after: int
    max_error: float = 0.0
    rms_error: float = 0.0


@dataclass(frozen=True)
class ConversionReport:
    """A finished conversion. copied, left: other files of the folder. notes: what the result does not carry."""

    source: str
    result: str
    source_format: str
    to: str
    layers: tuple[LayerReport, ...]
    plain_tensors: int
    plain_bytes: int
    copied: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def exact(self) -> bool:
        """True where every layer read back bit for bit."""
        return all(layer.exact for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized layers before."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes_after(self) -> int:
        """Bytes of the same layers after."""
        return sum(layer.nbytes_after for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return dataclasses.asdict(self) | {"exact": self.exact, "nbytes": self.nbytes, "nbytes_after": self.nbytes_after}
