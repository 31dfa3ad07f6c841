"""compressed-tensors as a conversion target, in the layouts of release 0.20."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from bitline import types
from bitline.conversion import global_scale, pack_codes, spec_rules
from bitline.conversion.module_patterns import exact_patterns, group_by_value
from bitline.conversion.source_model import SourceModel
from bitline.conversion.target import NotRepresentable
from bitline.formats.compressed_tensors.args import QuantizationArgs, act_spec
from bitline.types import ActSpec, LinearSpec
from bitline.weight import QuantizedWeight

VERSION = "0.20.0"  # of the layouts: since 0.18, widths that do not divide 32 are one dense bit stream
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_E8M0, _E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
# Microscaled types: (weight type, scale dtype) to the group size and the layout's name.
_MICROSCALED = {
    ("float4_e2m1", _E4M3): (16, "nvfp4-pack-quantized"), ("float4_e2m1", _E8M0): (32, "mxfp4-pack-quantized"),
    ("float6_e2m3", _E8M0): (32, "mxfp6-pack-quantized"), ("float8_e4m3fn", _E8M0): (32, "mxfp8-quantized"),
}  # fmt: skip


class CompressedTensorsTarget:
    """One config group for each scheme among the layers. Scales keep their dtype."""

    name = "compressed-tensors"
    quantizes_embeddings = False

    def stored_specs(self, spec: LinearSpec) -> list[LinearSpec]:
        """Integers of 2 to 8 bits per row or group; E4M3 per tensor, row, group or block; NVFP4 and MX."""
        spec_rules.require_no_input_multiplier(spec, self.name)
        if spec.act is not None:
            activation_args(spec.act)
        spec_rules.require_no_act_order(spec, "compressed-tensors since 0.19")
        if spec_rules.is_integer(spec):
            return [_integer_spec(spec)]
        if spec.weight.name == "float8_e4m3fn" and (spec.scale_dtype != _E8M0 or spec.block[1] != 32):
            return [_fp8_spec(spec)]
        return [_microscaled_spec(spec)]

    def lossy_spec(self, spec: LinearSpec) -> LinearSpec:
        """Symmetric integers of as many bits. Activation quantization is kept with int8 or E4M3 weights per row."""
        if spec.act is None:
            stored = spec_rules.symmetric_spec(spec, tuple(range(2, 9)))
            return stored if stored.k % stored.block[1] == 0 else stored.replace(block=(1, stored.k))
        activation_args(spec.act)
        in_order = spec.replace(act_order=False, ragged=False)
        if spec.act.dtype is types.int8:
            return spec_rules.integer_spec(in_order, types.int8, spec.k, keep_act=True)
        return in_order.replace(weight=types.float8_e4m3fn, block=(1, spec.k), zero="none", scale2_block=None,
                                scale_dtype=torch.float32, input_multiplier=False)  # fmt: skip

    def reconcile(self, specs: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotRepresentable]]:
        """The specs as they are: layers that differ get config groups of their own."""
        return dict(specs), {}

    def scale_dtypes(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """The scales' own dtype; for products of two levels of scales, the narrowest that is exact."""
        own = spec.scale_dtype if spec.scale2_block is None and spec.scale_dtype in _FLOATS else torch.float16
        return (own, *(dtype for dtype in _FLOATS if dtype != own))

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors of the layout that belongs to the weight's spec."""
        spec, layout = weight.spec, layout_of(weight.spec)
        tensors = _code_tensors(weight, layout)
        if spec.scale_dtype == _E8M0:
            if bool((weight.scale.view(torch.uint8) == 255).any()):
                raise NotRepresentable("one of its E8M0 scales is NaN, which compressed-tensors reads as infinity")
            tensors["weight_scale"] = weight.scale.view(torch.uint8).contiguous()
        else:
            per_tensor = spec.block == (spec.n, spec.k)
            tensors["weight_scale"] = weight.scale.contiguous().reshape(1 if per_tensor else weight.scale.shape)
        if spec.scale2_block is not None:
            tensors["weight_global_scale"] = global_scale.as_divisor(weight)
        if weight.input_scale is not None and spec.act is not None:
            name = "input_global_scale" if spec.act.scale == "e4m3" else "input_scale"
            tensors[name] = weight.input_scale.reshape(1)
            if weight.input_zero is not None and not spec.act.symmetric:
                tensors["input_zero_point"] = weight.input_zero.to(torch.int8).reshape(1)
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def quantization_config(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, Any]:
        """One config group targets all Linear modules but the ignored ones; several groups name their layers."""
        group_size, block = spec_rules.common_group_size(layers.values()), spec_rules.largest_block(layers.values())
        schemes = {name: _scheme(spec, group_size, block) for name, spec in layers.items()}
        ignored = source.unquantized_linears()
        groups, names = {}, set(layers) | set(ignored)
        distinct = group_by_value(schemes)
        for i, (scheme, members) in enumerate(distinct):
            targets = ["Linear"] if len(distinct) == 1 else _targets(members, names)
            groups[f"group_{i}"] = {"targets": targets, **dict(scheme)}  # type: ignore[call-overload]
        formats = list(dict.fromkeys(group["format"] for group in groups.values()))
        own_config = source.quantization if source.quantization.get("quant_method") == "compressed-tensors" else {}
        return {
            "quant_method": "compressed-tensors", "format": formats[0] if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed", "config_groups": groups, "ignore": ignored,
            "kv_cache_scheme": own_config.get("kv_cache_scheme"), "version": VERSION,
        }  # fmt: skip

    def extra_files(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, dict[str, Any]]:
        """None."""
        return {}


# ---- stored specs and layouts --------------------------------------------------------------------------------------------


def layout_of(stored: LinearSpec) -> str:
    """The layout's name, by the rule of compressed_tensors.compressors.format.infer_module_format."""
    if spec_rules.is_integer(stored):
        return "pack-quantized" if stored.act is None else "int-quantized"
    if (microscaled := _MICROSCALED.get((stored.weight.name, stored.scale_dtype))) is not None:
        return microscaled[1]
    return "naive-quantized" if stored.act is None else "float-quantized"


def _integer_spec(spec: LinearSpec) -> LinearSpec:
    bits = max(2, spec.weight.bits)
    symmetric = not spec_rules.needs_zero_points(spec)
    columns = spec_rules.stored_group(spec, divides_k=True)
    if spec.act is None:
        return spec_rules.integer_spec(spec, types.unsigned(bits, symmetric=symmetric), columns)
    scalar = types.int8 if bits == 8 and symmetric else types.unsigned(bits, symmetric=symmetric)
    stored = spec_rules.integer_spec(spec, scalar, columns, keep_act=True)
    return stored.replace(block=spec.block) if spec.block == (spec.n, spec.k) else stored


def _fp8_spec(spec: LinearSpec) -> LinearSpec:
    rows, columns = spec.block
    if rows == 1:
        columns = spec_rules.stored_group(spec, divides_k=True)
    return spec.replace(block=(rows, columns), scale_dtype=torch.float32, scale2_block=None)


def _microscaled_spec(spec: LinearSpec) -> LinearSpec:
    group_size, _ = _MICROSCALED.get((spec.weight.name, spec.scale_dtype), (0, ""))
    if not group_size or spec.block[1] != group_size or (group_size == 16) != (spec.scale2_block is not None):
        raise NotRepresentable(
            f"compressed-tensors has no layout for {spec.scheme} with {types.dtype_name(spec.scale_dtype)} scales"
        )
    if spec.k % group_size:
        raise NotRepresentable(f"compressed-tensors needs whole groups of {group_size} columns, and K is {spec.k}")
    return spec.replace(block=(1, group_size))


def _code_tensors(weight: QuantizedWeight, layout: str) -> dict[str, Tensor]:
    """Codes and zero points in a layout."""
    spec, bits = weight.spec, weight.spec.weight.bits
    if layout == "pack-quantized":
        packed = pack_codes.pack_rows(weight.codes, bits, spec.k)
        tensors = {"weight_packed": packed, "weight_shape": torch.tensor([spec.n, spec.k])}
        if weight.zero is not None:
            tensors["weight_zero_point"] = pack_codes.pack_int32(weight.zero.t().contiguous(), bits).t().contiguous()
        return tensors
    if layout == "int-quantized":
        signed = weight.codes if spec.weight.signed else pack_codes.signed_bytes(weight.codes, bits, spec.k)
        tensors = {"weight": signed[:, : spec.k].contiguous().view(torch.int8)}
        if weight.zero is not None:
            tensors["weight_zero_point"] = (weight.zero - (1 << (bits - 1))).view(torch.int8)  # modulo 256
        return tensors
    if layout in ("float-quantized", "naive-quantized", "mxfp8-quantized"):
        return {"weight": weight.codes[:, : spec.k].contiguous().view(torch.float8_e4m3fn)}
    return {"weight_packed": pack_codes.clear_padding(weight.codes, bits, spec.k)}


# ---- the config ----------------------------------------------------------------------------------------------------------


def _targets(members: list[str], names: set[str]) -> list[str]:
    """Targets that match these members among all module names."""
    return [f"re:{pattern}" for pattern in exact_patterns(members, names - set(members))]


def _scheme(stored: LinearSpec, common_size: int, largest_block: tuple[int, int]) -> dict[str, Any]:
    """A config group without its targets."""
    weights: dict[str, Any] = {
        "num_bits": stored.weight.bits, "type": "int" if spec_rules.is_integer(stored) else "float",
        "symmetric": not spec_rules.needs_zero_points(stored), "dynamic": False,
    }  # fmt: skip
    rows, columns = stored.block
    if stored.scale_dtype in (_E4M3, _E8M0):
        e4m3 = stored.scale_dtype == _E4M3
        weights |= {"strategy": "tensor_group" if e4m3 else "group", "group_size": columns,
                    "scale_dtype": "torch.float8_e4m3fn" if e4m3 else "torch.uint8"}  # fmt: skip
    elif (block := spec_rules.config_block(stored, largest_block)) is not None:
        weights |= {"strategy": "block", "block_structure": list(block)}
    elif (rows, columns) == (stored.n, stored.k) and stored.n > 1:
        weights |= {"strategy": "tensor"}
    elif columns == stored.k and columns != common_size:
        weights |= {"strategy": "channel"}
    else:
        weights |= {"strategy": "group", "group_size": columns}
    acts = None if stored.act is None else activation_args(stored.act)
    return {"weights": weights, "input_activations": acts, "output_activations": None, "format": layout_of(stored)}


def activation_args(act: ActSpec) -> dict[str, Any]:
    """input_activations of a config group; NotRepresentable where compressed-tensors would read them differently."""
    args: dict[str, Any] = {
        "num_bits": act.dtype.bits, "type": act.dtype.kind, "symmetric": act.symmetric, "strategy": act.granularity,
        "dynamic": act.dynamic,
    }  # fmt: skip
    if act.granularity == "group":
        args["group_size"] = act.group_size
    if act.scale == "e4m3":
        args |= {"strategy": "tensor_group", "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
    elif act.scale == "e8m0":
        args["scale_dtype"] = "torch.uint8"
    try:
        same = act_spec(msgspec.convert(args, QuantizationArgs)) == act
    except (ValueError, msgspec.ValidationError):
        same = False
    if not same or (act.scale == "e8m0" and act.group_size != 32) or (act.scale == "e4m3" and act.group_size != 16):
        raise NotRepresentable(f"its activations are quantized ({act}), which compressed-tensors does not support",
                               "--weights-only drops activation quantization")  # fmt: skip
    return args
