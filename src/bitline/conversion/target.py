"""The interface of a conversion target: a checkpoint format that weights are written in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from bitline.conversion.source_model import SourceModel
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

SCALE_DTYPES_16 = (torch.float16, torch.bfloat16)  # most tools expect 16-bit scales; the first that is exact is written


class NotRepresentable(Exception):
    """Why a target cannot store a weight exactly. fix: an option that would help; the caller adds other targets that can."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


class Target(Protocol):
    """A format to write. One instance serves one conversion and sees the specs of all layers before the first is packed.

    name: as in `--to`. quantizes_embeddings: whether the format's tools read quantized embeddings.
    A *stored spec* is the LinearSpec of a weight as the format stores it; its scale_dtype is decided on re-encoding.
    """

    name: str
    quantizes_embeddings: bool

    def stored_specs(self, spec: LinearSpec) -> list[LinearSpec]:
        """Stored specs that may represent such a weight exactly, the smallest first. NotRepresentable if there are none."""
        ...

    def reconcile(self, specs: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotRepresentable]]:
        """Make the layers' stored specs agree where one config covers all of them. -> stored specs, layers that cannot agree."""
        ...

    def lossy_spec(self, spec: LinearSpec) -> LinearSpec:
        """The stored spec that `--lossy` rounds a weight to. NotRepresentable if there is none."""
        ...

    def scale_dtypes(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """Dtypes that scales may be stored in, the preferred first."""
        ...

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors of a weight in a stored spec, by name suffix."""
        ...

    def quantization_config(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, Any]:
        """config.json's quantization_config for these layers, by their stored specs."""
        ...

    def extra_files(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, dict[str, Any]]:
        """Further JSON files, by file name."""
        ...
