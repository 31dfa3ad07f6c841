"""One torchao weight: the tensors of its tensor subclass, and the JSON that describes it in the file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from bitline.errors import CheckpointError
from bitline.formats.base import TensorSource
from bitline.formats.common.module_tensors import ModuleTensors
from bitline.formats.common.scales import FLOATS, grid_of, stored_shapes
from bitline.formats.common.slices import COLUMNS, Axes, Layout, vector_axes
from bitline.formats.io.json_object import parse_object

_MAX_DESCRIPTION = 1 << 16  # characters
_PRE_SCALE = "_weight_act_pre_scale"


class SubclassTensors(ModuleTensors):
    """A module with the description of its weight. kind: the name of the tensor subclass. data: its attributes."""

    def __init__(self, source: TensorSource, name: str) -> None:
        super().__init__(source, name, "_weight_qdata")
        text = getattr(source, "metadata", {}).get(f"{name}.weight")
        if text is None or len(text) > _MAX_DESCRIPTION:
            found = "nothing" if text is None else f"{len(text)} characters"
            raise self.error(self.codes, "the file's metadata does not describe a weight", found, f"__metadata__[{name}.weight]")
        try:
            described = parse_object(text.encode(errors="replace"), self.codes.file, "description of a weight", repeats=True)
        except CheckpointError as error:
            raise self.error(self.codes, error.what, error.found, "the JSON that torchao writes") from error
        self.kind, data = described.get("_type"), described.get("_data")
        if not isinstance(data, Mapping):
            raise self.error(self.codes, "the description of a weight has no _data", type(data).__name__, "an object")
        self.data: Mapping[str, Any] = data

    def over(self, source: TensorSource) -> Self:
        """See ModuleTensors. The description's shape is that of the whole weight, which has been checked."""
        other = super().over(source)
        other.data = {key: value for key, value in self.data.items() if key != "shape"}
        return other

    # ---- attributes ------------------------------------------------------------------------------------------------------

    def attributes(self, key: str) -> Mapping[str, Any] | None:
        """The attributes of a nested object, None where it is absent; what is no object is an error."""
        found = self.data.get(key)
        if found is None:
            return None
        inner = found.get("_data") if isinstance(found, Mapping) else None
        if not isinstance(inner, Mapping):
            raise self.error(self.codes, f"{key} of a weight is not valid", repr(found)[:200], "an object with _type and _data")
        return inner

    def granularity(self, attributes: Mapping[str, Any]) -> str:
        """ "token", "tensor", "group32", … of activations, or the name of a granularity that is none of these."""
        found = attributes.get("granularity")
        name = str(found.get("_type")) if isinstance(found, Mapping) else ""
        inner = found.get("_data") if isinstance(found, Mapping) else None
        inner = inner if isinstance(inner, Mapping) else {}
        size = inner.get("group_size")
        block = inner.get("block_size")
        if isinstance(block, list) and len(block) >= 1 and all(b == 1 for b in block[:-1]):
            size = block[-1]
        if name in ("PerGroup", "PerBlock") and _is_size(size):
            return f"group{size}"
        if name in ("PerRow", "PerToken") and inner.get("dim", -1) in (-1, 1):
            return "token"
        return {"PerTensor": "tensor"}.get(name, name)

    def block_size(self) -> int:
        """block_size as a single number: columns of a scale."""
        found = self.data.get("block_size")
        if not isinstance(found, int) or not _is_size(found):
            raise self.error(self.codes, "block_size of a weight is not valid", found, "a whole number")
        return found

    # ---- scales ----------------------------------------------------------------------------------------------------------

    def scale_block(self, n: int, k: int) -> tuple[int, int]:
        """block_size as the scale block of an [n, k] weight; an absent or empty one is per tensor."""
        block = self.data.get("block_size")
        if block is None or block == []:
            return n, k
        if not isinstance(block, list) or len(block) != 2 or not all(_is_size(b) for b in block):
            raise self.error(self.codes, "block_size of a weight is not valid", block, "[rows, columns]")
        return min(block[0], n), min(block[1], k)

    def scale_grid(self, n: int, k: int, block: tuple[int, int]) -> tuple[int, int]:
        """The grid of scale blocks, which must be stored as floats."""
        grid = grid_of(n, k, block)
        self.require("_weight_scale", FLOATS, stored_shapes(grid, n))
        return grid

    def has_pre_scale(self, k: int) -> bool:
        """Whether activations are multiplied by one factor per column first (AWQ, SmoothQuant)."""
        return self.has_vector(_PRE_SCALE, k, "act_pre_scale")

    def layout(self, codes: Axes, scale: Axes | None) -> Layout:
        """How the module's tensors lie along N and K, all but zero points."""
        pre_scale = self.source.tensors.get(f"{self.name}.{_PRE_SCALE}")  # of MX and NVFP4 weights it is an unknown tensor
        factors: Axes = () if pre_scale is None else vector_axes(COLUMNS, pre_scale.shape)
        return {"_weight_qdata": codes, "_weight_scale": scale, _PRE_SCALE: factors}

    def read_pre_scale(self, k: int) -> Tensor | None:
        """These factors, [k]; None where there are none."""
        return self.read(_PRE_SCALE, k) if self.find(_PRE_SCALE) is not None else None


def described_name(value: object) -> str:
    """The name in a description of a dtype or an enum member; "" where it is neither."""
    return str(value.get("_data")) if isinstance(value, Mapping) else ""


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value < 1 << 40
