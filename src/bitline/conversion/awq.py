"""AWQ as a conversion target: AutoAWQ's gemm version, 4 bits packed along N, one group size for all layers, no act-order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.conversion import pack_codes, spec_rules
from bitline.conversion.source_model import HEADS, SourceModel
from bitline.conversion.target import SCALE_DTYPES_16, NotRepresentable
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

_GROUP_SIZES = (16, 32, 64, 128)
_PER_ROW = 0  # of _group_size


class AWQTarget:
    """qweight, qzeros and scales. qzeros are always stored; `zero_point: false` means that all of them are 8."""

    name = "awq"
    quantizes_embeddings = False

    def __init__(self) -> None:
        self._group_size: int | None = None  # of all layers, known after reconcile

    def stored_specs(self, spec: LinearSpec) -> list[LinearSpec]:
        """Integers of at most 4 bits with per-group or per-row scales. Tools disagree on how AWQ packs other widths."""
        if not spec_rules.is_integer(spec) or spec.weight.bits > 4:
            raise NotRepresentable(f"awq stores 4-bit integers, and its codes are {spec.weight.name}")
        spec_rules.require_no_act_order(spec, "awq")
        spec_rules.require_no_input_multiplier(spec, "awq")
        spec_rules.require_weight_only(spec, "awq")
        scalar = types.unsigned(4, symmetric=not spec_rules.needs_zero_points(spec))
        columns = spec_rules.stored_group(spec, _GROUP_SIZES, divides_k=True)
        return [_packable(spec_rules.integer_spec(spec, scalar, columns))]

    def lossy_spec(self, spec: LinearSpec) -> LinearSpec:
        """Symmetric 4-bit integers, in the other layers' group size once it is known."""
        spec_rules.require_weight_only(spec, "awq")
        stored = _packable(spec_rules.symmetric_spec(spec, (4,)))
        return stored if self._group_size is None else stored.replace(block=(1, self._group_size or stored.k))

    def reconcile(self, specs: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotRepresentable]]:
        """One group size for all layers: the largest that divides every layer's. Scales are repeated for smaller groups."""
        if all(spec.group_size == -1 for spec in specs.values()):
            self._group_size = _PER_ROW
            return dict(specs), {}
        divisor = math.gcd(*(spec.block[1] for spec in specs.values()))
        size = max((g for g in _GROUP_SIZES if divisor % g == 0), default=0)
        if size:
            self._group_size = size
            return {name: spec.replace(block=(1, size)) for name, spec in specs.items()}, {}
        usual = spec_rules.most_common([spec.block[1] for spec in specs.values()])
        conflict = NotRepresentable(
            f"awq has one group size for all layers, and its groups have none in common with the other layers' ({usual})"
        )
        return dict(specs), {name: conflict for name, spec in specs.items() if spec.block[1] != usual}

    def scale_dtypes(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float16, as AutoAWQ stores them, else bfloat16, as GPTQModel does."""
        return SCALE_DTYPES_16

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """qweight int32 [K, N/8], qzeros int32 [groups, N/8], scales [groups, N]. Zero points are stored as they are."""
        scales = weight.scale.t().contiguous()
        zeros = torch.full_like(scales, 8, dtype=torch.uint8) if weight.zero is None else weight.zero.t().contiguous()
        tensors = {
            "qweight": pack_codes.pack_awq(weight.codes, weight.spec.k),
            "qzeros": pack_codes.pack_int32(pack_codes.awq_interleave(zeros), 4), "scales": scales,
        }  # fmt: skip
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def quantization_config(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, Any]:
        """One scheme for all layers, with the ignored modules."""
        heads = [name for name in layers if name.rpartition(".")[2] in HEADS]
        return {
            "quant_method": "awq", "bits": 4, "group_size": self._group_size or -1,
            "zero_point": any(spec_rules.needs_zero_points(spec) for spec in layers.values()), "version": "gemm",
            "lm_head": bool(heads), "modules_to_not_convert": spec_rules.ignored_modules(layers, source) or None,
        }  # fmt: skip

    def extra_files(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, dict[str, Any]]:
        """None."""
        return {}


def _packable(stored: LinearSpec) -> LinearSpec:
    """The spec itself, if its N can be packed."""
    if stored.n % 8:
        raise NotRepresentable(f"awq packs 8 rows in an int32, and N is {stored.n}")
    return stored
