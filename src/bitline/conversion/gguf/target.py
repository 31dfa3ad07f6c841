"""GGUF as a conversion target: legacy block types, in a file that llama.cpp loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline.conversion import spec_rules
from bitline.conversion.gguf import blocks
from bitline.conversion.source_model import SourceModel
from bitline.conversion.target import NotRepresentable
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


class GGUFTarget:
    """Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0 for each layer: the smallest that is exact."""

    name = "gguf"
    quantizes_embeddings = True

    def stored_specs(self, spec: LinearSpec) -> list[LinearSpec]:
        """Integers with one float16 scale per 32 columns."""
        spec_rules.require_no_act_order(spec, "gguf")
        if not spec_rules.is_integer(spec):
            raise NotRepresentable(f"gguf's blocks of 32 store integers, and its codes are {spec.weight.name}")
        spec_rules.require_no_input_multiplier(spec, "gguf")
        spec_rules.require_weight_only(spec, "gguf")
        return blocks.stored_specs(spec)

    def lossy_spec(self, spec: LinearSpec) -> LinearSpec:
        """Q4_0, Q5_0 or Q8_0."""
        spec_rules.require_weight_only(spec, "gguf")
        return blocks.stored_specs(spec_rules.symmetric_spec(spec, (4, 5, 8), (32,)))[0]

    def reconcile(self, specs: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotRepresentable]]:
        """The specs as they are: each tensor has its own type."""
        return dict(specs), {}

    def scale_dtypes(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float16 only."""
        return (torch.float16,)

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Rows of blocks, and the bias as float32, which llama.cpp adds."""
        bias = {} if weight.bias is None else {"bias": weight.bias.float()}
        return {"weight": blocks.to_blocks(weight), **bias}

    def quantization_config(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, Any]:
        """Empty: the file's header has each tensor's type."""
        return {}

    def extra_files(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, dict[str, Any]]:
        """None."""
        return {}
