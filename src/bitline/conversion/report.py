"""What a conversion did, layer by layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerReport:
    """One layer. shape: (N, K). format: the source's. before, after: the scheme, "plain" for a layer that was dequantized.

    changes: what the re-encoding changed, in a few words each. exact: the dequantized float32 read back bit for bit. max_error,
    rms_error: of a layer that was rounded, the largest error over its largest weight and the root mean square of the error over
    that of the weight. nbytes, nbytes_after: in the files of the source and of the result.
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
    """A finished conversion.

    source_format, to: the formats. plain_tensors, plain_bytes: unquantized tensors. copied, left: other files of the folder that
    were copied and left out. notes: what the result does not carry over.
    """

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
        """Bytes of the quantized layers in the source."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes_after(self) -> int:
        """Bytes of the same layers in the result."""
        return sum(layer.nbytes_after for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return dataclasses.asdict(self) | {"exact": self.exact, "nbytes": self.nbytes, "nbytes_after": self.nbytes_after}
