"""One weight of torchao: the parts of its tensor subclass, and the JSON that describes it in the file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bitline.errors import CheckpointError
from bitline.formats.base import TensorSource
from bitline.formats.common.module_tensors import FLOATS, Layer
from bitline.formats.io.json_object import parse_object

_MOST = 1 << 16  # bytes of one layer's description
_FACTORS = "_weight_act_pre_scale"


class DescribedLayer(Layer):
    """A module under inspection. kind, data: the class of its weight and that class's attributes."""

    def __init__(self, source: TensorSource, base: str) -> None:
        super().__init__(source, base, "_weight_qdata")
        text = getattr(source, "metadata", {}).get(f"{base}.weight")
        if text is None or len(text) > _MOST:
            found = "nothing" if text is None else f"{len(text)} characters"
            raise self.error(self.main, "the file's metadata does not describe a weight", found, f"__metadata__[{base}.weight]")
        try:
            described = parse_object(text.encode(errors="replace"), self.main.file, "description of a weight", repeats=True)
        except CheckpointError as error:
            raise self.error(self.main, error.what, error.found, "the JSON that torchao writes") from error
        self.kind, data = described.get("_type"), described.get("_data")
        if not isinstance(data, Mapping):
            raise self.error(self.main, "the description of a weight has no _data", type(data).__name__, "an object")
        self.data: Mapping[str, Any] = data

    def values(self, key: str) -> Mapping[str, Any] | None:
        """The attributes of a described object, None where it is absent; what is no object is an error."""
        found = self.data.get(key)
        if found is None:
            return None
        inner = found.get("_data") if isinstance(found, Mapping) else None
        if not isinstance(inner, Mapping):
            raise self.error(self.main, f"{key} of a weight is not valid", repr(found)[:200], "an object with _type and _data")
        return inner

    def granularity(self, values: Mapping[str, Any]) -> str:
        """ "token", "tensor", "group32", … for an input, or the name of what it is instead."""
        found = values.get("granularity")
        name = str(found.get("_type")) if isinstance(found, Mapping) else ""
        inner = found.get("_data") if isinstance(found, Mapping) else None
        inner = inner if isinstance(inner, Mapping) else {}
        size = inner.get("group_size")
        block = inner.get("block_size")
        if isinstance(block, list) and len(block) >= 1 and all(b == 1 for b in block[:-1]):
            size = block[-1]
        if name in ("PerGroup", "PerBlock") and _size(size):
            return f"group{size}"
        if name in ("PerRow", "PerToken") and inner.get("dim", -1) in (-1, 1):
            return "token"
        return {"PerTensor": "tensor"}.get(name, name)

    def size(self, key: str = "block_size") -> int:
        """A whole number of the description."""
        found = self.data.get(key)
        if not isinstance(found, int) or not _size(found):
            raise self.error(self.main, f"{key} of a weight is not valid", found, "a whole number")
        return found

    def block(self, n: int, k: int) -> tuple[int, int]:
        """The block of one scale, of a weight [n, k]; none is the whole weight."""
        block = self.data.get("block_size")
        if block is None or block == []:
            return n, k
        if not isinstance(block, list) or len(block) != 2 or not all(_size(b) for b in block):
            raise self.error(self.main, "block_size of a weight is not valid", block, "[rows, columns]")
        return min(block[0], n), min(block[1], k)

    def scales(self, n: int, k: int, block: tuple[int, int]) -> tuple[int, int]:
        """The grid of scales, which have to be floats on it."""
        grid = (-(-n // block[0]), -(-k // block[1]))
        flat: tuple[tuple[int, ...], ...] = ((), (1,)) if grid == (1, 1) else ((n,),) if grid == (n, 1) else ()
        self.need("_weight_scale", FLOATS, (grid, *flat))
        return grid

    def factors(self, k: int) -> bool:
        """Whether the input is multiplied first, by a number for each column (AWQ, SmoothQuant)."""
        return self.vector(_FACTORS, k, "act_pre_scale")

    def read_factors(self, k: int) -> Tensor | None:
        """These numbers, [k]; None where there are none."""
        return self.read(_FACTORS, k) if self.find(_FACTORS) is not None else None


def dtype_of(value: object) -> str:
    """The name in torchao's description of a dtype or of one of an enum's names; "" where it is none."""
    return str(value.get("_data")) if isinstance(value, Mapping) else ""


def _size(value: object) -> bool:
    return type(value) is int and 1 <= value < 1 << 40
