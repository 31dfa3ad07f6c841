"""GGUF: legacy blocks of 32, in a file that llama.cpp loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline.conversion import base
from bitline.conversion.base import NotExact
from bitline.conversion.gguf import blocks
from bitline.conversion.original import Original
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


class GGUFTarget:
    """Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0 for each layer: the smallest that holds it."""

    name = "gguf"
    embeddings = True

    def forms(self, spec: LinearSpec) -> list[LinearSpec]:
        """Integers with float16 scales that can be repeated for each 32 columns."""
        base.no_order(spec, "gguf does not have")
        if not base.is_integer(spec):
            raise NotExact(f"gguf's blocks of 32 hold integers, and these are {spec.weight.name} codes")
        base.no_input_factors(spec, "gguf")
        base.no_activations(spec, "gguf")
        return blocks.forms(spec)

    def fallback(self, spec: LinearSpec) -> LinearSpec:
        """Q4_0, Q5_0 or Q8_0."""
        base.no_activations(spec, "gguf")
        return blocks.forms(base.rounded_form(spec, (4, 5, 8), (32,)))[0]

    def settle(self, forms: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotExact]]:
        """Every layer as it is."""
        return dict(forms), {}

    def scales(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float16 alone."""
        return (torch.float16,)

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Rows of blocks, and a bias as float32, which is what llama.cpp adds."""
        bias = {} if weight.bias is None else {"bias": weight.bias.float()}
        return {"weight": blocks.to_blocks(weight), **bias}

    def config(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, Any]:
        """Nothing: the header says each tensor's type."""
        return {}

    def files(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, dict[str, Any]]:
        """None."""
        return {}
