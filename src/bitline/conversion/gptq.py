"""GPTQ as a conversion target, in GPTQModel's formats: v1 (symmetric), v2 (zero points), gptq_p (bit planes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.conversion import pack_codes, spec_rules
from bitline.conversion.module_patterns import exact_patterns, group_by_value
from bitline.conversion.source_model import HEADS, SourceModel
from bitline.conversion.target import SCALE_DTYPES_16, NotRepresentable
from bitline.types import LinearSpec
from bitline.version import __version__
from bitline.weight import QuantizedWeight

_BITS = (2, 3, 4, 5, 6, 7, 8)
_PLANAR_BITS = (5, 6, 7)  # GPTQModel packs these as bit planes only
_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # of GPTQModel, and one scale per row


class GPTQTarget:
    """qweight, qzeros, scales and g_idx. Layers that differ from most are overridden in `dynamic`."""

    name = "gptq"
    quantizes_embeddings = False

    def __init__(self) -> None:
        self._checkpoint_format = "gptq"  # of all layers, known after reconcile

    def stored_specs(self, spec: LinearSpec) -> list[LinearSpec]:
        """Integers of 2 to 8 bits with per-group or per-row scales, with or without zero points and act-order."""
        if not spec_rules.is_integer(spec):
            raise NotRepresentable(f"gptq stores integers, and its codes are {spec.weight.name}")
        spec_rules.require_no_input_multiplier(spec, "gptq")
        spec_rules.require_weight_only(spec, "gptq")
        scalar = types.unsigned(max(2, spec.weight.bits), symmetric=not spec_rules.needs_zero_points(spec))
        return [_packable(spec_rules.integer_spec(spec, scalar, spec_rules.stored_group(spec, _GROUP_SIZES)))]

    def lossy_spec(self, spec: LinearSpec) -> LinearSpec:
        """Symmetric integers of as many bits."""
        spec_rules.require_weight_only(spec, "gptq")
        return _packable(spec_rules.symmetric_spec(spec, _BITS))

    def reconcile(self, specs: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotRepresentable]]:
        """One checkpoint_format for all layers: v1 if every layer is symmetric, gptq_p if one needs bit planes."""
        if any(spec.weight.bits in _PLANAR_BITS for spec in specs.values()):
            self._checkpoint_format = "gptq_p"
        elif any(spec_rules.needs_zero_points(spec) for spec in specs.values()):
            self._checkpoint_format = "gptq_v2"
        return dict(specs), {}

    def scale_dtypes(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float16, as most tools store them, else bfloat16."""
        return SCALE_DTYPES_16

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """qweight int32 [K*bits/32, N], qzeros int32 [groups, N*bits/32], scales [groups, N], g_idx int32 [K].

        v1 stores zero points minus one. It is used for symmetric layers only, so no zero point is 0 and none borrows.
        """
        spec, bits = weight.spec, weight.spec.weight.bits
        if spec.ragged and weight.scale.shape[1] != spec.grid[1]:
            groups = f"one group per {spec.block[1]} columns, {spec.grid[1]} in all"
            raise NotRepresentable(f"gptq has {groups}, and this weight has {weight.scale.shape[1]}")
        planar = bits in _PLANAR_BITS or (bits == 3 and self._checkpoint_format == "gptq_p")
        codes = weight.codes if weight.perm is None else pack_codes.undo_act_order(weight.codes, bits, spec.k, weight.perm)
        pack_qweight = pack_codes.pack_gptq_planar if planar else pack_codes.pack_gptq
        scales = weight.scale.t().contiguous()
        symmetric_zero = (1 << (bits - 1)) - (self._checkpoint_format == "gptq")
        zeros = (
            torch.full_like(scales, symmetric_zero, dtype=torch.uint8) if weight.zero is None else weight.zero.t().contiguous()
        )
        tensors = {
            "qweight": pack_qweight(codes, bits, spec.k), "qzeros": pack_codes.pack_int32(zeros, bits, planar=planar),
            "scales": scales, "g_idx": _group_index(weight),
        }  # fmt: skip
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def quantization_config(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, Any]:
        """The most common settings; `dynamic` overrides them for other layers ("+:") and lists ignored modules ("-:")."""
        common_size = spec_rules.common_group_size(layers.values())
        settings = {name: _settings(spec, common_size) for name, spec in layers.items()}
        groups = group_by_value(settings)
        common: Any = groups[0][0]
        ignored = [name for name in source.unquantized_linears() if any(part.isdigit() for part in name.split("."))]
        everything = set(settings) | set(ignored)
        dynamic: dict[str, Any] = {f"-:{p}": {} for p in exact_patterns(ignored, set(settings))}
        for value, names in groups[1:]:
            dynamic |= {f"+:{p}": value for p in exact_patterns(names, everything - set(names))}
        heads = [name for name in layers if name.rpartition(".")[2] in HEADS]
        return {
            "quant_method": "gptq", **common, "lm_head": bool(heads), "true_sequential": True, "pack_dtype": "int32",
            "checkpoint_format": self._checkpoint_format, "format": self._checkpoint_format,
            **({"dynamic": dynamic} if dynamic else {}), "meta": {"quantizer": [f"bitline:{__version__}"]},
        }  # fmt: skip

    def extra_files(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, dict[str, Any]]:
        """None."""
        return {}


def _packable(stored: LinearSpec) -> LinearSpec:
    """The spec itself, if its N and K can be packed."""
    n, k, bits = stored.n, stored.k, stored.weight.bits
    unit = 32 if bits in (3, *_PLANAR_BITS) else 32 // bits
    if k % unit or (bits in (3, *_PLANAR_BITS) and n % 32):
        raise NotRepresentable(f"gptq packs {unit} codes of {bits} bits in whole int32, and the weight is {n} x {k}")
    return stored


def _group_index(weight: QuantizedWeight) -> Tensor:
    """g_idx: the group of each input column, int32 [K]."""
    groups = weight.column_groups().int()
    if weight.perm is not None:
        groups = torch.empty_like(groups).scatter_(0, weight.perm.long(), groups)
    return groups


def _settings(stored: LinearSpec, common_size: int) -> dict[str, Any]:
    size = common_size if stored.k == common_size else stored.group_size
    return {"bits": stored.weight.bits, "group_size": size, "sym": not spec_rules.needs_zero_points(stored),
            "desc_act": stored.act_order}  # fmt: skip
