"""quant_method fp8 as a conversion target: E4M3 in DeepSeek's blocks, per row or per tensor; activations always quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.conversion import spec_rules
from bitline.conversion.source_model import SourceModel
from bitline.conversion.target import NotRepresentable
from bitline.types import ActSpec, LinearSpec
from bitline.weight import QuantizedWeight

_E4M3 = types.float8_e4m3fn
_STATIC = ActSpec(_E4M3, dynamic=False, granularity="tensor")
_PER_TOKEN = ActSpec(_E4M3)


class FP8Target:
    """`weight`, and `weight_scale_inv` (blocks) or `weight_scale` in float32; `input_scale` for static activations."""

    name = "fp8"
    quantizes_embeddings = False

    def __init__(self) -> None:
        # Of all layers, known after reconcile:
        self._static = False
        self._block = (0, 0)  # (0, 0): not block-scaled

    def stored_specs(self, spec: LinearSpec) -> list[LinearSpec]:
        """E4M3 with per-tensor, per-row or block scales, and the activation quantization that belongs to them."""
        spec_rules.require_no_input_multiplier(spec, self.name)
        if spec.weight is not _E4M3:
            raise NotRepresentable(f"fp8 stores E4M3, and its codes are {spec.weight.name}")
        spec_rules.require_no_act_order(spec, "fp8")
        rows, columns = spec.block
        per_tensor = spec.block == (spec.n, spec.k)
        if rows == 1 and columns < spec.k:
            raise NotRepresentable(
                f"fp8 has per-tensor, per-row and block scales, and its scales are per {columns} columns of a row"
            )
        if spec.act is None:
            raise NotRepresentable("fp8 always quantizes activations, and this layer does not")
        grouped = ActSpec(_E4M3, granularity="group", group_size=spec.act.group_size, scale=spec.act.scale)
        takes_groups = spec.act.granularity == "group" and (rows > 1 or per_tensor) and spec.act.scale != "e4m3"
        if spec.act not in ((_STATIC, grouped) if takes_groups else (_STATIC, _PER_TOKEN)):
            raise NotRepresentable(f"its activations are quantized ({spec.act}), which fp8 does not support with such a weight")
        return [spec.replace(scale_dtype=torch.float32, scale2_block=None)]

    def lossy_spec(self, spec: LinearSpec) -> LinearSpec:
        """E4M3 per row."""
        if spec.act not in (_STATIC, _PER_TOKEN):
            raise NotRepresentable("fp8 quantizes activations to E4M3, per token or static, and this layer does not")
        return spec.replace(weight=_E4M3, block=(1, spec.k), zero="none", scale2_block=None, scale_dtype=torch.float32,
                            act_order=False, ragged=False, input_multiplier=False)  # fmt: skip

    def reconcile(self, specs: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotRepresentable]]:
        """One activation scheme and one block size for all layers: the most common."""
        largest = spec_rules.largest_block(specs.values())
        schemes = {name: (spec_rules.config_block(spec, largest) or (), _dynamic_scheme(spec)) for name, spec in specs.items()}
        common = spec_rules.most_common(list(schemes.values())) or ((), None)
        self._block, self._static = common[0] or (0, 0), common[1] is None
        conflict = NotRepresentable("fp8 has one scheme for all layers, and this layer's differs from most others'")
        return dict(specs), {
            name: conflict for name, scheme in schemes.items() if scheme != common or not self._groups_match(specs[name])
        }

    def _groups_match(self, stored: LinearSpec) -> bool:
        """Whether activation groups are as wide as the weight's blocks, as every reader assumes."""
        grouped = stored.act is not None and stored.act.granularity == "group"
        return not grouped or stored.act.group_size == min(self._block[1], stored.k)  # type: ignore[union-attr]

    def scale_dtypes(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float32, which represents every scale."""
        return (torch.float32,)

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """weight E4M3 [N, K], and its scales. `weight_scale_inv` multiplies too, in spite of its name."""
        spec = weight.spec
        scale = weight.scale.contiguous()
        if self._block[0]:
            scales = {"weight_scale_inv": scale}
        else:
            scales = {"weight_scale": scale.reshape(() if spec.block == (spec.n, spec.k) else (-1,))}
        tensors = {"weight": weight.codes[:, : spec.k].contiguous().view(torch.float8_e4m3fn), **scales}
        if weight.input_scale is not None and self._static:
            tensors["input_scale"] = weight.input_scale.float().reshape(())
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def quantization_config(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, Any]:
        """One scheme for all layers, with the ignored modules."""
        e8m0_scales = any(spec.act is not None and spec.act.scale == "e8m0" for spec in layers.values())
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" if self._static else "dynamic",
            "weight_block_size": list(self._block) if self._block[0] else None, **({"scale_fmt": "ue8m0"} if e8m0_scales else {}),
            "modules_to_not_convert": spec_rules.ignored_modules(layers, source),
        }  # fmt: skip

    def extra_files(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, dict[str, Any]]:
        """None."""
        return {}


def _dynamic_scheme(stored: LinearSpec) -> str | None:
    """The scheme of dynamic activation quantization: "token", or the scale type of groups. None for static scales."""
    if stored.act is None or not stored.act.dynamic:
        return None
    return stored.act.scale if stored.act.granularity == "group" else "token"
