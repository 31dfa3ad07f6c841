"""AWQ, version gemm: 4 bits along N, one group size for all layers, no activation order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.conversion import base, packing
from bitline.conversion.base import NotExact
from bitline.conversion.original import HEADS, Original
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

GROUPS = (16, 32, 64, 128)


class AWQTarget:
    """qweight, qzeros and scales. Zero points are always stored; `zero_point: false` says that all are the middle one."""

    name = "awq"
    embeddings = False

    def __init__(self) -> None:
        self.size: int | None = None  # of every group once it is settled, 0 for whole rows

    def forms(self, spec: LinearSpec) -> list[LinearSpec]:
        """Integers of at most 4 bits with a scale for a group of a row. Tools do not agree how AWQ stores other widths."""
        if not base.is_integer(spec) or spec.weight.bits > 4:
            raise NotExact(f"awq holds 4-bit integers, and these are {spec.weight.name} codes")
        base.no_order(spec, "awq does not have")
        base.no_input_factors(spec, "awq")
        base.no_activations(spec, "awq")
        scalar = types.unsigned(4, symmetric=not base.has_zero(spec))
        return [self._checked(base.integer_form(spec, scalar, base.columns_per_scale(spec, GROUPS, whole=True)))]

    def fallback(self, spec: LinearSpec) -> LinearSpec:
        """Symmetric 4-bit integers, in groups of the others' size once it is settled."""
        base.no_activations(spec, "awq")
        form = self._checked(base.rounded_form(spec, (4,)))
        return form if self.size is None else form.replace(block=(1, self.size or form.k))

    def _checked(self, form: LinearSpec) -> LinearSpec:
        if form.n % 8:
            raise NotExact(f"awq packs 8 rows in a word, and the weight has {form.n}")
        return form

    def settle(self, forms: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotExact]]:
        """One group size for all: the largest that divides everyone's. A scale is repeated for smaller groups."""
        if all(form.group_size == -1 for form in forms.values()):
            self.size = 0
            return dict(forms), {}
        whole = math.gcd(*(form.block[1] for form in forms.values()))
        size = max((g for g in GROUPS if whole % g == 0), default=0)
        if size:
            self.size = size
            return {name: form.replace(block=(1, size)) for name, form in forms.items()}, {}
        usual = base.common([form.block[1] for form in forms.values()])
        odd = NotExact(f"awq has one group size for all layers, and this one's groups cannot be cut like the others' ({usual})")
        return dict(forms), {name: odd for name, form in forms.items() if form.block[1] != usual}

    def scales(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float16, as AutoAWQ stores them; bfloat16, as GPTQModel does, where float16 does not hold them."""
        return base.HALVES

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Zero points are stored as they are."""
        scales = weight.scale.t().contiguous()
        fields = torch.full_like(scales, 8, dtype=torch.uint8) if weight.zero is None else weight.zero.t().contiguous()
        tensors = {
            "qweight": packing.awq_words(weight.codes, weight.spec.k),
            "qzeros": packing.field_words(packing.awq_fields(fields), 4), "scales": scales,
        }  # fmt: skip
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def config(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, Any]:
        """One for all layers; those left alone are named."""
        heads = [name for name in layers if name.rpartition(".")[2] in HEADS]
        return {
            "quant_method": "awq", "bits": 4, "group_size": self.size or -1,
            "zero_point": any(base.has_zero(f) for f in layers.values()), "version": "gemm", "lm_head": bool(heads),
            "modules_to_not_convert": base.left_alone(layers, original) or None,
        }  # fmt: skip

    def files(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, dict[str, Any]]:
        """None: config.json says it all."""
        return {}
