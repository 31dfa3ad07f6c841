"""One module of a Quark checkpoint: its tensors with its config, its scale block, activations and record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from bitline import types
from bitline.formats.base import LayerRecord, TensorSource
from bitline.formats.common.module_tensors import ModuleTensors
from bitline.formats.common.slices import Layout
from bitline.formats.quark.config import QuarkConfig
from bitline.types import ActSpec, LinearSpec, ScalarType

MX_TYPES = {"fp4": types.float4_e2m1, "fp6_e2m3": types.float6_e2m3, "fp6_e3m2": types.float6_e3m2}
ZERO = "weight_zero_point"
_STORED_AS = {
    "scale": "weight_scale", "scale2": "weight_scale_2", "zero": ZERO, "offset": ZERO, "input_scale": "input_scale",
    "input_zero": "input_zero_point",
}  # fmt: skip

WeightFields = dict[str, Tensor | None]  # of a QuantizedWeight, all but the bias


class QuarkModule(ModuleTensors):
    """A module with its config. dtype, qscheme: of its weight. scale: the header of weight_scale."""

    def __init__(self, source: TensorSource, name: str, config: QuarkConfig) -> None:
        super().__init__(source, name)
        self.config, self.pack_order = config.find(name), config.pack_order
        self.weight_spec = self.config.weight
        self.warnings += self.config.warnings
        self.dtype, self.qscheme = self.weight_spec.dtype, self.weight_spec.qscheme

    def check(self) -> None:
        """Refuse transformed activations, and look up the scale."""
        for suffix in ("input_rotation", "input_prescale"):
            if (info := self.find(suffix)) is not None:
                raise self.error(info, "the input of a layer is transformed, which is not supported yet", suffix, "none")
        self.leave_unused("output_scale", "output_zero_point")  # of a KV cache
        self.scale = self.require("weight_scale")

    # ---- scale blocks ----------------------------------------------------------------------------------------------------

    def scale_block(self, n: int, k: int) -> tuple[int, int]:
        """The scale block that the config means."""
        if self.qscheme == "per_group" and self.weight_spec.along_k:
            return self.group_block(n, k, self.scale.shape[-1] if self.scale.shape else 0)
        block = self.weight_spec.scale_block(n, k)
        if block is None:
            what = "weights quantized this way are not supported yet"
            raise self.error(self.codes, what, self.weight_spec.block_text, "per tensor, row, group or block")
        return block

    def group_block(self, n: int, k: int, groups: int) -> tuple[int, int]:
        """The scale block of a weight per group, which must make this many groups of k columns."""
        block = self.weight_spec.scale_block(n, k)
        if block is None or -(-k // block[1]) != groups:
            what, found = "the tensors and the config disagree about groups", f"{groups} groups of {k} columns"
            raise self.error(self.scale, what, found, self.weight_spec.size_text)
        return block

    def num_codes(self, nbytes: int, bits: int) -> int:
        """Codes in this many bytes, which must hold whole ones."""
        if nbytes * 8 % bits or (bits == 3 and nbytes % 3):
            raise self.error(self.codes, "bytes do not hold whole codes", nbytes, f"a multiple of {3 if bits != 4 else 1}")
        return nbytes * 8 // bits

    # ---- the spec --------------------------------------------------------------------------------------------------------

    def spec(self, n: int, k: int, weight: ScalarType, block: tuple[int, int], **fields: Any) -> LinearSpec:
        """The spec, with the config's activation quantization."""
        fields.setdefault("scale_dtype", self.scale.dtype)
        return LinearSpec(n, k, weight, block, act=self._act(), bias=self.has_bias(n), **fields)

    def _act(self) -> ActSpec | None:
        """Activation quantization, None for weight-only. Static scales must exist."""
        if not self.config.inputs:
            self.leave_unused("input_scale", "input_zero_point", "input_scale_2")
            return None
        spec, *scale_specs = self.config.inputs
        dtype, qscheme, dynamic = spec.dtype, spec.qscheme, spec.is_dynamic
        if dynamic and qscheme == "per_group" and (grouped := self._grouped_act(dtype)) is not None:
            return grouped
        per_token = dynamic and qscheme in ("per_channel", "per_token")
        known: dict[str, ScalarType] = {"fp8_e4m3": types.float8_e4m3fn, "int8": types.int8, "uint8": types.int8}
        symmetric = spec.is_symmetric and dtype != "uint8"
        supported = dtype in known and (qscheme == "per_tensor" or per_token) and not scale_specs
        if not supported or not (symmetric or dtype in ("int8", "uint8")):
            found = f"{dtype} {qscheme}, {'dynamic' if dynamic else 'static'}"
            raise self.error(self.codes, "inputs quantized this way are not supported yet", found, "FP8, int8, fp4")
        if not dynamic:
            self.scalar("input_scale")
            if not symmetric:
                self.scalar("input_zero_point", (torch.int8, torch.uint8, torch.int32))
        zeros = self.find("input_zero_point")
        if not dynamic and symmetric and zeros is not None and bool(self.read("input_zero_point").float().any()):
            what = "the config says symmetric, but there are zero points"
            raise self.error(zeros, what, "some that are not 0", "zeros")
        self.leave_unused("input_scale", "input_zero_point")
        return ActSpec(known[dtype], dynamic, "token" if per_token else "tensor", 0, symmetric)

    def _grouped_act(self, dtype: str) -> ActSpec | None:
        """FP8, MXFP4, MXFP6 or NVFP4 activations with a dynamic scale per group of columns; None for any other."""
        spec, *scale_specs = self.config.inputs
        along_k = (spec.along_k or not spec.has_axis) and not any(scale.is_dynamic for scale in scale_specs)
        if not along_k or spec.block_k is None or dtype not in ("fp8_e4m3", *MX_TYPES):
            return None
        if dtype == "fp4" and scale_specs and scale_specs[0].dtype == "fp8_e4m3":
            self.scalar("input_scale_2", (torch.float32,))
            return ActSpec(types.float4_e2m1, True, "group", spec.block_k, scale="e4m3")
        e8m0 = spec.scale_format == "e8m0"
        if scale_specs or not (dtype == "fp8_e4m3" or e8m0):
            return None
        weight = types.float8_e4m3fn if dtype == "fp8_e4m3" else MX_TYPES[dtype]
        return ActSpec(weight, True, "group", spec.block_k, scale="e8m0" if e8m0 else "float")

    # ---- the record ------------------------------------------------------------------------------------------------------

    def over(self, source: TensorSource) -> Self:
        """See ModuleTensors."""
        other = super().over(source)
        other.scale = other.require("weight_scale")
        return other

    def quark_record(
        self, label: str, spec: LinearSpec, read_fields: Callable[[], WeightFields], layout: Layout,
        again: Callable[[Self], LayerRecord],
    ) -> LayerRecord:  # fmt: skip
        """The layer record. read_fields: reads codes, scales and zero points; the activations' scales are added here."""

        def read_all() -> WeightFields:
            return read_fields() | self._read_input_scales(spec.act)

        return self.record(f"quark {label}", spec, read_all, _STORED_AS, layout, again)

    def _read_input_scales(self, act: ActSpec | None) -> WeightFields:
        if act is not None and not act.dynamic:
            fields: WeightFields = {"input_scale": self.read("input_scale").reshape(())}
            if not act.symmetric:
                shift = 128 if self.config.inputs[0].dtype == "uint8" else 0
                fields["input_zero"] = self.read("input_zero_point").reshape(()).int() - shift
            return fields
        if act is not None and act.scale == "e4m3":  # Quark's global scale multiplies, the canonical one divides
            return {"input_scale": self.read_reciprocal("input_scale_2")}
        return {}
