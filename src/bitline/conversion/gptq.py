"""GPTQ, as GPTQModel reads it: v1 for symmetric weights, v2 with zero points, planar where a width has no other layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.conversion import base, packing
from bitline.conversion.base import NotExact
from bitline.conversion.names import by_value, patterns
from bitline.conversion.original import HEADS, Original
from bitline.types import LinearSpec
from bitline.version import __version__
from bitline.weight import QuantizedWeight

WIDTHS = (2, 3, 4, 5, 6, 7, 8)
PLANAR = (5, 6, 7)  # GPTQModel has no other layout for these
GROUPS = (16, 32, 64, 128, 256, 512, 1024)  # and takes these, or one for a whole row


class GPTQTarget:
    """qweight, qzeros, scales and g_idx; `dynamic` where layers differ."""

    name = "gptq"
    embeddings = False

    def __init__(self) -> None:
        self.format = "gptq"

    def forms(self, spec: LinearSpec) -> list[LinearSpec]:
        """Integers of 2 to 8 bits with one scale a group of a row, with or without zero points, in any column order."""
        if not base.is_integer(spec):
            raise NotExact(f"gptq holds integers, and these are {spec.weight.name} codes")
        base.no_input_factors(spec, "gptq")
        base.no_activations(spec, "gptq")
        width = max(2, spec.weight.bits)
        form = base.integer_form(
            spec, types.unsigned(width, symmetric=not base.has_zero(spec)), base.columns_per_scale(spec, GROUPS)
        )
        return [self._checked(form)]

    def fallback(self, spec: LinearSpec) -> LinearSpec:
        """Symmetric integers of as many bits."""
        base.no_activations(spec, "gptq")
        return self._checked(base.rounded_form(spec, WIDTHS))

    def _checked(self, form: LinearSpec) -> LinearSpec:
        n, k, width = form.n, form.k, form.weight.bits
        whole = 32 if width in (3, *PLANAR) else 32 // width
        if k % whole or (width in (3, *PLANAR) and n % 32):
            raise NotExact(f"gptq packs {width} bits in words of {whole} columns, and the weight is {n} x {k}")
        return form

    def settle(self, forms: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotExact]]:
        """One checkpoint_format for all: the plainest that every layer can have."""
        if any(form.weight.bits in PLANAR for form in forms.values()):
            self.format = "gptq_p"
        elif any(base.has_zero(form) for form in forms.values()):
            self.format = "gptq_v2"
        return dict(forms), {}

    def scales(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float16, as everyone stores them; bfloat16 where float16 does not hold them."""
        return base.HALVES

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """v1 stores a zero point minus one. It has symmetric layers only, so that nothing is ever borrowed."""
        s, width = weight.spec, weight.spec.weight.bits
        if s.ragged and weight.scale.shape[1] != s.grid[1]:
            raise NotExact(f"gptq has one group for {s.block[1]} columns, {s.grid[1]} in all, and this weight has other groups")
        planar = width in PLANAR or (width == 3 and self.format == "gptq_p")
        codes = weight.codes if weight.perm is None else packing.unordered(weight.codes, width, s.k, weight.perm)
        words = packing.planar_words(codes, width, s.k) if planar else packing.column_words(codes, width, s.k)
        middle = (1 << (width - 1)) - (self.format == "gptq")
        scales = weight.scale.t().contiguous()
        fields = torch.full_like(scales, middle, dtype=torch.uint8) if weight.zero is None else weight.zero.t().contiguous()
        order = weight.column_groups().int()
        if weight.perm is not None:
            order = torch.empty_like(order).scatter_(0, weight.perm.long(), order)
        tensors = {
            "qweight": words, "qzeros": packing.field_words(fields, width, planar=planar), "scales": scales, "g_idx": order,
        }  # fmt: skip
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def config(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, Any]:
        """The most common settings, and those of other layers in `dynamic`. Layers left alone are named there with "-:"."""
        usual = base.usual_group(layers.values())
        settings = {name: _settings(form, usual) for name, form in layers.items()}
        groups = by_value(settings)
        first: Any = groups[0][0]
        alone = [name for name in original.plain_linears() if any(part.isdigit() for part in name.split("."))]
        everything = set(settings) | set(alone)
        dynamic: dict[str, Any] = {f"-:{p}": {} for p in patterns(alone, set(settings))}
        for value, names in groups[1:]:
            dynamic |= {f"+:{p}": value for p in patterns(names, everything - set(names))}
        heads = [name for name in layers if name.rpartition(".")[2] in HEADS]
        return {
            "quant_method": "gptq", **first, "lm_head": bool(heads), "true_sequential": True, "pack_dtype": "int32",
            "checkpoint_format": self.format, "format": self.format, **({"dynamic": dynamic} if dynamic else {}),
            "meta": {"quantizer": [f"bitline:{__version__}"]},
        }  # fmt: skip

    def files(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, dict[str, Any]]:
        """None: config.json says it all."""
        return {}


def _settings(form: LinearSpec, usual: int) -> dict[str, Any]:
    size = usual if form.k == usual else form.group_size
    return {"bits": form.weight.bits, "group_size": size, "sym": not base.has_zero(form), "desc_act": form.act_order}
