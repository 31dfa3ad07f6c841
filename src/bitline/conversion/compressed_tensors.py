"""compressed-tensors, in the layouts of release 0.20 and by its own rule for which layout a scheme has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from bitline import types
from bitline.conversion import base, global_scale, packing
from bitline.conversion.base import NotExact
from bitline.conversion.names import by_value, patterns
from bitline.conversion.original import Original
from bitline.formats.compressed_tensors.config import QuantArgs, act_spec
from bitline.types import ActSpec, LinearSpec
from bitline.weight import QuantizedWeight

VERSION = "0.20.0"  # of the layouts: since 0.18 odd widths are one dense stream
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_E8M0, _E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
# Minifloats with scales of their own kind: (type, scales) to the group size and the layout's name.
_MICRO = {
    ("float4_e2m1", _E4M3): (16, "nvfp4-pack-quantized"), ("float4_e2m1", _E8M0): (32, "mxfp4-pack-quantized"),
    ("float6_e2m3", _E8M0): (32, "mxfp6-pack-quantized"), ("float8_e4m3fn", _E8M0): (32, "mxfp8-quantized"),
}  # fmt: skip


class CompressedTensorsTarget:
    """One config group for each scheme among the layers. Scales keep their dtype."""

    name = "compressed-tensors"
    embeddings = False

    def forms(self, spec: LinearSpec) -> list[LinearSpec]:
        """Integers of 2 to 8 bits per row or group; E4M3 per tensor, row, group or block; NVFP4 and MX."""
        base.no_input_factors(spec, self.name)
        if spec.act is not None:
            activation_args(spec.act)
        base.no_order(spec, "compressed-tensors gave up in release 0.19")
        if base.is_integer(spec):
            return [_integers(spec)]
        if spec.weight.name == "float8_e4m3fn" and (spec.scale_dtype != _E8M0 or spec.block[1] != 32):
            return [_eight_bits(spec)]
        found = _MICRO.get((spec.weight.name, spec.scale_dtype))
        if found is None or spec.block[1] != found[0] or (found[0] == 16) != (spec.scale2_block is not None):
            raise NotExact(f"compressed-tensors has no layout for {spec.scheme} with {types.dtype_name(spec.scale_dtype)} scales")
        if spec.k % found[0]:
            raise NotExact(f"compressed-tensors wants whole groups of {found[0]} columns, and the weight has {spec.k}")
        return [spec.replace(block=(1, found[0]))]

    def fallback(self, spec: LinearSpec) -> LinearSpec:
        """Symmetric integers of as many bits. An input scheme is kept where integers or E4M3 per row go with it."""
        if spec.act is None:
            form = base.rounded_form(spec, tuple(range(2, 9)))
            return form if form.k % form.block[1] == 0 else form.replace(block=(1, form.k))
        activation_args(spec.act)
        plain = spec.replace(act_order=False, ragged=False)
        if spec.act.dtype is types.int8:
            return base.integer_form(plain, types.int8, spec.k, keep_act=True)
        return plain.replace(weight=types.float8_e4m3fn, block=(1, spec.k), zero="none", scale2_block=None,
                             scale_dtype=torch.float32, input_multiplier=False)  # fmt: skip

    def settle(self, forms: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotExact]]:
        """Every layer as it is: a config group each."""
        return dict(forms), {}

    def scales(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """Their own dtype; of products of two scales, the first that holds them."""
        own = spec.scale_dtype if spec.scale2_block is None and spec.scale_dtype in _FLOATS else torch.float16
        return (own, *(dtype for dtype in _FLOATS if dtype != own))

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors of the layout that belongs to the weight's form."""
        s, layout = weight.spec, layout_of(weight.spec)
        tensors = _codes(weight, layout)
        if s.scale_dtype == _E8M0:
            if bool((weight.scale.view(torch.uint8) == 255).any()):
                raise NotExact("one of its E8M0 scales is NaN, which compressed-tensors reads as infinity")
            tensors["weight_scale"] = weight.scale.view(torch.uint8).contiguous()
        else:
            tensors["weight_scale"] = weight.scale.contiguous().reshape(1 if s.block == (s.n, s.k) else weight.scale.shape)
        if s.scale2_block is not None:
            tensors["weight_global_scale"] = global_scale.divisor(weight)
        if weight.input_scale is not None and s.act is not None:
            name = "input_global_scale" if s.act.scale == "e4m3" else "input_scale"
            tensors[name] = weight.input_scale.reshape(1)
            if weight.input_zero is not None and not s.act.symmetric:
                tensors["input_zero_point"] = weight.input_zero.to(torch.int8).reshape(1)
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def config(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, Any]:
        """One group is for all linear layers but those left alone; several name their layers."""
        usual, blocks = base.usual_group(layers.values()), base.common_block(layers.values())
        schemes = {name: _scheme(form, usual, blocks) for name, form in layers.items()}
        groups, names = {}, set(layers) | set(original.plain_linears())
        found = by_value(schemes)
        for i, (scheme, members) in enumerate(found):
            targets = ["Linear"] if len(found) == 1 else _targets(members, names)
            groups[f"group_{i}"] = {"targets": targets, **dict(scheme)}  # type: ignore[call-overload]
        formats = list(dict.fromkeys(group["format"] for group in groups.values()))
        kv = original.quantization if original.quantization.get("quant_method") == "compressed-tensors" else {}
        return {
            "quant_method": "compressed-tensors", "format": formats[0] if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed", "config_groups": groups, "ignore": original.plain_linears(),
            "kv_cache_scheme": kv.get("kv_cache_scheme"), "version": VERSION,
        }  # fmt: skip

    def files(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, dict[str, Any]]:
        """None: config.json says it all."""
        return {}


def _targets(members: list[str], names: set[str]) -> list[str]:
    found = patterns(members, names - set(members))
    return [f"re:{p}" for p in found] if len(found) < len(members) else [f"re:^{p[1:]}" for p in found]


def layout_of(form: LinearSpec) -> str:
    """The layout's name, by the rule of compressed_tensors.compressors.format.infer_module_format."""
    if base.is_integer(form):
        return "pack-quantized" if form.act is None else "int-quantized"
    if (micro := _MICRO.get((form.weight.name, form.scale_dtype))) is not None:
        return micro[1]
    return "naive-quantized" if form.act is None else "float-quantized"


def _integers(spec: LinearSpec) -> LinearSpec:
    width = max(2, spec.weight.bits)
    symmetric = not base.has_zero(spec)
    if spec.act is None:
        columns = base.columns_per_scale(spec, whole=True)
        return base.integer_form(spec, types.unsigned(width, symmetric=symmetric), columns)
    scalar = types.int8 if width == 8 and symmetric else types.unsigned(width, symmetric=symmetric)
    form = base.integer_form(spec, scalar, base.columns_per_scale(spec, whole=True), keep_act=True)
    return form.replace(block=spec.block) if spec.block == (spec.n, spec.k) else form


def _eight_bits(spec: LinearSpec) -> LinearSpec:
    rows, columns = spec.block
    if rows == 1:
        columns = base.columns_per_scale(spec, whole=True)
    return spec.replace(block=(rows, columns), scale_dtype=torch.float32, scale2_block=None)


def _codes(weight: QuantizedWeight, layout: str) -> dict[str, Tensor]:
    s, width = weight.spec, weight.spec.weight.bits
    if layout == "pack-quantized":
        tensors = {"weight_packed": packing.row_words(weight.codes, width, s.k), "weight_shape": torch.tensor([s.n, s.k])}
        if weight.zero is not None:
            tensors["weight_zero_point"] = packing.field_words(weight.zero.t().contiguous(), width).t().contiguous()
        return tensors
    if layout == "int-quantized":
        half = 1 << (width - 1)
        signed = weight.codes if s.weight.signed else packing.signed_bytes(weight.codes, width, s.k)
        tensors = {"weight": signed[:, : s.k].contiguous().view(torch.int8)}
        if weight.zero is not None:
            tensors["weight_zero_point"] = (weight.zero - half).view(torch.int8)  # modulo 256
        return tensors
    if layout in ("float-quantized", "naive-quantized", "mxfp8-quantized"):
        return {"weight": weight.codes[:, : s.k].contiguous().view(torch.float8_e4m3fn)}
    return {"weight_packed": packing.clean_rows(weight.codes, width, s.k)}


# ---- the config ----------------------------------------------------------------------------------------------------------


def _scheme(form: LinearSpec, usual: int, blocks: tuple[int, int]) -> dict[str, Any]:
    """A config group without its targets."""
    weights: dict[str, Any] = {
        "num_bits": form.weight.bits, "type": "int" if base.is_integer(form) else "float", "symmetric": not base.has_zero(form),
        "dynamic": False,
    }  # fmt: skip
    rows, columns = form.block
    if form.scale_dtype in (_E4M3, _E8M0):
        e4m3 = form.scale_dtype == _E4M3
        weights |= {"strategy": "tensor_group" if e4m3 else "group", "group_size": columns,
                    "scale_dtype": "torch.float8_e4m3fn" if e4m3 else "torch.uint8"}  # fmt: skip
    elif (block := base.block_of(form, blocks)) is not None:
        weights |= {"strategy": "block", "block_structure": list(block)}
    elif (rows, columns) == (form.n, form.k) and form.n > 1:
        weights |= {"strategy": "tensor"}
    elif columns == form.k and columns != usual:
        weights |= {"strategy": "channel"}
    else:
        weights |= {"strategy": "group", "group_size": columns}
    acts = None if form.act is None else activation_args(form.act)
    return {"weights": weights, "input_activations": acts, "output_activations": None, "format": layout_of(form)}


def activation_args(act: ActSpec) -> dict[str, Any]:
    """An input scheme in compressed-tensors' words; NotExact where they do not mean the same."""
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
        same = act_spec(msgspec.convert(args, QuantArgs)) == act
    except (ValueError, msgspec.ValidationError):
        same = False
    if not same or (act.scale == "e8m0" and act.group_size != 32) or (act.scale == "e4m3" and act.group_size != 16):
        raise NotExact(f"its input is to be quantized ({act}), which compressed-tensors cannot say",
                       "--weights-only leaves inputs in 16 bits")  # fmt: skip
    return args
