"""The first stored spec that represents a weight exactly."""

from __future__ import annotations

from bitline.conversion.reencode import reencode
from bitline.conversion.target import NotRepresentable, Target
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


def exact_encoding(target: Target, weight: QuantizedWeight, stored_specs: list[LinearSpec]) -> QuantizedWeight:
    """The weight in the first stored spec that is exact; NotRepresentable with the last reason if none is."""
    last = NotRepresentable(f"{target.name} has no stored spec for it")
    for stored in stored_specs:
        try:
            encoded = reencode(weight, stored, target.scale_dtypes(weight.spec))
            if encoded.scale2 is not None:
                target.pack(encoded)  # raises if the global scale has no equivalent in the format's convention
            return encoded
        except NotRepresentable as error:
            last = error
    raise last
