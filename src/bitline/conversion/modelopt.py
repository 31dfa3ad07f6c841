"""ModelOpt's Hugging Face export as a conversion target: FP8, MXFP8, MXFP4, NVFP4, and INT4 with pre_quant_scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.conversion import global_scale, pack_codes, spec_rules
from bitline.conversion.source_model import SourceModel
from bitline.conversion.target import NotRepresentable
from bitline.formats.modelopt.config import QuantAlgorithm
from bitline.types import LinearSpec
from bitline.version import __version__
from bitline.weight import QuantizedWeight

_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_PRODUCER = {"name": "bitline", "version": __version__}


class ModelOptTarget:
    """One algorithm for all layers, or MIXED_PRECISION with one for each layer."""

    name = "modelopt"
    quantizes_embeddings = False

    def stored_specs(self, spec: LinearSpec) -> list[LinearSpec]:
        """The specs of FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, MXFP4, NVFP4, W4A16_NVFP4 and W4A16_AWQ."""
        spec_rules.require_no_act_order(spec, "ModelOpt")
        stored = _int4_spec(spec) if spec_rules.is_integer(spec) else _minifloat_spec(spec)
        _algorithm(stored)
        return [stored]

    def lossy_spec(self, spec: LinearSpec) -> LinearSpec:
        """None: ModelOpt's formats are meant for calibrated rounding."""
        raise NotRepresentable("no layer is rounded for ModelOpt")

    def reconcile(self, specs: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotRepresentable]]:
        """The specs as they are: layers may differ."""
        return dict(specs), {}

    def scale_dtypes(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float32, which represents every scale."""
        return (torch.float32,)

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Packed codes and scales. Global scales are multipliers, of weights and of activations."""
        spec = weight.spec
        tensors = _weight_tensors(weight)
        if weight.input_scale is not None and spec.act is not None:
            divides = spec.act.scale == "e4m3"  # the canonical input scale of NVFP4 is a divisor
            input_scale = global_scale.reciprocal(weight.input_scale) if divides else weight.input_scale.float().reshape(())
            tensors["input_scale"] = input_scale
        if weight.input_multiplier is not None:
            tensors["pre_quant_scale"] = weight.input_multiplier
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def quantization_config(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, Any]:
        """config.json's quantization_config."""
        ignored = source.unquantized_linears()
        return {"quant_method": "modelopt", **_algorithms(layers), "ignore": ignored, "producer": _PRODUCER}

    def extra_files(self, layers: Mapping[str, LinearSpec], source: SourceModel) -> dict[str, dict[str, Any]]:
        """hf_quant_config.json, which some tools read instead of config.json."""
        quantization = {**_algorithms(layers), "kv_cache_quant_algo": None, "exclude_modules": source.unquantized_linears()}
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}


# ---- stored specs --------------------------------------------------------------------------------------------------------


def _int4_spec(spec: LinearSpec) -> LinearSpec:
    """Symmetric 4-bit integers, which ModelOpt packs in pairs of rows."""
    if spec.weight.bits > 4 or spec_rules.needs_zero_points(spec) or spec.n % 2:
        raise NotRepresentable(
            f"ModelOpt's integers are symmetric, of 4 bits and packed in pairs of rows, and this layer's are {spec.scheme}"
        )
    columns = spec_rules.stored_group(spec, divides_k=True)
    stored = spec_rules.integer_spec(spec, types.uint4b8, columns, keep_act=True)
    return stored.replace(input_multiplier=spec.input_multiplier)


def _minifloat_spec(spec: LinearSpec) -> LinearSpec:
    """MX, NVFP4, or E4M3 with float32 scales."""
    spec_rules.require_no_input_multiplier(spec, "this format of ModelOpt")
    size = {_E8M0: 32, _E4M3: 16}.get(spec.scale_dtype, 0)
    if size and spec.block[1] == size and spec.k % size == 0:
        if size == 32 and spec.weight.name in ("float8_e4m3fn", "float4_e2m1"):
            return spec.replace(block=(1, 32))
        if size == 16 and spec.weight.name == "float4_e2m1" and spec.scale2_block == (spec.n, spec.k):
            return spec
    if spec.weight.name == "float8_e4m3fn" and spec.block[1] != 32:
        return spec.replace(scale_dtype=torch.float32, scale2_block=None)
    raise NotRepresentable(f"no algorithm of ModelOpt stores {spec.scheme}")


# ---- tensors -------------------------------------------------------------------------------------------------------------


def _weight_tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    """weight, weight_scale and, for NVFP4, weight_scale_2."""
    spec, scale = weight.spec, weight.scale.contiguous()
    if spec_rules.is_integer(spec):
        return {"weight": pack_codes.pack_modelopt_int4(weight.codes, spec.k), "weight_scale": scale}
    if spec.weight.bits == 8:
        codes = weight.codes[:, : spec.k].contiguous().view(torch.float8_e4m3fn)
        per_row = spec.block == (1, spec.k) and spec.scale_dtype != _E8M0
        shape = () if spec.block == (spec.n, spec.k) else (spec.n,) if per_row else scale.shape
        stored = scale.view(torch.uint8) if spec.scale_dtype == _E8M0 else scale
        return {"weight": codes, "weight_scale": stored.reshape(shape)}
    codes = pack_codes.clear_padding(weight.codes, 4, spec.k)
    if spec.scale_dtype == _E8M0:
        return {"weight": codes, "weight_scale": scale.view(torch.uint8)}
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": global_scale.as_multiplier(weight)}


# ---- the config ----------------------------------------------------------------------------------------------------------


def _algorithms(layers: Mapping[str, LinearSpec]) -> dict[str, Any]:
    """quant_algo and group_size of all layers, or MIXED_PRECISION with those of each."""
    found = {name: _algorithm_entry(spec) for name, spec in layers.items()}
    distinct = list({tuple(value.items()): value for value in found.values()}.values())
    if len(distinct) == 1:
        return distinct[0]
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": found}


def _algorithm_entry(stored: LinearSpec) -> dict[str, Any]:
    name, size = _algorithm(stored)
    return {"quant_algo": name, **({"group_size": size} if size else {})}


def _algorithm(stored: LinearSpec) -> tuple[str, int]:
    """The algorithm of a stored spec, and its group size, 0 where it has none; NotRepresentable if there is none."""
    rows, columns = stored.block
    block = max(rows, columns)
    group_sizes = {
        "W4A16_AWQ": columns, "MXFP4": 32, "NVFP4": columns, "W4A16_NVFP4": columns, "MXFP8": 32,
        "FP8": 0 if stored.block == (stored.n, stored.k) else None,
        "FP8_PER_CHANNEL_PER_TOKEN": 0 if (rows, columns) == (1, stored.k) else None,
        "FP8_PB_WO": block if rows in (block, stored.n) and columns in (block, stored.k) else None,
    }  # fmt: skip
    for name, size in group_sizes.items():
        algorithm = QuantAlgorithm(name)
        if size is not None and algorithm.storage == _storage(stored) and algorithm.act(columns, calibrated=True) == stored.act:
            return name, size
    raise NotRepresentable(f"no algorithm of ModelOpt stores {stored.scheme}")


def _storage(stored: LinearSpec) -> str:
    """`QuantAlgorithm.storage` of a stored spec."""
    if spec_rules.is_integer(stored):
        return "int4"
    return f"{'mxfp' if stored.scale_dtype == _E8M0 else 'nvfp' if stored.weight.bits == 4 else 'fp'}{stored.weight.bits}"
