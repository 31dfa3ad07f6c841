"""quant_method fp8: E4M3 in blocks, as DeepSeek stores it, per row or per tensor. Inputs are always quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.conversion import base
from bitline.conversion.base import NotExact
from bitline.conversion.original import Original
from bitline.types import ActSpec, LinearSpec
from bitline.weight import QuantizedWeight

_E4M3 = types.float8_e4m3fn
_STATIC = ActSpec(_E4M3, dynamic=False, granularity="tensor")


class FP8Target:
    """`weight` and `weight_scale_inv` (blocks) or `weight_scale`, in float32; `input_scale` where inputs are static."""

    name = "fp8"
    embeddings = False

    def __init__(self) -> None:
        self.static = False
        self.block = (0, 0)

    def forms(self, spec: LinearSpec) -> list[LinearSpec]:
        """E4M3 with a scale for a tensor, a row or a block, and the input scheme that belongs to it."""
        base.no_input_factors(spec, self.name)
        if spec.weight is not _E4M3:
            raise NotExact(f"fp8 holds E4M3 codes, and these are {spec.weight.name}")
        base.no_order(spec, "fp8 does not have")
        rows, columns = spec.block
        blocks = rows > 1 and spec.block != (spec.n, spec.k)
        if rows == 1 and columns < spec.k:
            raise NotExact(f"fp8 has scales for tensors, rows and blocks, and these are for {columns} columns of a row")
        if spec.act is None:
            raise NotExact("fp8 always quantizes inputs, and this layer leaves them in 16 bits")
        grouped = spec.act.granularity == "group"
        group = ActSpec(_E4M3, granularity="group", group_size=spec.act.group_size, scale=spec.act.scale)
        fits = grouped and (blocks or spec.block == (spec.n, spec.k)) and spec.act.scale != "e4m3"
        if spec.act not in ((_STATIC, group) if fits else (_STATIC, ActSpec(_E4M3))):
            raise NotExact(f"its input is to be quantized ({spec.act}), which fp8 cannot say for such a weight")
        return [spec.replace(scale_dtype=torch.float32, scale2_block=None)]

    def fallback(self, spec: LinearSpec) -> LinearSpec:
        """E4M3 per row."""
        if spec.act not in (_STATIC, ActSpec(_E4M3)):
            raise NotExact("fp8 quantizes inputs to E4M3, per token or static, and this layer does not")
        return spec.replace(weight=_E4M3, block=(1, spec.k), zero="none", scale2_block=None, scale_dtype=torch.float32,
                            act_order=False, ragged=False, input_multiplier=False)  # fmt: skip

    def settle(self, forms: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotExact]]:
        """One input scheme and one block size for all layers."""
        self.block = base.common_block(forms.values())
        kinds = {name: (base.block_of(form, self.block) or (), _dynamic(form)) for name, form in forms.items()}
        usual = base.common(list(kinds.values())) or ((), None)
        self.static = usual[1] is None
        self.block = usual[0] or (0, 0)
        odd = NotExact("fp8 has one scheme for all layers, and this layer's differs from most others'")
        return dict(forms), {n: odd for n, kind in kinds.items() if kind != usual or not self._same_groups(forms[n])}

    def _same_groups(self, form: LinearSpec) -> bool:
        """Whether inputs are quantized in groups as wide as the blocks, as every reader takes them to be."""
        grouped = form.act is not None and form.act.granularity == "group"
        return not grouped or form.act.group_size == min(self.block[1], form.k)  # type: ignore[union-attr]

    def scales(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float32, which holds every scale."""
        return (torch.float32,)

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Codes are moved; scales multiply under either name."""
        s = weight.spec
        scale = weight.scale.contiguous()
        named = {"weight_scale_inv": scale} if self.block[0] else {"weight_scale": scale.reshape(-1)}
        if s.block == (s.n, s.k) and not self.block[0]:
            named = {"weight_scale": scale.reshape(())}
        tensors = {"weight": weight.codes[:, : s.k].contiguous().view(torch.float8_e4m3fn), **named}
        if weight.input_scale is not None and self.static:
            tensors["input_scale"] = weight.input_scale.float().reshape(())
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def config(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, Any]:
        """One scheme for all."""
        powers = any(form.act is not None and form.act.scale == "e8m0" for form in layers.values())
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" if self.static else "dynamic",
            "weight_block_size": list(self.block) if self.block[0] else None,
            **({"scale_fmt": "ue8m0"} if powers else {}), "modules_to_not_convert": base.left_alone(layers, original),
        }  # fmt: skip

    def files(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, dict[str, Any]]:
        """None: config.json says it all."""
        return {}


def _dynamic(form: LinearSpec) -> str | None:
    """How inputs are quantized as they come, in a word that layers can agree on; None for static scales."""
    if form.act is None or not form.act.dynamic:
        return None
    return form.act.scale if form.act.granularity == "group" else "token"
